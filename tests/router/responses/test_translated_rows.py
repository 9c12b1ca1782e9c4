"""The row of an answer in another API has the status that its caller got, even if only the translation fails."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_fakes import FakeCloud, tiers
from scripted_cloud import cloud_says, cloud_streams
from serving import serving
from updraft.router.accounting.ledger import Ledger
from updraft.router.accounting.prices import Prices
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app
from waiting import ledger_rows

HELLO = [{"role": "user", "content": "hello"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
MORE = {"index": 0, "function": {"arguments": '{"city": "Rome"}'}}
TOOLS = [{"name": "weather", "input_schema": {"type": "object"}}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "cloud", "max_tokens": 9, "messages": HELLO},
    "/api/chat": {"model": "cloud", "messages": HELLO},
    "/api/generate": {"model": "cloud", "prompt": "hello"},
    "/v1/responses": {"model": "cloud", "input": HELLO},
    "/v1/responses/compact": {"model": "cloud", "input": HELLO},
}


def answered(cloud: FakeCloud, folder: Path, path: str, **fields: Any) -> tuple[httpx.Response, Any]:
    """Return the answer and its row."""
    ledger = folder / "ledger.sqlite3"
    prices = Prices(cloud_input=0.5, cloud_output=1.5)
    config = RouterConfig(cloud_url=cloud.url, cloud_model="m", ledger=ledger, prices=prices)
    with serving(daemon_app(Router(config, tiers(None, config))), lifespan=True) as url:
        answer = httpx.post(f"{url}{path}", json=BODIES[path] | fields, timeout=60)
    with closing(Ledger(ledger)) as rows:
        [row] = rows.rows(limit=9)
    return answer, row


def test_whole_answer_that_cannot_be_translated(cloud: FakeCloud, tmp_path: Path) -> None:
    cloud_says(cloud, {"content": ""})
    answer, row = answered(cloud, tmp_path, "/v1/responses/compact")
    assert (answer.status_code, row.status) == (502, 502)
    assert row.cost_usd == pytest.approx((3 * 0.5 + 4 * 1.5) / 1e6), "the cloud has answered"


def test_stream_that_cannot_be_translated_to_its_end(cloud: FakeCloud, tmp_path: Path) -> None:
    calls = [{**CALL, "index": 0}, {**CALL, "id": "call_2", "index": 1}, MORE]
    cloud_streams(cloud, *({"tool_calls": [call]} for call in calls), finish_reason="tool_calls")
    answer, row = answered(cloud, tmp_path, "/v1/messages", stream=True, tools=TOOLS)
    assert answer.text.count("event: error") == 1 and "already complete" in answer.text
    assert (answer.status_code, row.status) == (200, 502)
    assert row.cloud_tokens


@pytest.mark.parametrize("reason", [{"a": 1}, ["stop"], 7])
@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat", "/v1/responses"])
def test_stream_with_a_finish_reason_of_another_type(cloud: FakeCloud, tmp_path: Path, path: str, reason: Any) -> None:
    cloud_streams(cloud, {"content": "Hello"}, finish_reason=reason)
    answer, row = answered(cloud, tmp_path, path, stream=True)
    assert "error" in answer.text, "the stream ends with an event"
    assert row.status == 502


@pytest.mark.parametrize("stream", [False, True])
def test_response_without_a_first_choice(cloud: FakeCloud, tmp_path: Path, stream: bool) -> None:
    message = {"role": "assistant", "content": "Hello"}
    choice = {"index": 1, "message": message, "delta": message, "finish_reason": "stop"}
    body = json.dumps(
        {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    ).encode()
    cloud.says = (200, b"data: " + body + b"\n\ndata: [DONE]\n\n" if stream else body)
    answer, row = answered(cloud, tmp_path, "/v1/responses", stream=stream)
    assert (answer.status_code, row.status) == (200 if stream else 502, 502)
    assert answer.text.count("event: response.failed") == stream
    assert "finish reason" in answer.text


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat", "/api/generate"])
def test_stream_that_is_translated(cloud: FakeCloud, tmp_path: Path, path: str) -> None:
    cloud_streams(cloud, {"content": "Hello"}, {"content": " there"})
    answer, row = answered(cloud, tmp_path, path, stream=True)
    assert "Hello" in answer.text and answer.text.rstrip().endswith("}"), "whole"
    assert (row.status, row.route) == (200, "cloud")


def test_stream_that_its_caller_leaves_counts_its_tokens(cloud: FakeCloud, tmp_path: Path) -> None:
    """Without a budget, too: the cloud bills what it has written."""
    ledger = tmp_path / "ledger.sqlite3"
    config = RouterConfig(cloud_url=cloud.url, cloud_model="m", ledger=ledger)
    cloud.mode = "hang"
    with serving(daemon_app(Router(config, tiers(None, config))), lifespan=True) as url:
        body = {"model": "cloud", "messages": HELLO, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
            assert next(answer.iter_lines()).startswith("data:")
        [row] = ledger_rows(ledger)
    assert row.status == 499
    assert row.cloud_tokens


@pytest.mark.parametrize("path", BODIES)
def test_request_that_cannot_be_translated(cloud: FakeCloud, tmp_path: Path, path: str) -> None:
    answer, row = answered(cloud, tmp_path, path, context=[1])
    assert (answer.status_code, row.status) == (400, 400)
    assert "context" in answer.text
    assert not cloud.requests
