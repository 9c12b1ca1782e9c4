"""Long names are refused early, by an error that does not repeat them."""

from typing import Any

import msgspec
import pytest
from updraft.protocol.errors import InvalidRequestError, ModelNotFoundError
from updraft.protocol.safety.names import check_names
from updraft.router.request.chat_request import read_model
from wire_requests import parse_chat, parse_completion

LONG = "canary" + "m" * 8_000_000
TOOL = {"type": "function", "function": {"name": LONG, "parameters": {}}}
CASES: dict[str, dict[str, Any]] = {
    "model": {"model": LONG},
    "user": {"user": LONG},
    "cache_salt": {"cache_salt": LONG},
    "safety_identifier": {"safety_identifier": LONG},
    "prompt_cache_key": {"prompt_cache_key": LONG},
    "service_tier": {"service_tier": LONG},
    "tools": {"tools": [TOOL]},
    "an unknown field": {LONG: 1},
}


@pytest.mark.parametrize("more", CASES.values(), ids=CASES)
def test_an_engine_refuses_it(more: dict[str, Any]) -> None:
    body = {"model": "a", "messages": [{"role": "user", "content": "hi"}], **more}
    with pytest.raises(InvalidRequestError) as refused:
        parse_chat(msgspec.json.encode(body))
    assert len(str(refused.value.to_body())) < 6000


@pytest.mark.parametrize("more", [CASES[name] for name in CASES if name != "an unknown field"])
def test_the_router_refuses_it_before_it_looks_further(more: dict[str, Any]) -> None:
    body = {"model": "auto", "messages": [], **more}
    with pytest.raises(InvalidRequestError) as refused:
        read_model(msgspec.json.encode(body))
    assert len(str(refused.value.to_body())) < 400


def test_a_choice_of_tool() -> None:
    with pytest.raises(InvalidRequestError, match=r"^tool_choice\.function\.name has 8000006 characters") as refused:
        check_names({"tool_choice": TOOL})
    assert refused.value.param == "tool_choice.function.name"


def test_text_completions_too() -> None:
    with pytest.raises(InvalidRequestError, match=r"^user has"):
        parse_completion(msgspec.json.encode({"model": "a", "prompt": "a", "user": LONG}))


def test_names_as_people_have_them_and_other_types_pass() -> None:
    check_names({"model": "org/model:free", "user": "u" * 200, "metadata": {"a": LONG}, "tools": [{"type": "x"}, 3]})
    check_names({"model": 3, "metadata": [], "tools": {}, "tool_choice": "auto"})


def test_every_error_is_short() -> None:
    error = ModelNotFoundError(f"The model {LONG!r} does not exist.", param=LONG)
    assert len(str(error.to_body())) < 6000
    assert error.message.endswith("does not exist.")
