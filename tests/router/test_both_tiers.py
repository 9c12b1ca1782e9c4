"""One behaviour on both tiers: the same requests to the same small model on the device and behind a node."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import updraft
from router_fakes import ScriptedGates
from updraft.local_engine.engine import LocalEngine, LocalOptions
from updraft.router.accounting.prices import Prices
from updraft.router.config import RouterConfig
from updraft.router.factory import open_cloud
from updraft.router.state import Tiers
from updraft.router.tiers.local import EngineLocalTier

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = ROOT / "embedded" / "weights"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Eva"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "person", "description": "Keep it", "parameters": PERSON}},
    {"type": "function", "function": {"name": "now"}},
]
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
CASES: dict[str, dict[str, Any]] = {
    "schema": {"response_format": SCHEMA},
    "json": {"response_format": {"type": "json_object"}, "max_tokens": 5},
    "regex": {"extra_body": {"structured_outputs": {"regex": "[a-f]{4}-[0-9]{2}"}}},
    "choice": {"extra_body": {"structured_outputs": {"choice": ["yes, sir", "no"]}}},
    "grammar": {"extra_body": {"structured_outputs": {"grammar": 'start: "(" start ")" | "x"'}}},
    "required": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "parallel": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 240},
    "named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "person"}}},
    "auto": {"tools": TOOLS, "max_tokens": 12},
    "strict": {"tools": STRICT, "max_tokens": 12},
    "none": {"tools": TOOLS, "tool_choice": "none", "max_tokens": 12},
    "text or call": {"tools": TOOLS, "response_format": SCHEMA},
    "logprobs": {"logprobs": True, "top_logprobs": 3, "max_tokens": 4},
    "stop": {"extra_body": {"structured_outputs": {"regex": "ab-cd-ef"}}, "stop": ["-e"], "logprobs": True},
}


@pytest.fixture(scope="module")
def node() -> Iterator[str]:
    command = [sys.executable, "-m", "updraft", "node", "--port", "0", "--model", str(WEIGHTS / "pocket-small")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".typing"), "OMP_NUM_THREADS": "1"}
    options = ["--tool-call-parser", "hermes", "--threads", "1", "--exit-with-parent"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[1]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def gates() -> ScriptedGates:
    return ScriptedGates()


@pytest.fixture(scope="module")
def client(node: str, gates: ScriptedGates) -> Iterator[updraft.OpenAI]:
    pytest.importorskip("llama_cpp")

    async def load(config: RouterConfig) -> Tiers:
        engine = LocalEngine.load(
            WEIGHTS / "pocket-small.gguf", LocalOptions(tool_call_parser="hermes", model_id="device")
        )
        return Tiers(EngineLocalTier(engine), open_cloud(config), gates)

    config = RouterConfig(
        local="pocket",
        cloud_url=f"{node}/v1",
        cloud_model="pocket-small",
        hold_tokens=2,
        cloud_continues=True,
        prices=Prices(cloud_input=0.5, cloud_output=1.5),
    )
    with updraft.OpenAI(config=config, max_retries=0) as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("updraft.router.router.load_tiers", load)
            client.models.list()  # now they are loaded
        yield client


def ask(client: updraft.OpenAI, model: str, **options: Any) -> Any:
    question = {"messages": [{"role": "user", "content": "Extract as JSON: Ada is 36."}], "max_tokens": 64, "seed": 5}
    return client.chat.completions.create(**{"model": model, "temperature": 0.0, **question, **options})


def shape(value: Any) -> Any:
    """An app's view of an answer, without the answer."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def joined(chunks: list[Any]) -> dict[str, Any]:
    """A stream as the message it makes, by OpenAI's rules."""
    message: dict[str, Any] = {"role": chunks[0].choices[0].delta.role, "content": "", "calls": []}
    scores: list[str] = []
    for choice in (chunk.choices[0] for chunk in chunks if chunk.choices):
        message["content"] += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert (call.index, call.type) == (len(message["calls"]), "function")
                message["calls"].append([call.function.name, ""])
            message["calls"][call.index][1] += call.function.arguments or ""
        scores += [one.token for one in (choice.logprobs and choice.logprobs.content) or ()]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == [reasons[-1]]
    return {**message, "finish_reason": reasons[-1], "scores": scores}


@pytest.mark.parametrize("name", CASES)
def test_an_app_cannot_tell_the_tiers_apart(client: updraft.OpenAI, name: str) -> None:
    options = CASES[name]
    answers = {model: ask(client, model, **options) for model in ("local", "cloud")}
    for model, answer in answers.items():
        assert answer.updraft["tier"] == model, answer.updraft["reason"]
        choice = answer.choices[0]
        streamed = joined(list(ask(client, model, **options, stream=True)))
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
        scores = [one.token for one in (choice.logprobs and choice.logprobs.content) or ()]
        assert streamed == {
            "role": "assistant",
            "content": choice.message.content or "",
            "calls": calls,
            "finish_reason": choice.finish_reason,
            "scores": scores,
        }
        for called, arguments in calls:
            if choice.finish_reason == "tool_calls":
                assert (called == "person") == (set(json.loads(arguments)) == {"name", "age"})
    device, cloud = (answers[model].model_dump(exclude_unset=True) for model in ("local", "cloud"))
    assert shape(device) == shape(cloud)
    left, right = device["choices"][0], cloud["choices"][0]
    assert left["finish_reason"] == right["finish_reason"]
    if name in ("schema", "regex", "choice", "stop", "none"):  # the model is sure enough in both precisions
        assert left["message"] == right["message"]
    if name == "text or call":
        for message in (left["message"], right["message"]):
            assert message.get("tool_calls") or set(json.loads(message["content"])) == {"name", "age"}
    if name == "stop":
        assert left["message"]["content"] == "ab-cd"
        assert [one["token"] for one in left["logprobs"]["content"]] == [
            one["token"] for one in right["logprobs"]["content"]
        ]


def test_calls_and_their_results_go_back_to_the_device(client: updraft.OpenAI) -> None:
    options = {"tools": TOOLS, "tool_choice": "required"}
    message = ask(client, "local", **options).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "kept"} for call in message.tool_calls]
    again = ask(
        client, "local", messages=[{"role": "user", "content": "Hi"}, message, *results], max_tokens=4, tools=TOOLS
    )
    assert again.choices[0].finish_reason in ("stop", "length")


def test_parse_into_a_class_on_the_device(client: updraft.OpenAI) -> None:
    import pydantic

    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=8)
        age: int

    messages: list[Any] = [{"role": "user", "content": "Extract as JSON: Ada is 36."}]
    answer = client.chat.completions.parse(model="local", messages=messages, response_format=Person, max_tokens=60)
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "structured_outputs", "regex"),
        (
            {"extra_body": {"structured_outputs": {"json": {"multipleOf": 1234567, "type": "integer"}}}},
            "structured_outputs",
            "simplify",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
            "not",
        ),
    ],
    ids=["wrong", "hostile", "tools"],
)
def test_unusable_constraints_are_refused_alike(
    client: updraft.OpenAI, fields: dict[str, Any], param: str, says: str, stream: bool
) -> None:
    refusals: list[Any] = []
    for model in ("local", "cloud"):
        with pytest.raises(openai.BadRequestError, match=says) as caught:
            ask(client, model, **fields, stream=stream)
        assert caught.value.param == param
        refusals.append(caught.value.body)
    assert refusals[0] == refusals[1]
    assert ask(client, "local", max_tokens=1).choices[0].finish_reason == "length"


def test_a_judged_call_is_held_and_an_unsure_one_comes_from_the_cloud(
    client: updraft.OpenAI, gates: ScriptedGates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stream is handed over in the middle of a form, whatever `hold_tokens` says."""
    finite = {"type": "object", "properties": {"loud": {"type": "boolean"}}, "required": ["loud"]}
    ring = {"name": "ring", "parameters": {**finite, "additionalProperties": False}}
    tools = [{"type": "function", "function": ring}]
    options = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "stream": True}
    for after, route in ((False, "local"), (True, "cloud")):
        monkeypatch.setattr(gates, "_after", after)
        chunks = list(ask(client, "auto", **options))
        assert joined(chunks)["finish_reason"] == "tool_calls"
        assert [chunk.updraft["route"] for chunk in chunks if getattr(chunk, "updraft", None)] == [route]


def test_a_model_without_a_format_leaves_tools_to_the_cloud(node: str) -> None:
    config = RouterConfig(local="pocket", cloud_url=f"{node}/v1", cloud_model="pocket-small", confidence=0.8)
    with updraft.OpenAI(config=config, max_retries=0) as client:
        answer = ask(client, "auto", tools=TOOLS, tool_choice="required")
        assert re.match("beyond the device: tools: the local model's chat template", answer.updraft["reason"])
        with pytest.raises(openai.BadRequestError, match="chat template") as caught:
            ask(client, "local", tools=TOOLS)
        assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
        assert ask(client, "local", response_format=SCHEMA).updraft["route"] == "local"


SCRIPT = """
import updraft
from updraft.router.config import RouterConfig
client = updraft.OpenAI(config=RouterConfig(local="pocket"))
answer = client.chat.completions.create(
    model="local", messages=[{"role": "user", "content": "hi"}], extra_body={"structured_outputs": {"regex": "abc"}}
)
print(answer.choices[0].message.content)
"""


def test_a_script_that_asked_for_a_form_ends_quietly() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "abc\n", "")
