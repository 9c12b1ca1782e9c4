"""Streamed text completions of a cloud: several answers, scores, usage, an error in the middle, a reader who leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import updraft
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from updraft.router.config import RouterConfig
from waiting import ledger_rows, wait_for

SCORES = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}], "text_offset": [0]}
ASKED: dict[str, Any] = {"model": "cloud", "prompt": "once", "stream": True}


@dataclass
class Cloud:
    """A stream of the given events. Without a final event, the stream stays open and silent."""

    url: str = ""
    events: list[bytes] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    cut: bool = False
    left: int = 0

    def says(self, *choices: dict[str, Any], end: bytes = b"data: [DONE]\n\n", usage: Any = None) -> None:
        shell = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "big"}
        told = [{**shell, "choices": [{"logprobs": None, "finish_reason": None, **each}]} for each in choices]
        told += [{**shell, "choices": [], "usage": usage}] if usage else []
        self.events = [*(b"data: " + json.dumps(each).encode() + b"\n\n" for each in told), end]

    async def complete(self, request: Request) -> StreamingResponse:
        self.asked.append(await request.json())

        async def body() -> AsyncIterator[bytes]:
            try:
                for event in self.events:
                    yield event
                if self.cut:
                    raise ConnectionResetError
                if self.events[-1] == b"":
                    await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.left += 1
                raise

        return StreamingResponse(body(), media_type="text/event-stream")


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    cloud = Cloud()
    with serving(Starlette(routes=[Route("/v1/completions", cloud.complete, methods=["POST"])])) as cloud.url:
        yield cloud


@pytest.fixture
def client(cloud: Cloud, tmp_path: Path) -> Iterator[openai.OpenAI]:
    config = RouterConfig(cloud_url=cloud.url, cloud_model="big", ledger=tmp_path / "ledger.sqlite3")
    with updraft.OpenAI(config=config, max_retries=0) as client:
        yield client


def status_of(folder: Path) -> int:
    return ledger_rows(folder / "ledger.sqlite3")[-1].status


@pytest.mark.parametrize("counted", [True, False])
def test_several_answers_with_scores_and_usage(client: openai.OpenAI, cloud: Cloud, counted: bool) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}
    cloud.says(
        {"index": 1, "text": "once", "logprobs": SCORES},
        {"index": 0, "text": "once"},
        {"index": 0, "text": " upon", "finish_reason": "length"},
        {"index": 1, "text": " a", "logprobs": SCORES},
        {"index": 1, "text": "", "finish_reason": "stop"},
        usage=usage,
    )
    options: Any = {"stream_options": {"include_usage": True}} if counted else {}
    chunks: list[Any] = list(client.completions.create(**ASKED, n=2, logprobs=1, echo=True, suffix="s", **options))
    sent = {"n": 2, "logprobs": 1, "echo": True, "suffix": "s", "stream": True, "model": "big"}
    assert {name: cloud.asked[-1][name] for name in sent} == sent
    texts, finishes, scores = {0: "", 1: ""}, {}, 0
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.text
        scores += choice.logprobs is not None
        finishes |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert (texts, finishes, scores) == ({0: "once upon", 1: "once a"}, {0: "length", 1: "stop"}, 2)
    (info,) = [chunk.updraft for chunk in chunks if getattr(chunk, "updraft", None)]
    assert (info["tier"], info["cloud_tokens"]) == ("cloud", 4)
    assert [chunk.usage.to_dict() for chunk in chunks if chunk.usage] == ([usage] if counted else [])


@pytest.mark.parametrize(
    ("end", "cut", "says"),
    [
        (b'data: {"error": {"message": "out of memory", "code": 500}}\n\n', False, "out of memory"),
        (b"data: {not json}\n\n", False, "JSON"),
        (b"", True, "finish reason|connection|closed"),
    ],
)
def test_mid_stream_failures_are_sent_as_events(
    client: openai.OpenAI, cloud: Cloud, tmp_path: Path, end: bytes, cut: bool, says: str
) -> None:
    cloud.says({"index": 0, "text": "once"}, end=end)
    cloud.cut = cut
    stream = iter(client.completions.create(**ASKED))
    assert next(stream).choices[0].text == "once"
    with pytest.raises(openai.APIError, match=says):
        list(stream)
    wait_for(lambda: status_of(tmp_path) >= 500)


def test_client_disconnect_cancels_the_cloud(client: openai.OpenAI, cloud: Cloud, tmp_path: Path) -> None:
    cloud.says({"index": 0, "text": "once"}, end=b"")
    with client.completions.create(**ASKED) as stream:
        assert next(iter(stream)).choices[0].text == "once"
    wait_for(lambda: cloud.left == 1)
    wait_for(lambda: status_of(tmp_path) == 499)
