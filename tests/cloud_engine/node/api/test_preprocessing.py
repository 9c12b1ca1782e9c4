"""Of what a request asks, what the engine must know beside the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from updraft.cloud_engine.node.api.preprocessing import RequestPreprocessor, Tenant
from updraft.embedded.pocket import pocket_large_folder
from updraft.protocol.sampling import SamplingDefaults
from updraft.text.tokenizer import Tokenizer
from updraft.text.tool_formats import ToolFormat

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def jobs() -> RequestPreprocessor:
    tokenizer = Tokenizer.from_folder(pocket_large_folder())
    return RequestPreprocessor(tokenizer, "m", 384, ToolFormat.of("hermes", tokenizer), SamplingDefaults())


@pytest.mark.parametrize(
    ("options", "streamed"),
    [
        ({}, False),
        ({"n": 2, "logprobs": True}, False),
        ({"stream": True}, True),
        ({"stop": ["."]}, True),
        ({"tools": [TOOL], "parallel_tool_calls": False}, True),
    ],
    ids=str,
)
def test_requests_that_need_each_token_at_once(
    jobs: RequestPreprocessor, options: dict[str, Any], streamed: bool
) -> None:
    """Of what a client reads along with, and where the text itself may end an answer, which the engine cannot know."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], **options}
    (generation,) = jobs.chat(msgspec.json.encode(body), Tenant("me")).generations
    assert generation.streamed is streamed
    if "tools" not in options:
        body = {"model": "m", "prompt": ["Hello", "you"], **options} | (
            {"logprobs": 1} if "logprobs" in options else {}
        )
        generations = jobs.completion(msgspec.json.encode(body), Tenant("me")).generations
        assert [generation.streamed for generation in generations] == [streamed] * 2


def test_variables_reach_the_chat_template(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}{% if enable_thinking is false %} Answer{% else %} Think{% endif %}")
    tokenizer = Tokenizer.from_folder(pocket_large_folder(), chat_template=str(template))
    jobs = RequestPreprocessor(tokenizer, "m", 384, None, SamplingDefaults())
    for options, end in (({}, " Think"), ({"enable_thinking": False}, " Answer")):
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "chat_template_kwargs": options}
        (generation,) = jobs.chat(msgspec.json.encode(body), Tenant("me")).generations
        assert tokenizer.decode(generation.prompt_ids).endswith(f"Hello{end}")


@pytest.mark.parametrize(("asked", "used"), [(-(2**62), -100), (-7, -7), (100, 100), (101, 100)])
def test_priorities_are_clamped(jobs: RequestPreprocessor, asked: int, used: int) -> None:
    """The answer's notes name the priority that is used instead."""
    common = {"model": "m", "priority": asked}
    chat = jobs.chat(msgspec.json.encode({**common, "messages": [{"role": "user", "content": "Hi"}]}), Tenant())
    completion = jobs.completion(msgspec.json.encode({**common, "prompt": "Hi"}), Tenant())
    notes = [] if asked == used else [f"priority: {used} is used"]
    for job in (chat, completion):
        assert job.generations[0].priority == used
        assert (job.format.notes.notes if job.format.notes else []) == notes
