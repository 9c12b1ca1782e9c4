"""Escalation of one request to the clouds: the calls, their time limits and the cleanup."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ...accounting.reported_usage import ReportedUsage
from ...protocol.errors import BudgetExceededError, EngineError, InvalidRequestError, UpstreamError
from ..accounting.request_record import RequestRecord
from ..gates.rules import Ruling, rule
from ..request.chat_request import RoutingRequest
from ..state import CloudCandidate, RouterState
from ..tiers.cloud import HttpCloudTier
from ..tiers.failures import CloudFailure, CloudForbidden
from ..tiers.interfaces import CloudStream, LocalAnswer
from .cloud_call import CloudAttempt, MeteredStream, after, bound_unreported, cloud_call, demand_of

log = logging.getLogger("updraft.router")
T = TypeVar("T")
#: Function that returns the seconds left for a cloud call.
_Seconds = Callable[[], float]
#: Function that sends a request body to one cloud and returns the answer.
_Send = Callable[[HttpCloudTier, dict[str, Any]], Awaitable[T]]


@dataclass(frozen=True, slots=True)
class CloudReply:
    """A complete cloud answer, as the server sent it."""

    completion: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CloudStreamReply:
    stream: CloudStream


class Escalation:
    """Calls of one request to the clouds: `ask()` for a whole reply, `open()` for a stream, `aclose()` at the end.
    `ask()` and `open()` raise CloudFailure, and record the time and the tokens of the cloud."""

    def __init__(
        self, job: RoutingRequest, state: RouterState, record: RequestRecord, path: str = "chat/completions"
    ) -> None:
        """Prepare the calls. `path`: endpoint below the cloud's base URL."""
        self.job = job
        self._path = path
        self.state = state
        self.record = record
        self._forwarded = job.forwarded  # headers to forward, with the trace span of the current call
        self._stream: CloudStream | None = None
        self._race: asyncio.Task[CloudReply | CloudStreamReply] | None = None
        self.took_draft = False  # whether the answering cloud was sent a draft
        self._streaming = 0.0  # start of the stream, by time.monotonic()

    async def ruling(self) -> Ruling:
        """Apply gate 0's rules. The budget is read only if a cloud may answer, since the ledger file may be locked."""
        availability, budget = self.state.availability(), self.state.budget
        ruling = rule(self.job, availability)
        if budget is None or not ruling.cloud:
            return ruling
        record, body = self.record, self.job.body
        demands = [
            demand_of(record, body, candidate.model, self._path, self._native(candidate, body))
            for candidate in self.candidates()
        ]
        least = min(demands, key=lambda each: each.charge(each.wanted.least).usd)  # the cheapest eligible cloud
        until = time.monotonic() + min(self.state.config.cloud_timeout_s, self.job.remaining_s)
        while True:
            seen = budget.in_flight.settlements
            if (over_budget := await budget.exceeded(record.caller, after(record, least))) is None:
                break
            record.time_dependent = True
            try:
                return rule(self.job, replace(availability, over_budget=over_budget))
            except BudgetExceededError:  # wait, because other requests may release part of their reservations
                if not await budget.in_flight.settlement(until, seen):
                    raise
        record.waits_until = 0.0 if ruling.local else until  # do not wait if the device can answer at once
        return ruling

    def candidates(self) -> list[CloudCandidate]:
        """Return the clouds to ask, in the order in which to try them. If the request names a cloud, return only it. A
        request sampled for exploration goes to the best cloud, which grades the local answer."""
        tiers, config = self.state.tiers, self.state.config
        if tiers.cloud is None:
            raise EngineError("The router has no cloud tier.")
        top = CloudCandidate(config.cloud_model, tiers.cloud)
        key = self.job.forwarded.api_key
        middle_tiers = [each for each in tiers.middle_tiers if key is None or each.shares_key]
        if self.job.requested_tier == "cloud":
            named = self.job.body.get("model")
            if key is not None and any(each.model == named and each not in middle_tiers for each in tiers.middle_tiers):
                raise InvalidRequestError(
                    f"api_key: the model {named!r} is not on the server of cloud_url, which your key is for. Leave "
                    "the key out, or ask for another model.",
                    param="api_key",
                    code="unsupported_parameter",
                )
            if isinstance(named, str) and named not in ("cloud", config.cloud_model):
                top = CloudCandidate(named, tiers.cloud)  # another model of that cloud, for example for embeddings
            return [next((candidate for candidate in middle_tiers if candidate.model == named), top)]
        if self.record.decision.exploration_chance:
            return [top]
        p_gain = self.record.decision.p_gain
        return [*(candidate for candidate in middle_tiers if candidate.may_answer(p_gain)), top]

    def race(self, time_left_s: _Seconds) -> None:
        """Start a cloud call that races the local run. `race_outcome()`, `stop_race()` or `aclose()` ends the race."""
        self.record.time_dependent = True  # the tier that answers depends on timing, so do not cache the answer
        self._race = asyncio.create_task(self.ask(time_left_s))

    @property
    def racing(self) -> bool:
        return self._race is not None

    @property
    def races_excluded_cloud(self) -> bool:
        """Return whether the cloud that was called for a race is excluded by the latest gate decision."""
        has_called = self.racing and bool(self.record.cloud_calls)
        return has_called and self.record.cloud_model not in [candidate.model for candidate in self.candidates()]

    @property
    def has_won(self) -> bool:
        """Return whether the cloud in the race has answered, or its stream has begun."""
        race = self._race
        return race is not None and race.done() and not race.cancelled() and race.exception() is None

    async def until_race_won(self, step: Awaitable[T | None]) -> T | None:
        """Return the result of `step`, or cancel `step` and return None once the cloud has won the race."""
        race = self._race
        if race is None:
            return await step
        task = asyncio.ensure_future(step)
        try:
            await asyncio.wait({task, race}, return_when=asyncio.FIRST_COMPLETED)
            return None if self.has_won else await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def race_outcome(self) -> CloudReply | CloudStreamReply:
        """End the race, and return the cloud's answer. Raises CloudFailure."""
        race, self._race = self._race, None
        if race is None:
            raise EngineError("The cloud was not raced.")
        try:
            return await race
        except asyncio.CancelledError:
            race.cancel()
            raise

    async def stop_race(self, local: LocalAnswer, note: str) -> None:
        """Stop the cloud in the race. The tokens of `local` estimate its usage, since a stopped cloud reports none."""
        race, self._race = self._race, None
        if race is None:
            return
        race.cancel()
        (outcome,) = await asyncio.gather(race, return_exceptions=True)
        await self.aclose()
        if isinstance(outcome, CloudFailure):
            return
        calls = self.record.cloud_calls
        if calls and not calls[-1].unbilled and not isinstance(outcome, CloudReply):
            self.record.counted(ReportedUsage(local.prompt_tokens, len(local.tokens)))
        self.record.note = note

    async def ask(self, time_left_s: _Seconds, *, draft: str = "") -> CloudReply | CloudStreamReply:
        """Return the whole answer, or a stream with its first content if the caller wants a stream. `time_left_s`:
        returns the timeout of the next cloud. `draft`: local text, for clouds that accept drafts."""
        if self.job.stream:
            return CloudStreamReply(await self.open(self.job.body, time_left_s, draft=draft))

        async def complete(tier: HttpCloudTier, sent: dict[str, Any]) -> dict[str, Any]:
            return await tier.complete(self._path, sent, timeout_s=time_left_s(), forwarded=self._forwarded)

        completion = await self._try_clouds(self.job.body, complete, time_left_s, draft=draft)
        if not (usage := ReportedUsage.of(completion, self.record.cloud_calls[-1].prompt_estimate)):
            bound_unreported(self.record, completion)
        self.record.counted(usage)
        return CloudReply(completion)

    @property
    def can_continue_stream(self) -> bool:
        """Return whether the best cloud, which is always a candidate, can continue a stream that the device began."""
        cloud = self.state.tiers.cloud
        return cloud is not None and cloud.continues

    async def open(
        self, body: dict[str, Any], time_left_s: _Seconds, *, begun: str | None = None, draft: str = ""
    ) -> CloudStream:
        """Open a cloud stream. `begun`: text of the last message, if the cloud should continue that message."""

        async def begin(tier: HttpCloudTier, sent: dict[str, Any]) -> CloudStream:
            return await tier.open(self._path, sent, timeout_s=time_left_s(), begun=begun, forwarded=self._forwarded)

        options: dict[str, Any] = {**(body.get("stream_options") or {}), "include_usage": True}
        body = {**body, "stream": True, "stream_options": options}
        stream = await self._try_clouds(body, begin, time_left_s, draft=draft, continuing=begun is not None)
        stream = MeteredStream(stream, self.state, self.record)
        self._stream, self._streaming = stream, time.monotonic()
        return stream

    async def _try_clouds(
        self, body: dict[str, Any], send: _Send[T], time_left_s: _Seconds, *, draft: str, continuing: bool = False
    ) -> T:
        """Return the answer of the first cloud that succeeds. Raises CloudFailure if all fail or none is allowed.
        `continuing`: ask only clouds that can continue a message."""
        candidates = [candidate for candidate in self.candidates() if candidate.tier.continues or not continuing]
        for candidate in candidates:
            sent, native = {**body, "model": candidate.model}, self._native(candidate, body)
            try:
                async with cloud_call(self.state, self.record, sent, self._path, draft=draft, native=native) as attempt:
                    self._forwarded = attempt.forwarded(self.job.forwarded)
                    answer = await self._sent(candidate.tier, attempt, send, time_left_s)
                candidate.tier.is_failing = False
                return answer
            except CloudFailure as failure:
                if candidate is candidates[-1] or isinstance(failure, CloudForbidden):
                    raise
                self.record.passed_over(candidate.model, failure)
                if not candidate.tier.is_failing:
                    log.warning("%s, so requests go to the next cloud", self.record.failure)
                candidate.tier.is_failing = True
        cause = "no cloud can continue the begun stream"
        raise CloudForbidden(UpstreamError(f"{cause.capitalize()}."), cause)

    def _native(self, candidate: CloudCandidate, body: dict[str, Any]) -> dict[str, Any] | None:
        return candidate.tier.native_body(self._path, body, self.job.forwarded)

    async def _sent(self, tier: HttpCloudTier, attempt: CloudAttempt, send: _Send[T], time_left_s: _Seconds) -> T:
        """Send a request to one cloud, with the draft if the cloud accepts drafts, and return the answer. If the cloud
        refuses the draft or the cap of `attempt`, retry without the draft or with another cap.
        """
        takes_draft = bool(attempt.draft) and "prediction" not in attempt.body  # a draft by the caller has priority
        if takes_draft:
            wait_s, forwarded = time_left_s(), self.job.forwarded
            takes_draft = await tier.takes_drafts(attempt.call.model, timeout_s=wait_s, forwarded=forwarded)
        prediction = {"prediction": {"type": "content", "content": attempt.draft}}
        is_refused = False
        while True:
            try:
                self.took_draft = takes_draft and not is_refused
                answer = await send(tier, attempt.body | (prediction if self.took_draft else {}))
            except CloudFailure as failure:
                if self.took_draft and failure.names("prediction"):
                    is_refused = True
                elif not attempt.adapt(failure):
                    raise
            else:
                if is_refused:  # the retry without the draft succeeded, so the draft was the cause
                    tier.refuse_drafts()
                return answer

    async def aclose(self) -> None:
        """Stop the race and the stream. Idempotent."""
        if (race := self._race) is not None:
            self._race = None
            race.cancel()
            await asyncio.gather(race, return_exceptions=True)
        stream, self._stream = self._stream, None
        if stream is not None:
            self.record.cloud_s += time.monotonic() - self._streaming
            await stream.aclose()
