"""Forms of a real HTTP client arrive whole, however they are cut; garbage is refused and nothing else."""

from __future__ import annotations

import re
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.protocol.dialects.multipart import FormParser, FormPart, read_upload
from updraft.protocol.errors import InvalidRequestError

CONTENTS = st.lists(st.sampled_from([b"\r\n", b"--", b"x", b"\r", b"\n--x", b"\r\n--x", bytes(40)])).map(b"".join)


def parse(content_type: str, body: bytes, cuts: list[int]) -> list[tuple[FormPart, bytes]]:
    parser = FormParser(content_type)
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    parts: list[tuple[FormPart, bytes]] = []
    for begin, end in pairwise(edges):
        for part in parser.feed(body[begin:end]):
            if isinstance(part, FormPart):
                parts.append((part, b""))
            else:
                parts[-1] = (parts[-1][0], parts[-1][1] + part)
    parser.end()
    return parts


@given(CONTENTS, st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1), st.lists(st.integers(0)))
def test_httpx_forms_parse_at_any_split(content: bytes, filename: str, cuts: list[int]) -> None:
    request = httpx.Request("POST", "http://a", data={"purpose": "batch"}, files={"file": (filename, content)})
    parts = parse(request.headers["content-type"], request.read(), cuts)
    assert [(part.name, value) for part, value in parts] == [("purpose", b"batch"), ("file", content)]
    assert parts[0][0].filename is None
    if re.fullmatch(r'[^"\\%;=\']+', filename) and filename == filename.strip():
        assert parts[1][0].filename == filename


@given(
    st.lists(
        st.sampled_from(
            (b"--x", b"\r\n", b"--", b"content-disposition: form-data; name=", b'"a"', b":", b"\xff", b"b*=c'd'e")
        )
    ).map(b"".join),
    st.lists(st.integers(0)),
)
def test_garbage_is_refused_and_nothing_else(body: bytes, cuts: list[int]) -> None:
    try:
        parts = parse("multipart/form-data; boundary=x", body, cuts)
    except InvalidRequestError:
        return
    assert b"--x--" in body
    assert sum(len(value) for _, value in parts) <= len(body)


def test_a_head_and_the_number_of_parts_are_bounded() -> None:
    with pytest.raises(InvalidRequestError, match="head"):
        parse("multipart/form-data; boundary=x", b"--x\r\na: " + b"b" * 10_000, [])
    part = b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n'
    with pytest.raises(InvalidRequestError, match="parts"):
        parse("multipart/form-data; boundary=x", part * 70 + b"--x--", [])


def form(*parts: str, end: str = "--x--\r\n") -> bytes:
    return ("".join(f"--x\r\n{part}\r\n" for part in parts) + end).encode()


def field_of(name: str, value: str) -> str:
    return f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}'


def test_model_in_a_form() -> None:
    kind = "multipart/form-data; boundary=x"
    said = field_of("model", "big")
    hidden = 'Content-Disposition: form-data; name="file"; filename="m"\r\n\r\nname="model"\r\n\r\nsmall'
    body = form(hidden, said, field_of("stream", "true"))
    upload = read_upload(kind, body)
    assert (upload.model, upload.stream, body[upload.place]) == ("big", True, b"big")
    for content_type, body in (
        (kind, form(said, said)),
        (kind, form(hidden)),
        (kind, form(field_of("model", ""))),
        (kind, form(field_of("model", "m" * 100_000))),
        (kind, form('Content-Disposition: form-data; name="file"; name="model"\r\n\r\nsmall', said)),
        (kind, form("Content-Disposition: form-data; name*=utf-8''model\r\n\r\nsmall", said)),
        (kind, form(" Content-Disposition: form-data; name=model\r\n\r\nsmall", said)),
        (kind, form(said, end="")),
        (kind, form(said, end="--x--\r\n--x\r\n" + field_of("model", "small"))),
        (kind, form(*[field_of("a", "b")] * 100, said)),
        (kind, form("a: b\r\n" * 1000 + field_of("a", "b"), said)),
        ("application/json", form(said)),
        ("multipart/form-data", form(said)),
        (kind, b""),
    ):
        with pytest.raises(InvalidRequestError):
            read_upload(content_type, body)
