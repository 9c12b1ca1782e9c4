"""Requests that no server of ours takes, whatever model it serves."""

from __future__ import annotations

import json

import pytest
from updraft.protocol.errors import InvalidRequestError
from updraft.protocol.requests import parse_chat, parse_completion


@pytest.mark.parametrize("param", ["n", "best_of"])
@pytest.mark.parametrize("count", [0, -1, 129, 2**31, 2**63 - 1])
@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_too_many_answers_are_refused_before_anything_is_sized_by_them(parse, count: int, param: str) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}]} if parse is parse_chat else {"prompt": "a"}
    with pytest.raises(InvalidRequestError, match="between 1 and 128") as caught:
        parse(json.dumps({"model": "m", param: count, **asked}).encode())
    assert caught.value.param == param
