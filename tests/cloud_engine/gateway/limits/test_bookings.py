"""What is booked of a request, and when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import pytest
from updraft.accounting.token_estimate import AnswerSize
from updraft.cloud_engine.gateway.access.principal import ANONYMOUS
from updraft.cloud_engine.gateway.ledger.metering import UsageRow
from updraft.cloud_engine.gateway.limits.accounting import AccountingOptions, open_accounting
from updraft.cloud_engine.gateway.limits.request_size import RequestSize
from updraft.cloud_engine.gateway.relay.answer import relay_passthrough, relay_stream
from updraft.cloud_engine.gateway.relay.call import Call
from updraft.cloud_engine.gateway.relay.passthrough import PassthroughUsage
from updraft.cloud_engine.gateway.relay.usage import StreamMeter, UsageOptions, meter_whole
from updraft.cloud_engine.gateway.upstream.connection import SilenceTimeouts
from updraft.cloud_engine.gateway.upstream.failures import AnswerFailure
from updraft.protocol.errors import RequestCancelledError, RequestTimeoutError


class _Batches:
    """A node's stream that pauses after each event."""

    status, headers, timeouts = 200, ((b"content-type", b"text/event-stream"),), SilenceTimeouts()

    def __init__(self, events: list[bytes]) -> None:
        self._events = [*events, b""]

    async def read(self) -> bytes:
        return self._events.pop(0)


def booked(tmp_path: Path, path: str, answer: Callable[[Call], Coroutine[Any, Any, None]]) -> list[tuple[str, int]]:
    """The state of the row, and its tokens, when the client was sent each part of an answer."""
    row, sent = UsageRow(request_id="id", model="m"), list[tuple[str, int]]()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append((row.state, row.completion_tokens))

    async def work() -> None:
        accounting = open_accounting(AccountingOptions(str(tmp_path / "usage")))
        async with accounting.admitted(ANONYMOUS, row, RequestSize(100, AnswerSize())) as account:
            about = (path.encode(), [], b"{}", "m", True, UsageOptions(include_usage=True))
            await answer(Call("id", *about, row, 0.0, send, account=account))
        accounting.ledger.close()
        await accounting.close()

    asyncio.run(work())
    return sent


def test_stream_cost_is_booked_before_the_end_is_sent(tmp_path: Path) -> None:
    """The death of the worker behind any event, and a limit store that hangs, leave what the client has been told."""
    chunk = b'data: {"choices":[{"index":0,"delta":{%b},"finish_reason":%b}]}\n\n'
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
    events = [chunk % (b'"content":"a"', b"null"), chunk % (b"", b'"stop"'), usage, b"data: [DONE]\n\n"]

    async def answer(call: Call) -> None:
        meter = StreamMeter(call.row, call.usage_options, running=False)
        await relay_stream(call, cast("Any", _Batches(events)), meter, bytes, may_break=False)

    path = "/v1/chat/completions"
    assert booked(tmp_path, path, answer) == [("abandoned", 0), ("settled", 1), ("settled", 2), ("settled", 2)]


_CHAT, _RESPONSES, _MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(
    ("path", "text", "rest"),
    [
        (_CHAT, {"choices": [{"index": 0, "delta": {"content": "x" * 510}}]}, b"[DONE]"),
        (_CHAT, {"choices": [{"index": 0, "delta": {"reasoning_content": "x" * 510}}]}, b"[DONE]"),
        (_RESPONSES, {"type": "response.output_text.delta", "delta": "x" * 510}, b'{"type":"error"}'),
        (_MESSAGES, {"type": "content_block_delta", "delta": {"thinking": "x" * 510}}, b'{"type":"error"}'),
    ],
)
def test_a_stream_without_usage_costs_its_text_without_a_budget_too(
    tmp_path: Path, path: str, text: dict[str, Any], rest: bytes, ends: bool
) -> None:
    """However many events carry the text, and whether or not the stream ends."""
    started = {"type": "message_start", "message": {"usage": {"input_tokens": 7, "output_tokens": 1}}}
    parts = [json.dumps(started).encode()] if path == _MESSAGES else []
    parts += [json.dumps(text).encode()] * 20 + [rest] * ends

    async def answer(call: Call) -> None:
        node = cast("Any", _Batches([b"data: %b\n\n" % part for part in parts]))
        with suppress(AnswerFailure):
            if path == _CHAT:
                meter = StreamMeter(call.row, UsageOptions(), running=False)
                await relay_stream(call, node, meter, bytes, may_break=True)
            else:
                await relay_passthrough(call, PassthroughUsage(path, call.row), node, bytes)
        await call.emit(b"", more=False)

    assert booked(tmp_path, path, answer)[-1][1] == 20 * 510 // 4


_DELTA = {"type": "response.output_text.delta", "delta": "x" * 400}
_BLOCK = {"type": "content_block_delta", "delta": {"text": "x" * 400}}
_REASON = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}
_START = {"type": "message_start", "message": {"usage": {"input_tokens": 7, "output_tokens": 1}}}
_STOP = {"type": "message_stop"}
_OUTPUT = [{"type": "message", "content": [{"type": "output_text", "text": "x" * 300}]}]


@pytest.mark.parametrize(
    ("path", "events", "tokens"),
    [
        (_MESSAGES, [_START, _BLOCK, {"type": "error", "error": {"type": "overloaded_error"}}], 100),
        (_MESSAGES, [_START, _BLOCK, _REASON, _STOP], 100),
        (_MESSAGES, [_START, _BLOCK, {**_REASON, "usage": {"output_tokens": 0}}, _STOP], 100),
        (_MESSAGES, [_START, _BLOCK, {**_REASON, "usage": {"output_tokens": 30}}, _STOP], 30),
        (_RESPONSES, [_DELTA, {"type": "response.completed", "response": {"usage": None, "output": _OUTPUT}}], 100),
        (_RESPONSES, [_DELTA, {"type": "response.incomplete", "response": {}}], 100),
        (_RESPONSES, [_DELTA, {"type": "response.failed", "response": {"usage": {"output_tokens": 0}}}], 100),
        (_RESPONSES, [_DELTA, {"type": "response.failed", "response": {"usage": {"output_tokens": 30}}}], 30),
        (_RESPONSES, [{"type": "response.completed", "response": {"output": _OUTPUT}}], 100),
        ("/v1/audio/transcriptions", [{"type": "transcript.text.done", "text": "x" * 300}], 100),
    ],
)
def test_only_the_usage_at_the_end_replaces_the_estimate(
    tmp_path: Path, path: str, events: list[dict[str, Any]], tokens: int
) -> None:
    """The end of a stream without its usage leaves the estimate from the text."""

    async def answer(call: Call) -> None:
        node = cast("Any", _Batches([b"data: %b\n\n" % json.dumps(event).encode() for event in events]))
        await relay_passthrough(call, PassthroughUsage(path, call.row), node, bytes)

    assert booked(tmp_path, path, answer)[-1] == ("settled", tokens)


def test_so_is_an_answer_of_another_api_and_a_whole_one(tmp_path: Path) -> None:
    done = {"type": "response.completed", "response": {"usage": {"input_tokens": 7, "output_tokens": 2}}}
    said = {"type": "response.output_text.delta", "delta": "x"}
    events = [b"data: %b\n\n" % json.dumps(event).encode() for event in (said, done)]

    async def stream(call: Call) -> None:
        passthrough = PassthroughUsage("/v1/responses", call.row)
        await relay_passthrough(call, passthrough, cast("Any", _Batches(events)), bytes)

    async def whole(call: Call) -> None:
        await call.emit(b"begin", more=True)
        await call.emit(b"end", more=False)

    assert booked(tmp_path, "/v1/responses", stream)[:2] == [("abandoned", 0), ("settled", 2)]
    assert booked(tmp_path, "/v1/chat/completions", whole) == [("abandoned", 0), ("settled", 0)]


@pytest.mark.parametrize(
    ("is_sent", "status", "error", "paid"),
    [
        (False, 0, RequestCancelledError("the client left"), 0),  # no node was sent it
        (True, 0, RequestCancelledError("the client left"), 100),
        (True, 0, RequestTimeoutError("nothing within 2 s"), 0),  # nobody knows that it was read
        (True, 200, None, 100),  # read, and not counted
        (True, 400, None, 0),
    ],
)
def test_charge_for_a_prompt_that_no_node_counted(
    tmp_path: Path, is_sent: bool, status: int, error: Exception | None, paid: int
) -> None:
    row = UsageRow(request_id="id", node="http://node", model="m", status=status)

    async def work() -> None:
        accounting = open_accounting(AccountingOptions(str(tmp_path / "usage")))
        try:
            with nullcontext() if error is None else pytest.raises(type(error)):
                async with accounting.admitted(ANONYMOUS, row, RequestSize(100, AnswerSize())) as account:
                    account.is_sent = is_sent
                    if error is not None:
                        raise error
        finally:
            accounting.ledger.close()
            await accounting.close()

    asyncio.run(work())
    assert row.prompt_tokens == paid


@pytest.mark.parametrize(
    ("size", "row", "written"),
    [
        (AnswerSize(900, 2), UsageRow(request_id="id"), 1800),
        (AnswerSize(), UsageRow(request_id="id"), 1024),
        (AnswerSize(0), UsageRow(request_id="id"), 0),
        (AnswerSize(900), UsageRow(request_id="id", prompt_tokens=5, completion_tokens=3), 3),  # the node told
    ],
)
def test_unknown_length_books_the_longest_answer(tmp_path: Path, size: AnswerSize, row: UsageRow, written: int) -> None:
    async def work() -> None:
        accounting = open_accounting(AccountingOptions(str(tmp_path / "usage")))
        async with accounting.admitted(ANONYMOUS, row, RequestSize(100, size)) as account:
            account.book_longest()
            assert row.completion_tokens == (written if row.prompt_tokens else 0), "no node was sent it"
            account.is_sent = True
            account.book_longest()
        accounting.ledger.close()
        await accounting.close()

    asyncio.run(work())
    assert row.completion_tokens == written


MESSAGES_USAGE = {
    "usage": {
        "input_tokens": 100,
        "output_tokens": 5,
        "cache_creation_input_tokens": 900,
        "cache_creation": {"ephemeral_5m_input_tokens": 400, "ephemeral_1h_input_tokens": 500},
    }
}
CHAT_USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 1000, "completion_tokens": 5, "prompt_tokens_details": {"cache_write_tokens": 900}},
}


@pytest.mark.parametrize(
    ("path", "answer", "input_usd"),
    [("/v1/messages", MESSAGES_USAGE, 100 + 400 * 1.25 + 500 * 2), ("/v1/chat/completions", CHAT_USAGE, 1225)],
)
def test_cache_writes_cost_more_than_plain_input(
    tmp_path: Path, path: str, answer: dict[str, Any], input_usd: float
) -> None:
    """And the ledger, which has no column for them, keeps the cost."""
    prices = tmp_path / "prices.toml"
    prices.write_text('[[prices]]\nmodel = "m"\ninput = 1\noutput = 2\n')
    row, size, body = UsageRow(request_id="id", model="m", status=200), RequestSize(2000), json.dumps(answer).encode()

    async def work() -> list[dict[str, Any]]:
        accounting = open_accounting(AccountingOptions(str(tmp_path / "usage"), prices=str(prices)))
        async with accounting.admitted(ANONYMOUS, row, size):
            if path == "/v1/messages":
                PassthroughUsage(path, row).whole(body)
            else:
                meter_whole(body, row, size)
        accounting.ledger.settle(row)
        usage = accounting.usage()
        accounting.ledger.close()
        await accounting.close()
        return usage

    (total,) = asyncio.run(work())
    assert (total["prompt_tokens"], total["completion_tokens"]) == (1000, 5)
    assert total["cost_usd"] == pytest.approx((input_usd + 10) / 1e6)
