"""msgspec's messages reach callers in plain words."""

from __future__ import annotations

import tomllib
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta
from updraft.protocol.validation_messages import plain_words


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    kind: Literal["a", "b"] | None = None
    size: Annotated[int, Meta(ge=1, le=4)] | None = None
    share: Annotated[float, Meta(gt=0, lt=1)] | None = None
    step: Annotated[int, Meta(multiple_of=2)] | None = None
    text: Annotated[str, Meta(min_length=2, pattern="^a")] | None = None
    pair: tuple[int, int] | None = None
    caller: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._-]{1,64}\Z")] | None = None
    day: date | None = None
    table: dict[Annotated[str, Meta(max_length=1)], bool] | None = None


class _File(msgspec.Struct):
    models: Annotated[list[_Entry], Meta(min_length=1)]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "the content must be an object, not a list"),
        ({}, "`models` is missing"),
        ({"models": []}, "`models` must have at least 1 entry"),
        ({"models": {}}, "`models` must be a list, not an object"),
        ({"models": [{}]}, "`models[0].name` is missing"),
        ({"models": [{"name": "x", "nane": 1}]}, "there is no setting `models[0].nane`"),
        ({"models": [{"name": "x", "former": 1}]}, "`models[0].former` is now `current`"),
    ],
)
def test_a_file(value: Any, words: str) -> None:
    assert _words(value, _File) == words


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("kind", "c", "does not accept 'c'"),
        ("kind", 1, "must be a string, not an integer"),
        ("size", 0, "must be at least 1"),
        ("size", 5, "must be at most 4"),
        ("size", 1.5, "must be an integer, not a fraction"),
        ("size", True, "must be an integer, not a boolean"),
        ("share", 0, "must be above 0"),
        ("share", 1, "must be below 1"),
        ("step", 3, "must be a multiple of 2"),
        ("text", "a", "must have at least 2 characters"),
        ("text", "bb", "must match the pattern '^a'"),
        ("caller", "a b", "must have 1 to 64 letters, digits, dots, underscores and hyphens"),
        ("day", "soon", "must be a date such as 2026-01-31"),
        ("pair", [1], "must have 2 entries, got 1"),
    ],
)
def test_a_field(field: str, value: Any, words: str) -> None:
    assert _words({"name": "x", field: value}, _Entry) == f"`{field}` {words}"


def test_a_key() -> None:
    assert _words({"name": "x", "table": {"long": True}}, _Entry) == "a key of `table` must have at most 1 character"
    assert _words({"name": "x", "table": {"k": 1}}, _Entry) == "`table[...]` must be true or false, not an integer"


def test_toml() -> None:
    with pytest.raises(tomllib.TOMLDecodeError) as caught:
        tomllib.loads("a = \n")
    assert plain_words(caught.value) == f"the content is not valid TOML: {caught.value}"
    assert "Invalid value" in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none", f"there is no file {tmp_path / 'none'}"), (tmp_path, "Is a directory")):
        with pytest.raises(OSError) as caught:
            path.read_bytes()
        assert plain_words(caught.value) == words


@pytest.mark.parametrize("message", ["JSON is malformed: invalid character (byte 3)", "look - at `this`", ""])
def test_other_messages_stay(message: str) -> None:
    assert plain_words(ValueError(message)) == message


def _words(value: Any, kind: Any) -> str:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(value, kind)
    return plain_words(caught.value, {"former": "current"})
