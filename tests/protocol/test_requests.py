"""Requests that no server of ours takes, whatever model it serves."""

from __future__ import annotations

import json
from typing import Any

import pytest
from updraft.protocol.errors import InvalidRequestError
from updraft.protocol.requests import ChatRequest, CompletionRequest, parse_chat, parse_completion

ASKED = {"messages": [{"role": "user", "content": "a"}]}


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"model": "m", **ASKED, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "a", **fields}).encode())


@pytest.mark.parametrize("param", ["n", "best_of"])
@pytest.mark.parametrize("count", [0, -1, 129, 2**31, 2**63 - 1])
@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_too_many_answers_are_refused_before_anything_is_sized_by_them(parse, count: int, param: str) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}]} if parse is parse_chat else {"prompt": "a"}
    with pytest.raises(
        InvalidRequestError, match=f"{param} must be {'at least 1' if count < 1 else 'at most 128'}, got {count}"
    ) as caught:
        parse(json.dumps({"model": "m", param: count, **asked}).encode())
    assert caught.value.param == param


def test_null_is_the_default_of_a_switch() -> None:
    shared = dict.fromkeys(["stream", "ignore_eos", "use_beam_search"])
    assert chat(**shared, add_generation_prompt=None, continue_final_message=None) == chat()
    assert completion(**shared, echo=None) == completion()
    nothing = dict.fromkeys(["include_usage", "continuous_usage_stats", "include_obfuscation"])
    assert chat(stream=True, stream_options=nothing) == chat(stream=True, stream_options={})
    assert chat(updraft={"private": None}) == chat(updraft={})
    assert chat().add_generation_prompt is True


@pytest.mark.parametrize("bias", [{"9" * 5000: 1}, {"9" * 11: 1}, {"5": 1, "05": 1}, {"\u0665": 1}, {"": 1}, {"-1": 1}])
def test_keys_of_logit_bias_are_token_ids_each_once(bias: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError, match=r"^logit_bias") as caught:
        chat(logit_bias=bias)
    assert caught.value.param == "logit_bias"
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("param", "value"),
    [("max_tokens", 10**30), ("priority", 10**30), ("stop_token_ids", [10**30]), ("stop_token_ids", [-(10**30)])],
)
@pytest.mark.parametrize("ask", [chat, completion])
def test_integers_out_of_all_bounds_are_refused_by_name(ask: Any, param: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{param} must") as caught:
        ask(**{param: value})
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")


@pytest.mark.parametrize("count", [-1, 21])
def test_a_completion_is_told_of_its_own_field(count: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"^logprobs must be between 0 and 20") as caught:
        completion(logprobs=count)
    assert caught.value.param == "logprobs"
