"""Streamed answers: replayed local answers, relayed cloud streams, and live local answers that a cloud may continue.

Each stream is an async generator of SSE bytes. No cancel scope spans a `yield`, so any task may iterate a stream.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from ...accounting.reported_usage import ReportedUsage
from ...protocol.errors import EngineError, UpdraftError
from ...protocol.http import sse
from ...protocol.http.lenient_json import split_final_event
from ...protocol.requests import ChatRequest
from ...protocol.responses import ChoiceLogprobs, Delta, FinishReason
from ...protocol.safety.redaction import paired
from ...protocol.sampling import SamplingParams
from ...text.tool_stream import AnswerParser
from ..accounting.request_record import RequestRecord
from ..cascade.cascade import Cascade, CloudStreamReply, LiveReply, LocalReply, Reply
from ..gates.gates import GateDecision
from ..request.chat_request import continued
from ..tiers.answer_shapes import has_content
from ..tiers.failures import CloudFailure
from ..tiers.interfaces import CloudStream, LocalAnswer, LocalGeneration, Token
from .completion import ChunkWriter, CloudReasoning, ShownTokens, internal_error, notes_in, token_logprobs

log = logging.getLogger("updraft.router")
#: Fields of an event without choices that are not part of the answer.
_ABOUT = frozenset(
    (
        "id",
        "object",
        "created",
        "model",
        "choices",
        "usage",
        "service_tier",
        "system_fingerprint",
        "obfuscation",
        "timings",
        "updraft",
    )
)


class StreamError(Exception):
    """Failure of a stream that has begun. `payload`: its last event. `status`: HTTP status for the ledger."""

    def __init__(self, error: UpdraftError) -> None:
        super().__init__(error.message)
        self.payload = sse.event(error.to_body())
        self.status = error.status


async def replay(cascade: Cascade, answer: LocalAnswer) -> AsyncGenerator[bytes]:
    """Yield a complete local answer, token by token."""
    writer = _LocalText(cascade, ChunkWriter(cascade))
    yield writer.chunks.role()
    async for event in _written(writer, answer):
        yield event
    yield writer.chunks.finish(writer.finish_reason, answer.usage(), answer)


async def live(cascade: Cascade, run: LocalGeneration) -> AsyncGenerator[bytes]:
    """Yield a local answer while it is generated. If gate 2 escalates, the cloud continues the streamed text."""
    writer = _LocalText(cascade, ChunkWriter(cascade))
    yield writer.chunks.role()
    collapsed = False
    try:
        for token in run.answer.tokens.copy():  # tokens generated before the stream started
            if chunk := writer.token(token):
                yield chunk
        async for token in run:
            if chunk := writer.token(token):
                yield chunk
            if collapsed := await _collapsed(cascade, run.answer):
                break
    except UpdraftError as error:
        cascade.record.decide(GateDecision(2, True, f"the local model failed: {error.message}"))
        collapsed = True
    if collapsed:
        await cascade.stop_local()
        async with aclosing(_continue_in_cloud(cascade, writer, run.answer)) as events:
            async for event in events:
                yield event
        return
    if chunk := writer.rest(run.answer):
        yield chunk
    await cascade.stop_local()
    await _judge_streamed(cascade, run.answer)
    yield writer.chunks.finish(writer.finish_reason, run.answer.usage(), run.answer)


async def unjudged(cascade: Cascade, run: LocalGeneration) -> AsyncGenerator[bytes]:
    """Yield several answers in sequence while they are generated, without gates. `run`: run of the first answer."""
    chunks = ChunkWriter(cascade)
    last, first, later_tokens = cascade.chat.num_answers - 1, run.answer, 0
    try:
        for chunks.index in range(last + 1):
            run = run if chunks.index == 0 else await cascade.start_local(chunks.index)
            writer = _LocalText(cascade, chunks)
            yield chunks.role()
            async for event in _written(writer, run.answer, run):
                yield event
            await cascade.stop_local()
            later_tokens += 0 if run.answer is first else len(run.answer.tokens)
            if chunks.index < last:
                yield chunks.end(writer.finish_reason, run.answer)
            else:
                yield chunks.finish(writer.finish_reason, first.usage(later_tokens), run.answer)
    except UpdraftError as error:
        raise StreamError(error) from error


async def _written(
    writer: _LocalText, answer: LocalAnswer, run: LocalGeneration | None = None
) -> AsyncGenerator[bytes]:
    """Yield all text of an answer, from its beginning. `run`: the run that still generates the answer, if any."""
    for token in answer.tokens.copy():  # tokens generated before the stream started
        if chunk := writer.token(token):
            yield chunk
    if run is not None:
        async for token in run:
            if chunk := writer.token(token):
                yield chunk
    if chunk := writer.rest(answer):
        yield chunk


class _LocalText:
    """Converter of one local answer's tokens to chunks. `sent`: text sent so far. `finish_reason`: set by `rest`."""

    def __init__(self, cascade: Cascade, chunks: ChunkWriter, reader: AnswerParser | None = None) -> None:
        self._cascade = cascade
        self.reader = cascade.reader() if reader is None else reader  # a continued answer keeps its parser
        self._shown = ShownTokens(cascade.local) if cascade.chat.logprobs else None
        self.chunks = chunks
        self.sent = ""
        self.finish_reason: FinishReason = "stop"

    def token(self, token: Token) -> bytes | None:
        return self._chunk(token.text, None, self._logprobs(lambda shown: shown.push(token)))

    def rest(self, answer: LocalAnswer) -> bytes | None:
        """Return a chunk with the text held back so far, such as a possible stop string or tool call, or None."""
        self.finish_reason = answer.finish_reason or "stop"
        logprobs = self._logprobs(lambda shown: shown.flush(answer))
        return self._chunk(answer.text[len(self.sent) :], self.finish_reason, logprobs)

    def _chunk(self, text: str, finish_reason: FinishReason | None, logprobs: ChoiceLogprobs | None) -> bytes | None:
        self.sent += text
        delta = Delta(content=text or None)
        if self.reader is not None:
            delta, reason = self.reader.read(text, finish_reason)
            self.finish_reason = reason or self.finish_reason
        if delta == Delta() and logprobs is None:
            return None
        return self.chunks.delta(delta, logprobs)

    def _logprobs(self, take: Callable[[ShownTokens], list[tuple[int, Token]]]) -> ChoiceLogprobs | None:
        """Return the log-probabilities of the tokens that `take` releases, or None if it releases no tokens."""
        tokens = [] if self._shown is None else take(self._shown)
        return token_logprobs(tokens, self._cascade.local.token_bytes) if tokens else None


async def _collapsed(cascade: Cascade, answer: LocalAnswer) -> bool:
    """Return whether gate 2 rejects the answer. It runs every `gates.tokens` tokens, except at the token limit."""
    spent = len(answer.tokens)
    if spent % cascade.gates.tokens or cascade.chat.sampling().max_tokens == spent:
        return False
    messages, quality = cascade.chat.messages, cascade.job.quality
    decision = await cascade.read(lambda: cascade.gates.judge(2, messages, answer, quality), answer)
    if decision.escalate:
        cascade.record.decide(decision)
    else:
        cascade.record.judged(decision)
    return decision.escalate


async def _judge_streamed(cascade: Cascade, answer: LocalAnswer) -> None:
    """Apply gate 3 to text that was already streamed. The text cannot be recalled, so the decision is only recorded."""
    messages, quality = cascade.chat.messages, cascade.job.quality
    decision = await cascade.read(lambda: cascade.gates.judge(3, messages, answer, quality), answer)
    if decision.escalate:
        reason = f"{decision.reason}; the answer stands, since it was already streamed"
        decision = replace(decision, escalate=False, reason=reason, propensity=None)
    cascade.record.decide(decision)


async def _continue_in_cloud(cascade: Cascade, writer: _LocalText, answer: LocalAnswer) -> AsyncGenerator[bytes]:
    """Let the cloud continue the streamed text. If the cloud fails and `fallback` allows it, the device continues."""
    chat = cascade.chat
    messages = continued(chat.messages, paired(writer.sent), continues=chat.continue_final_message)
    last = {"role": "assistant", "content": messages[-1].text}
    body = cascade.job.body | {
        "messages": [*cascade.job.body["messages"][: len(messages) - 1], last],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    left = _remaining_params(chat, len(answer.tokens))
    if left is None:
        cascade.record.route, cascade.record.note = "local", "max_tokens was used up"
        yield writer.chunks.finish("length", answer.usage(), answer)
        return
    body |= {name: left.max_tokens for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None}
    body |= {"min_tokens": left.min_tokens} if body.get("min_tokens") is not None else {}
    try:
        stream = await cascade.escalation.open(body, cascade.cloud_time_left_s, begun=messages[-1].text)
    except CloudFailure as failure:
        if not cascade.may_fall_back(failure):
            cascade.record.failed(failure)
            raise StreamError(failure.error) from failure
        cascade.record.fell_back(failure)
        try:
            run = await cascade.continue_local(messages, left)
            tail = _LocalText(cascade, writer.chunks, writer.reader)
            async for event in _written(tail, run.answer, run):
                yield event
            await cascade.stop_local()
            yield writer.chunks.finish(tail.finish_reason, answer.usage(len(run.answer.tokens)), run.answer)
        except UpdraftError as error:
            raise StreamError(error) from error
        return
    cascade.record.route = "escalated"
    cascade.record.note = "the cloud continued the streamed text"
    cascade.answered()
    relayed = relay(cascade.record, stream, reasoning=cloud_reasoning(cascade), adopt=writer.chunks)
    async with aclosing(relayed) as events:
        async for event in events:
            yield event
    if cascade.job.include_usage:
        usage = answer.usage(cascade.record.cloud.completion_tokens)
        yield sse.event(writer.chunks.adopt({"object": "chat.completion.chunk", "choices": [], "usage": usage}))
    yield sse.DONE


async def relay(
    record: RequestRecord,
    stream: CloudStream,
    *,
    include_usage: bool = False,
    reasoning: CloudReasoning | None = None,
    adopt: ChunkWriter | None = None,
) -> AsyncGenerator[bytes]:
    """Yield the cloud's events unchanged. The finish reason comes last, with the usage in `updraft`.

    `reasoning`: converter that moves reasoning from the text to its own field; None: the text stays as it is.
    `adopt`: writer of the local stream that the cloud continues. The caller then sends the end mark.
    """
    finish: dict[str, Any] | None = None
    counted: bytes | None = None
    beside: dict[str, Any] = {}  # parts of the answer in events without choices, such as xAI's citations
    written = 0
    try:
        async for payload, event in stream:
            if usage := ReportedUsage.of(event, record.cloud_calls[-1].prompt_estimate):
                record.counted(usage)
            if not event["choices"]:
                counted = counted if usage is None else payload
                beside |= {name: value for name, value in event.items() if value and name not in _ABOUT}
                continue
            if reasoning is not None:
                event = reasoning.event(event)  # noqa: PLW2901
            if adopt is not None:
                event = adopt.adopt(event)  # noqa: PLW2901
            if any(choice.get("finish_reason") for choice in event["choices"]):
                if finish is not None and _indices(finish) != _indices(event):
                    yield sse.event(finish)  # with several choices, only the last finish gets the `updraft` object
                text, finish = split_final_event(event)
                if text is not None:
                    written += 1
                    yield sse.event(text)
                continue
            written += has_content(event)
            as_it_is = adopt is None and reasoning is None
            yield b"data: " + payload + b"\n\n" if as_it_is else sse.event(event)
    except CloudFailure as failure:
        record.failed(failure)
        raise StreamError(failure.error) from failure
    finally:  # also if the client disconnects; without reported usage, count one token per chunk
        record.cloud.completion_tokens = record.cloud.completion_tokens or written
    if finish is None:
        raise StreamError(EngineError("The cloud's stream ended without a finish reason."))
    record.notes = notes_in(finish)
    yield sse.event({**finish, **beside, "updraft": record.info()})
    if adopt is None:
        yield (b"data: " + counted + b"\n\n" if counted is not None and include_usage else b"") + sse.DONE


def cloud_reasoning(cascade: Cascade) -> CloudReasoning | None:
    """Return a converter of reasoning for one cloud stream, or None if the setting is off."""
    return CloudReasoning() if cascade.router_state.config.cloud_reasoning_tags else None


def _indices(event: dict[str, Any]) -> list[Any]:
    return [choice.get("index") for choice in event["choices"]]


def _remaining_params(chat: ChatRequest, spent: int) -> SamplingParams | None:
    """Return sampling parameters with the token limits reduced by `spent`, or None if no tokens are left."""
    params = chat.sampling()
    limit = None if params.max_tokens is None else params.max_tokens - spent
    if limit is not None and limit <= 0:
        return None
    return replace(params, max_tokens=limit, min_tokens=max(0, params.min_tokens - spent))


class StreamBody(AsyncIterator[bytes]):
    """Streamed body that calls `end` exactly once, with a status: when exhausted, failed, or closed by its consumer."""

    def __init__(self, events: AsyncGenerator[bytes], end: Callable[[int], Awaitable[None]]) -> None:
        self._events = events
        self._end = end
        self._ended = self._is_held = False

    def hold_end(self) -> Callable[[int], Awaitable[None]]:
        """Return `end`, for a translator to call after its last event. This body then calls `end` only on failure."""
        self._is_held = True
        return self._finish

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        try:
            event = await anext(self._events)
        except StopAsyncIteration:
            await self._succeed()
            raise
        except StreamError as error:
            await self._finish(error.status)
            return error.payload
        except BaseException as error:
            await self._finish(500 if isinstance(error, Exception) else 499)
            if not isinstance(error, Exception):
                raise
            log.exception("stream failed")
            return sse.event(internal_error().to_body())
        if event.endswith(sse.DONE):  # end now, because the client may stop reading after the end mark
            await self._succeed()
        return event

    async def aclose(self) -> None:
        """Stop the answer. Idempotent. A consumer must first cancel its pending `__anext__`."""
        await self._finish(499)

    async def _succeed(self) -> None:
        if not self._is_held:
            await self._finish(200)

    async def _finish(self, status: int) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            with suppress(RuntimeError):  # raised if the consumer's `__anext__` is still pending
                await self._events.aclose()
        finally:
            await self._end(status)


def events_of(cascade: Cascade, reply: Reply) -> AsyncGenerator[bytes]:
    if isinstance(reply, LocalReply):
        return replay(cascade, reply.answer)
    if isinstance(reply, CloudStreamReply):
        reasoning = cloud_reasoning(cascade)
        include_usage = cascade.job.include_usage
        return relay(cascade.record, reply.stream, include_usage=include_usage, reasoning=reasoning)
    if isinstance(reply, LiveReply):
        return (live if cascade.ruling.open else unjudged)(cascade, reply.run)
    raise EngineError("The cascade returned a whole answer instead of a stream.")
