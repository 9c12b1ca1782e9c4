"""Odd encodings and shapes of other servers lose no words and no answer."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from updraft.protocol.http.lenient_json import error_in, json_bytes, json_of, split_final_event, standard_json


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b'\xef\xbb\xbf{"a": "b"}', "b"),
        (json.dumps({"a": "b"}).encode("utf-16"), "b"),
        ('{"a": "caf\xe9"}'.encode("latin-1"), "caf\ufffd"),
        (b'{"a": "b", "x": NaN, "y": -Infinity}', "b"),
        (rb'{"a": "\ud83d"}', "\ufffd"),
        (rb'{"a": "\ud83d\ude00", "x": NaN}', "\U0001f600"),
    ],
    ids=["mark", "utf-16", "latin-1", "nan", "half a pair", "a pair"],
)
def test_odd_json_is_read(raw: bytes, text: str) -> None:
    assert json_of(raw)["a"] == text
    exact = json_of(raw, exact=True)
    assert exact["a"] == ("\ud83d" if b"ud83d" in raw and b"ude00" not in raw else text)
    assert json_of(json_bytes(exact), exact=True) == exact


def test_only_json_that_strict_parsers_refuse_is_encoded_again() -> None:
    for raw in (rb'{"a": "\ud83d", "x": 1.10}', b'{"x": 1E2}'):
        assert standard_json(raw) == raw
    for raw in (b'{"x": NaN}', b'{"x": -Infinity}', b'\xef\xbb\xbf{"x": 1e999}'):
        assert standard_json(raw) == b'{"x":null}'


@pytest.mark.parametrize(
    "raw",
    [b"", b"<html>", b"{", b"[" * 100_000, gzip.compress(b"{}", mtime=0)],
    ids=["empty", "page", "cut", "deep", "compressed"],
)
def test_invalid_json_is_reported(raw: bytes) -> None:
    with pytest.raises(ValueError, match="not JSON"):
        json_of(raw)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            [{"error": {"code": 400, "message": "API key not valid.", "status": "INVALID_ARGUMENT"}}],
            "API key not valid.",
        ),
        ("just words", "just words"),
        ({"error": ["one", {"message": "two"}]}, "one; two"),
        ({"error": {"error": {"message": "deep"}}}, "deep"),
        ({"error": {"message": {"detail": "inside"}}}, "inside"),
        ({"detail": {"message": "inside"}}, "inside"),
        ({"detail": {"error": "inside"}}, "inside"),
        ({"detail": [{"loc": ["body", "n"], "msg": "too many"}, "and more"]}, "body.n: too many; and more"),
        ({"errors": [{"message": "first"}]}, "first"),
        ({"title": "Bad request", "status": 400}, "Bad request"),
        ({"error": {"type": "t"}}, "It said."),
        ([1, 2], "It said."),
        (None, "It said."),
    ],
    ids=str,
)
def test_the_words_of_an_error_are_found_in_any_shape(body: Any, message: str) -> None:
    error = error_in(json.dumps(body).encode(), 400, "It said")
    assert error["message"] == message
    assert error.keys() >= {"message", "type", "param", "code"}


def test_packed_bytes_are_no_words() -> None:
    assert error_in(gzip.compress(b"secret"), 400, "It said")["message"] == "It said."


def test_the_last_text_and_the_finish_come_apart() -> None:
    finish = {
        "choices": [{"index": 0, "delta": {"content": "lo"}, "finish_reason": "stop"}],
        "usage": {"total_tokens": 1},
    }
    text, end = split_final_event(finish)
    assert text == {"choices": [{"index": 0, "delta": {"content": "lo"}, "finish_reason": None}]}
    assert end["choices"][0]["delta"] == {} and end["choices"][0]["finish_reason"] == "stop" and end["usage"]
    assert split_final_event(end) == (None, end)
