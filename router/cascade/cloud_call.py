"""One call to a cloud: its estimated charge, the reservation in the budget, and the cap on the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ...accounting.budget import TOP_UP, StreamTokenEstimate, TokenDemand
from ...accounting.prices import Price
from ...accounting.reported_usage import ReportedUsage
from ...accounting.token_estimate import (
    LIMITS,
    THINKING,
    answer_size,
    cap_fault,
    capped,
    prompt_tokens,
    text_bytes,
    thinking_budget,
)
from ...protocol.dialects.chat_chunks import OPAQUE, index_of
from ...protocol.errors import BudgetExceededError, RequestTimeoutError
from ...protocol.http.forwarding import Forwarding
from ...protocol.http.lenient_json import json_bytes, table, tables
from ...protocol.telemetry.tracing import Span
from ..accounting.budget import NO_CHARGE, Charge, Demand
from ..accounting.request_record import CloudCall, RequestRecord
from ..gates.gates import GateDecision
from ..state import RouterState
from ..tiers.failures import CloudFailure, CloudForbidden
from ..tiers.interfaces import ChargedForwarding, CloudStream, Delivery

#: Fields of answers that repeat their text or that no model has written.
_UNCOUNTED = dict.fromkeys((*OPAQUE, "citations", "deltas"))


def demand_of(
    record: RequestRecord, body: dict[str, Any], model: str, path: str, native: dict[str, Any] | None = None
) -> Demand:
    """Return the charge of the request `body` as a function of its answer's length, at the prices of its model.
    `native`: the body that the cloud receives, if it has fields that `body` lacks."""
    price = record.prices.of_cloud(model) or Price()
    sent = msgspec.json.encode(body if native is None else native)
    read = prompt_tokens(sent, bytes_per_token=1)  # upper bound on the prompt's tokens
    size = answer_size(body, path)
    is_known = size.limit is not None or price.max_output is not None
    wanted = TokenDemand(size.least, size.most(price.max_output), is_known)
    input_price = price.highest_stored_input if b'"cache_control"' in sent else price.highest_input
    usd = read * input_price / 1e6
    return Demand(Charge(cloud_tokens=read, usd=usd), price.output / 1e6, wanted)


def after(record: RequestRecord, demand: Demand) -> Demand:
    """Return the demand of the whole request: `demand` plus the charges of earlier calls, minus the reservation."""
    held = NO_CHARGE if record.reserved is None else record.reserved.charge
    return replace(demand, fixed=replace(record.charge + demand.fixed, cloud_requests=1) - held)


@dataclass(slots=True)
class CloudAttempt:
    """The HTTP request of one cloud call, which changes if the budget or the cloud limits the answer."""

    state: RouterState
    record: RequestRecord
    call: CloudCall
    # Path below the cloud's base URL.
    path: str
    body: dict[str, Any]
    # Local text that may be sent as a predicted output.
    draft: str
    # Body that the cloud receives, if the caller wrote the request for the cloud's own API.
    native: dict[str, Any] | None = None
    span: Span = field(default_factory=Span)
    delivery: Delivery = field(default_factory=Delivery)
    # Cap on each answer's tokens, if the budget requires a cap.
    cap: int | None = None
    # Request fields in which the cloud may accept the cap. Empty if the caller has set a limit.
    fields: tuple[str, ...] = ()
    # Request body before the cap was added. None: there is no cap.
    uncapped: dict[str, Any] | None = None

    @property
    def drafted(self) -> dict[str, Any]:
        """Request body that includes the draft, to estimate the number of tokens."""
        return {"prediction": self.draft, **self.body} if self.draft else self.body

    def forwarded(self, given: Forwarding) -> ChargedForwarding:
        """Return `given` with the call's trace span in the headers, and `_book` as the hook before each retry."""
        headers, record = self.span.headers(given.headers), self.record
        return ChargedForwarding(
            *(headers, given.query, given.api_key, given.retries),
            native=given.native,
            book=self._book,
            delivery=self.delivery,
            rate_limits=record.rate_limits,
            call_notes=record.call_notes,
            native_fields=record.native_fields,
            hints=self.call.hints,
        )

    def limit(self, tokens: int) -> None:
        """Limit the tokens of all answers together to `tokens`."""
        self.uncapped, cap = self.body, answer_size(self.drafted, self.path).cap(tokens)
        self.cap, fields = cap, LIMITS[self.path]
        self.fields = () if any(self.body.get(name) is not None for name in fields) else fields
        self.body = capped(self.body, cap, fields)
        self.record.budget_note = f"max_tokens: the budget leaves {cap} tokens for this answer"
        self.record.time_dependent |= thinking_budget(self.body) != thinking_budget(self.uncapped)

    async def _book(self, cause: str) -> bool:
        """Charge a broken attempt before its retry. Return False if the budget forbids the retry. The charge is the
        whole prompt and the minimum reservation of an answer, because the length of the answer is unknown."""
        record, call, budget = self.record, self.call, self.state.budget
        read = prompt_tokens(json_bytes(self.drafted if self.native is None else self.native))
        tokens = min(call.demand.wanted.least, call.unreported_tokens)
        broken = CloudCall(call.model, call.demand, tokens, ReportedUsage(prompt_tokens=read), is_broken=True)
        reason = f"retry: {call.model} failed: {cause}; {read} prompt tokens are charged for the failed attempt"
        record.judged(GateDecision(0, escalate=True, reason=reason))
        record.cloud_calls[-1] = broken  # so that `after` counts the failed attempt
        try:
            if budget is not None and (held := record.reserved) is not None:
                wanted = TokenDemand(held.tokens, held.tokens, is_known=True)
                demand = after(record, replace(call.demand, wanted=wanted))
                record.reserved = await budget.reserve(record.caller, demand, held)
        except BudgetExceededError:
            return False
        finally:
            record.cloud_calls.append(call)
        record.keep_interrupted_row()
        return True

    def adapt(self, failure: CloudFailure) -> bool:
        """Adapt the body after the cloud rejected the cap. Return False if the failure has another cause."""
        if self.cap is None or self.uncapped is None or not self.fields or failure.status not in (400, 422):
            return False
        fault = cap_fault(self.fields[0], failure.error.message, failure.error.param, failure.error.code)
        if fault is None:
            return False
        if fault == "too_large":  # the model's own maximum is below the cap, so no cap is needed
            self.body, self.cap, self.record.budget_note = self.uncapped, None, ""
            return True
        self.fields = self.fields[1:]
        if not self.fields:
            return False
        self.body = capped(self.uncapped, self.cap, self.fields)
        return True


@asynccontextmanager
async def cloud_call(  # noqa: PLR0913
    state: RouterState,
    record: RequestRecord,
    body: dict[str, Any],
    path: str,
    *,
    draft: str = "",
    native: dict[str, Any] | None = None,
) -> AsyncGenerator[CloudAttempt]:
    """Open a cloud call: reserve its maximum cost, `draft` included, and record the call. `native`: as in `demand_of`.
    Raises CloudForbidden."""
    call = CloudCall(body["model"], is_reasoning=_may_hide_tokens(body))
    attempt = CloudAttempt(state, record, call, path, body, draft, native)
    call.demand = demand_of(record, attempt.drafted, call.model, path, native)
    await _reserve(attempt)
    record.cloud_calls.append(call)
    record.keep_interrupted_row()
    began = time.monotonic()
    try:
        with record.in_cloud(), record.span.child("chat", "CLIENT", {"gen_ai.request.model": call.model}) as span:
            attempt.span = span
            yield attempt
    except CloudFailure as failure:
        call.unbilled = failure.unbilled
        if isinstance(failure.error, RequestTimeoutError):  # count the timeout, since the true latency is even longer
            state.latency.observe(work_of(body), time.monotonic() - began)
        raise
    except asyncio.CancelledError as left:
        failure = left.__context__  # the failure of the last attempt, if cancelled during the backoff
        refused = isinstance(failure, CloudFailure) and failure.unbilled
        call.unbilled = refused or not attempt.delivery.has_begun
        raise
    state.latency.observe(work_of(body), time.monotonic() - began)


async def _reserve(attempt: CloudAttempt) -> None:
    """Reserve the maximum cost of the answer, or cap the answer if the budget is too small. Raises CloudForbidden.

    A call after a failed call reuses its reservation. A first call waits for free budget, until `waits_until`.
    """
    call, record, budget = attempt.call, attempt.record, attempt.state.budget
    wanted = call.demand.wanted
    tokens = wanted.likely
    while budget is not None:
        seen = budget.in_flight.settlements
        try:
            record.reserved = await budget.reserve(record.caller, after(record, call.demand), record.reserved)
        except BudgetExceededError as error:  # other requests may have used the budget since gate 0
            if record.reserved is not None or not await budget.in_flight.settlement(record.waits_until, seen):
                raise CloudForbidden(error) from error
        else:
            tokens = record.reserved.tokens
            break
    # MeteredStream raises a stream's charge as text arrives
    call.unreported_tokens = min(tokens, wanted.least) if attempt.body.get("stream") is True else tokens
    if budget is not None and tokens < wanted.most and attempt.path in LIMITS:
        attempt.limit(tokens)


def bound_unreported(record: RequestRecord, completion: dict[str, Any]) -> None:
    """Charge an answer without usage by its size. An answer with hidden reasoning costs at least its reservation."""
    call = record.cloud_calls[-1]
    said = [table(choice.get("message")) or choice for choice in tables(completion.get("choices")) or []]
    size = sum(text_bytes({**each, **_UNCOUNTED}) for each in said)
    answer = StreamTokenEstimate(call.unreported_tokens, bytes=size)
    call.unreported_tokens = max(answer.bound, answer.reserved if call.is_reasoning else 0)


class MeteredStream(AsyncIterator[tuple[bytes, dict[str, Any]]]):
    """A cloud's stream with an estimate of its tokens. If a budget is used up, the stream ends with the finish reason
    `length`."""

    def __init__(self, stream: CloudStream, state: RouterState, record: RequestRecord) -> None:
        self._stream = stream
        self._state = state
        self._record = record
        self._call = record.cloud_calls[-1]
        held = record.reserved
        self._answer = StreamTokenEstimate(self._call.demand.wanted.likely if held is None else held.tokens)
        self._indices: dict[int, None] = {}
        self._ended = False

    async def __anext__(self) -> tuple[bytes, dict[str, Any]]:
        if self._ended:
            raise StopAsyncIteration
        try:
            payload, event = await anext(self._stream)
        except (StopAsyncIteration, CloudFailure):  # a broken stream, too, may have cost its whole reservation
            answer = self._answer  # used as the charge only if the cloud reports no usage
            self._call.unreported_tokens = max(answer.bound, answer.reserved if self._call.is_reasoning else 0)
            raise
        continues = False
        for choice in event["choices"]:
            continues = continues or not choice.get("finish_reason")
            self._indices[index_of(choice, 0)] = None
            delta = table(choice.get("delta")) or {"content": choice.get("text")}
            size = text_bytes({**delta, **_UNCOUNTED})
            self._answer.bytes += size if payload.isascii() and b"\\u" not in payload else 2 * size
            self._answer.texts += size > 0
        # usage so far; the final usage has no choices
        if b"sage" in payload and event["choices"] and (usage := ReportedUsage.of(event)):
            self._answer.texts, self._answer.bytes = usage.completion_tokens, 0
        self._call.unreported_tokens = max(self._call.unreported_tokens, self._answer.bound)
        if continues and self._answer.is_short and not await self._topped_up():
            event = await self._cut(event)
            payload = json_bytes(event)
        return payload, event

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def _topped_up(self) -> bool:
        """Reserve more tokens. Return False if the budget is used up."""
        record, call, budget = self._record, self._call, self._state.budget
        if budget is None or record.reserved is None:
            return True
        step = Demand(NO_CHARGE, call.demand.usd_per_token, TOP_UP)
        try:
            record.reserved = await budget.reserve(record.caller, step, record.reserved)
        except BudgetExceededError:
            return False
        self._answer.reserved += record.reserved.tokens
        record.keep_interrupted_row()
        return True

    async def _cut(self, event: dict[str, Any]) -> dict[str, Any]:
        """Close the stream, and return `event` with the finish reason `length` for every choice."""
        self._ended = True
        self._record.budget_note = "the budget is used up: the answer is truncated"
        self._record.time_dependent = True
        await self._stream.aclose()
        is_text = event.get("object") == "text_completion"
        pieces = {index_of(choice, 0): choice for choice in event["choices"]}
        empty: dict[str, Any] = {"text": ""} if is_text else {"delta": {}}
        choices = [
            {**empty, **pieces.get(index, {}), "index": index, "finish_reason": "length"} for index in self._indices
        ]
        return {**event, "choices": choices}


def _may_hide_tokens(body: dict[str, Any]) -> bool:
    if body.get("reasoning_effort") not in (None, "none") or body.get("best_of") not in (None, body.get("n", 1)):
        return True
    if thinking_budget({name: value for name, value in body.items() if name not in THINKING}):
        return True
    tables = [options for name in THINKING if (options := table(body.get(name)))]
    return any("none" not in each.values() and "disabled" not in each.values() for each in tables)


def work_of(body: dict[str, Any]) -> str:
    """Return the kind of work, for latency estimates. Streams are a separate kind, timed to their first event."""
    if "messages" not in body and "prompt" not in body:
        return "embeddings"
    return "cloud stream" if body.get("stream") is True else "cloud"
