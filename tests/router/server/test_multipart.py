"""Forms of a real HTTP client arrive whole, however they are cut; garbage is refused and nothing else."""

from __future__ import annotations

import re
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.protocol.errors import InvalidRequestError
from updraft.router.server.batches.multipart import FormParser, FormPart

CONTENTS = st.lists(st.sampled_from([b"\r\n", b"--", b"x", b"\r", b"\n--x", b"\r\n--x", bytes(40)])).map(b"".join)


def parse(content_type: str, body: bytes, cuts: list[int]) -> list[tuple[FormPart, bytes]]:
    parser = FormParser(content_type)
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    parts: list[tuple[FormPart, bytes]] = []
    for begin, end in pairwise(edges):
        for found in parser.feed(body[begin:end]):
            if isinstance(found, FormPart):
                parts.append((found, b""))
            else:
                parts[-1] = (parts[-1][0], parts[-1][1] + found)
    parser.end()
    return parts


@given(CONTENTS, st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1), st.lists(st.integers(0)))
def test_what_httpx_sends_arrives_however_it_is_cut(content: bytes, filename: str, cuts: list[int]) -> None:
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
        parse("multipart/form-data; boundary=x", part * 40 + b"--x--", [])
