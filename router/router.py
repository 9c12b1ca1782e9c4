"""The router: answers requests from any transport. The cascade chooses the tiers, and `server/` has the endpoints."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from ..accounting.budget import DAY_S
from ..accounting.ledger.writer import FLUSH_S
from ..accounting.surcharges import check_surcharges
from ..protocol.dialects.chat_chunks import OPAQUE
from ..protocol.errors import (
    ConfigurationError,
    EngineError,
    NotFoundError,
    OverloadedError,
    RequestTimeoutError,
    StorageError,
    UpdraftError,
)
from ..protocol.http import prometheus, sse
from ..protocol.http.forwarding import forwarded
from ..protocol.http.lenient_json import tables
from ..protocol.http.wire import WireRequest, WireResponse, off_event_loop
from ..protocol.safety.names import check_models
from ..protocol.structured import ignored
from ..protocol.telemetry.tracing import Tracer
from .accounting.budget import SCOPES, Budget, InFlight
from .accounting.ledger import Ledger, LedgerRow, RequestWriter
from .accounting.request_record import RequestRecord
from .cascade.cascade import Cascade, CloudReply, LocalReply, Reply
from .config import GATE_SETTINGS, LIVE_SETTINGS, RouterConfig
from .conversations import ConversationTiers
from .factory import check_aliases, check_startable, load_backoff, load_gates_of, load_tiers, with_local
from .forecast import RouteForecast, forecast
from .gates.rules import LatencyEstimates
from .learning import Learning
from .privacy.rules import PrivacyRules
from .request.chat_request import RoutingRequest, caller_of, read_model, read_routing_request, take_options
from .responses import completion as answer
from .responses.cache import AnswerCache, CachedCompletion, CacheSlot, answer_of, stream_of
from .responses.direct import DirectCall, DirectHandler, DirectReply, direct_job
from .responses.streaming import StreamBody, events_of
from .state import ModelNames, RouterState, Tiers
from .tasks.book import TaskBook
from .tiers.failures import CloudFailure
from .tiers.interfaces import CloudContent

T = TypeVar("T")
log = logging.getLogger("updraft.router")

MAX_PULLS = 2
#: Minimum seconds between attempts to open the ledger. Requests trigger the attempts.
RETRY_S = 30.0

#: Function that returns the decoded body of a request and the requested model.
BodyReader = Callable[[WireRequest], tuple[dict[str, Any], str]]
#: Function that converts an answer to another API. Raises UpstreamError if the answer does not fit.
Translation = Callable[[WireResponse], WireResponse]


def read_json(request: WireRequest) -> tuple[dict[str, Any], str]:
    return read_model(request.body)


@dataclass(slots=True)
class _RequestInProgress:
    """A request that is being answered."""

    record: RequestRecord
    # The running cascade or direct call, to close at the end. None: not started yet.
    call: Cascade | DirectCall | None = None


class Router:
    """One local and one cloud tier with OpenAI's interface. Call `start()` on the event loop that will use the router.
    `tiers` replaces the tiers that `config` would load; `close()` closes them in either case."""

    def __init__(self, config: RouterConfig, tiers: Tiers | None = None) -> None:
        self.config = config
        self._tiers = tiers
        self._ledger: Ledger | None = None
        self._ledger_writer: RequestWriter | None = None
        self._privacy = PrivacyRules(config.privacy)
        self._cache = AnswerCache(int(config.cache.max_mb * 2**20), config.cache.ttl_s) if config.cache else None
        self._latency = LatencyEstimates()
        self._budget: Budget | None = None
        self._in_flight = InFlight()  # requests with a reservation, kept across budget changes
        self._ledger_problem: str | None = None  # why the ledger is not open
        self._ledger_tried = 0.0  # time of the last attempt to open the ledger, by time.monotonic()
        self._ledger_retry: asyncio.Task[None] | None = None
        self._learning = Learning()
        self._conversations = ConversationTiers()
        self._loading: asyncio.Task[None] | None = None
        self._load_backoff = load_backoff(config)
        self._local_retry: asyncio.Task[None] | None = None
        self._open: set[StreamBody] = set()
        self._closed = False
        self._tracer = Tracer("updraft")
        self._created = int(time.time())
        # Limit of concurrent model downloads, which would otherwise take the threads that gates need.
        self.pulling = asyncio.Semaphore(MAX_PULLS)

    async def start(self) -> None:
        """Open the ledger and load the tiers. Idempotent. Cancelling one waiter does not cancel the shared load. Raises
        ConfigurationError or ModelLoadError, and OverloadedError after `close()`."""
        if self._loading is None and not self._closed:
            self._loading = asyncio.create_task(self._load())
        if self._loading is not None:
            await asyncio.shield(self._loading)
            if self._ledger is not None:
                self._ledger.check()
        if self._closed:
            raise OverloadedError("The router is closed.")
        is_trying = self._ledger_retry is not None and not self._ledger_retry.done()
        if self._ledger_problem is not None and not is_trying and time.monotonic() > self._ledger_tried + RETRY_S:
            self._ledger_retry = asyncio.create_task(self._open_ledger())
        missing = self.tiers.local_missing
        if missing is not None and self._local_retry is None and self._load_backoff.error is None:
            self._local_retry = asyncio.create_task(self._load_local())

    async def _load(self) -> None:
        try:
            await self._open_ledger()
            if self._tiers is None:
                self._tiers = await load_tiers(self.config)
            await self._use(self._tiers)
        except BaseException:
            self._loading = None  # so that the next request tries again to load the tiers
            raise

    def _keep_from(self, now: float) -> float:
        """Return the time before which ledger rows are deleted. Rows of the budget periods at `now` are kept."""
        days, budget = self.config.ledger_days, _budget(self.config, None)
        if days is None:
            return 0.0
        before = now - days * DAY_S
        return before if budget is None else min(before, budget.counts_from(now))

    @property
    def ledger_problem(self) -> str | None:
        """Why the configured ledger cannot be used now; None if the ledger works or is off."""
        problems = [user.problem for user in (self._ledger_writer, self._budget) if user is not None]
        if self._ledger is not None:
            problems.append(self._ledger.check())
        return self._ledger_problem or next(filter(None, problems), None)

    async def _open_ledger(self) -> None:
        """Open the configured ledger. If that fails, serve without it and log a warning once. The first attempt raises
        ConfigurationError if the file is not a ledger or is of a newer version."""
        path, self._ledger_tried = self.config.ledger, time.monotonic()
        if path is None or self._ledger_writer is not None:
            return
        try:
            ledger, writer = await _finished(lambda: self._opened(path))
        except ConfigurationError as error:
            if self._ledger_problem is None:
                if not isinstance(error, StorageError):
                    raise
                log.warning("Serving without a ledger. %s", error.message)
            self._ledger_problem = error.message
        else:
            if self._ledger_problem is not None:
                log.warning("The ledger %s is usable again.", path)
            ledger.flush = self.flush_ledger
            self._ledger, self._ledger_writer, self._ledger_problem = ledger, writer, None
        self._set_budget()

    def _opened(self, path: Path) -> tuple[Ledger, RequestWriter]:
        ledger = Ledger(path, busy_s=0.0)  # no waiting for other processes, since that would block the event loop
        try:
            writer = RequestWriter(path, self._keep_from)
            writer.flush()  # first book the rows of ended processes, because budgets include them
            return ledger, writer
        except BaseException:
            ledger.close()
            raise

    async def _use(self, tiers: Tiers) -> None:
        """Use `tiers` from now on. Raises ConfigurationError for an alias that is the local model's name."""
        check_aliases(self.config, tiers)
        await self._learning.open(self.config, tiers)
        self._tiers = tiers
        if tiers.local_missing is not None:
            self._load_backoff.begin(tiers.local_missing)

    async def _load_local(self) -> None:
        """Retry loading the local model while the cloud answers."""
        try:
            await self._use(await with_local(self.config, self.tiers))
        except UpdraftError as error:
            log.warning("the local model cannot be used: %s", error.message)
            self._tiers = replace(self.tiers, local_missing=error)
            self._load_backoff.begin(error)
        finally:
            self._local_retry = None

    async def reconfigure(self, config: RouterConfig) -> list[str]:
        """Apply `config` to future requests, and return the names of the changed settings. Raises ConfigurationError,
        and changes nothing, if `config` is unusable or a changed setting needs a restart."""
        await self.start()
        changed = [f.name for f in fields(config) if getattr(config, f.name) != getattr(self.config, f.name)]
        if fixed := [name for name in changed if name not in LIVE_SETTINGS]:
            raise ConfigurationError(
                f"{', '.join(fixed)} cannot change while the router runs: restart it.", param=fixed[0]
            )
        check_startable(config)
        privacy = PrivacyRules(config.privacy)
        if self._local_retry is not None:
            await asyncio.shield(self._local_retry)
        tiers = self.tiers
        if tiers.local is not None and set(changed) & GATE_SETTINGS:
            gates = await asyncio.to_thread(load_gates_of, config, tiers.local)
            gates.follow(tiers.gates, learns=self._learning.keeps_experience)
            self._tiers = replace(tiers, gates=gates)
            await self._learning.open_tasks(config, self._tiers)
        self.config, self._privacy = config, privacy
        self._set_budget()
        return changed

    def _set_budget(self) -> None:
        self._budget = _budget(self.config, self._ledger, self._ledger_problem or "", self._in_flight)

    async def close(self) -> None:
        """End open streams, then close the tiers and the ledger. Idempotent."""
        self._closed = True
        waits = (self._loading, self._local_retry, self._ledger_retry)
        if loads := [task for task in waits if task is not None]:
            await asyncio.wait(loads)  # wait, because a thread that loads a model cannot be stopped
        for body in list(self._open):
            await body.aclose()
        tiers, self._tiers = self._tiers, None
        ledger, self._ledger = self._ledger, None
        ledger_writer, self._ledger_writer = self._ledger_writer, None
        async with AsyncExitStack() as closing:  # closes the resources in reverse order, even if one of them fails
            if ledger is not None:
                closing.callback(ledger.close)
            if ledger_writer is not None:
                closing.push_async_callback(ledger_writer.aclose)
            if tiers is not None and tiers.cloud is not None:
                for tier in (tiers.cloud, *(candidate.tier for candidate in tiers.middle_tiers)):
                    closing.push_async_callback(tier.aclose)
            if tiers is not None and tiers.local is not None:
                closing.push_async_callback(tiers.local.aclose)
            closing.push_async_callback(self._learning.close)  # first, because shadows use the device

    def health(self) -> UpdraftError | None:
        """Return why no tier can answer, or None if a tier can answer. Call after `start()`."""
        has = self._state().availability()
        return has.local_missing if has.cloud_missing is not None or has.offline else None

    async def chat(self, request: WireRequest, translate: Translation | None = None) -> WireResponse:
        """Answer a chat request and write a ledger row. Failures become error bodies; only cancellation is raised."""
        return await self._guarded(request, self._chat, translate)

    async def _chat(self, request: WireRequest, answering: _RequestInProgress) -> WireResponse:
        record = answering.record
        async with asyncio.timeout(request.timeout_s):
            names = await self.names()
        body, record.model = await off_event_loop(request.body, lambda: read_model(request.body))
        record.caller = record.caller.with_user(body)
        body["model"] = self.config.aliases.get(record.model, record.model)
        slot = CacheSlot.of(self._cache, record.caller, request, body)
        tier, hold_tokens = names.requested_tier(record.model), self.config.hold_tokens
        job = await off_event_loop(
            request.body,
            lambda: read_routing_request(request, body, tier, hold_tokens=hold_tokens, started=record.started),
        )
        record.hints = job.notes
        record.device_hints = ignored(body, _used(self.config), request.names)
        job = await self._ruled(request, job, body)
        if slot is not None and (kept := slot.get()) is not None:
            return self._repeat(job, kept, record)
        async with asyncio.timeout(None if job.deadline is None else job.remaining_s):
            await self._wait_for_local(job)
            answering.call = cascade = Cascade(job, self._state(), record)
            reply = await cascade.run()
        return self._respond(cascade, reply, slot)

    async def preview(self, request: WireRequest) -> tuple[RequestRecord, str]:
        """Return a record with the gates' decisions on a chat request, and the local text generated for the gates. Asks
        no cloud, and stores and counts nothing. Raises UpdraftError."""
        async with self._rehearsal(request) as cascade:
            await cascade.decide_only()
        return cascade.record, cascade.local_text

    async def forecast(self, request: WireRequest) -> RouteForecast:
        """Return the decision on a chat request before any answer, with the expected cost and quality. Stores and
        counts nothing. Raises UpdraftError."""
        async with self._rehearsal(request) as cascade:
            return await forecast(cascade, self.config, request.body)

    @asynccontextmanager
    async def _rehearsal(self, request: WireRequest) -> AsyncGenerator[Cascade]:
        """Yield the cascade of a request that no user sent."""
        names = await self.names()
        body, model = await off_event_loop(request.body, lambda: read_model(request.body))
        tier, started = names.requested_tier(model), time.monotonic()
        body.pop("stream", None)
        job = await off_event_loop(
            request.body, lambda: read_routing_request(request, body, tier, hold_tokens=None, started=started)
        )
        job = await self._ruled(request, job, body)
        caller = caller_of(request.headers)
        record = RequestRecord(self.config.prices, self.config.cloud_model, model=model, caller=caller)
        async with aclosing(Cascade(job, self._state().unobserved(), record)) as cascade:
            yield cascade

    async def mark(self, request: WireRequest) -> None:
        """Set the request's privacy mark, without answering the request. Raises InvalidRequestError."""
        body, _ = await off_event_loop(request.body, lambda: read_model(request.body))
        options, selected = take_options(body), forwarded(request.headers, request.query)
        await self._ruled(request, RoutingRequest("auto", body, private=options.private, forwarded=selected), body)

    async def _ruled(self, request: WireRequest, job: RoutingRequest, body: dict[str, Any]) -> RoutingRequest:
        """Return the job with the privacy rule it matches, if any, and mark a private request. Dollar budgets forbid
        naming further models and raising the price per token."""
        if self.config.counts_usd:
            check_models(body)
            if not job.only_local:
                check_surcharges(body, job.forwarded)
        if self._privacy.is_on:
            job = await self._checked(job, body)
        request.mark.is_private |= job.private or job.privacy_rule is not None
        return job

    async def _checked(self, job: RoutingRequest, body: dict[str, Any]) -> RoutingRequest:
        """Return the job with the privacy rule it matches, if any, and without the parts that no rule can read."""
        for message in tables(body.get("messages")) or ():
            for name in (*OPAQUE, "deltas"):  # drop state signed by a cloud, which no rule can read
                message.pop(name, None)
        job = replace(job, forwarded=replace(job.forwarded, native=None))  # drop the original, which no rule reads
        return replace(job, privacy_rule=await self._privacy.match({**body, "?": job.forwarded.texts}))

    async def _wait_for_local(self, job: RoutingRequest) -> None:
        """Wait for a pending reload of the local model if only the device may answer."""
        if (retry := self._local_retry) is not None and job.only_local:
            await asyncio.shield(retry)

    async def direct(
        self,
        request: WireRequest,
        handler: DirectHandler,
        translate: Translation | None = None,
        read: BodyReader = read_json,
    ) -> WireResponse:
        """Answer a request that no gate judges, and write a ledger row. Failures become error bodies as in `chat`."""

        async def answered(request: WireRequest, answering: _RequestInProgress) -> WireResponse:
            record = answering.record
            async with asyncio.timeout(request.timeout_s):
                names = await self.names()
                body, record.model = await off_event_loop(request.body, lambda: read(request))
                record.caller = record.caller.with_user(body)
                job = direct_job(request, body, names.direct_tier(body, record.model), record)
                record.device_hints = ignored(body, _used(self.config), request.names, reasons=False)
                job = await self._ruled(request, job, body)
                await self._wait_for_local(job)
                answering.call = call = DirectCall(request, job, self._state(), record)
                reply = await handler(call)
            return await self._reply_to(call, reply)

        return await self._guarded(request, answered, translate)

    async def _guarded(
        self,
        request: WireRequest,
        work: Callable[[WireRequest, _RequestInProgress], Awaitable[WireResponse]],
        translate: Translation | None,
    ) -> WireResponse:
        """Return the translated response of `work`. On failure, close the call and return an OpenAI error body."""
        span, caller = self._tracer.request(request.path, request.headers, "INTERNAL"), caller_of(request.headers)
        record = RequestRecord(self.config.prices, self.config.cloud_model, caller=caller, span=span, keep=self._keep)
        answering = _RequestInProgress(record)
        try:
            response = await work(request, answering)
            if translate is not None:
                response = translate(response)
            if isinstance(response.body, bytes):
                self._write(record, 200)
            return replace(response, headers={**response.headers, **record.rate_limits})
        except asyncio.CancelledError:
            await self._end(record, answering.call, 499)
            raise
        except TimeoutError:
            failure: UpdraftError | CloudFailure = RequestTimeoutError(f"No answer within {request.timeout_s} s.")
        except (UpdraftError, CloudFailure) as error:
            failure = error
        except Exception:
            if threading.main_thread().is_alive():
                log.exception("request %s failed", record.request_id)
                failure = answer.internal_error()
            else:  # the interpreter is exiting, so that no thread can be started
                log.debug("request %s failed at exit", record.request_id, exc_info=True)
                failure = InterpreterExitError()
        record.route = None
        try:
            if answering.call is not None:
                await answering.call.aclose()
        finally:  # write the row even if this wait is cancelled
            (failure.error if isinstance(failure, CloudFailure) else failure).rename(request.names)
            response = answer.failure(failure, record)
            if isinstance(failure, CloudFailure):
                record.failed(failure)
            self._write(record, response.status)
            if isinstance(answering.call, Cascade):
                self._learning.ended(answering.call, None, response.status)
        return response

    async def _reply_to(self, call: DirectCall, reply: DirectReply) -> WireResponse:
        record = call.record
        if isinstance(reply, AsyncGenerator):
            return self._stream(record, call, cast("AsyncGenerator[bytes]", reply))
        await call.aclose()
        if isinstance(reply, CloudContent):
            headers = {"content-type": reply.kind, **answer.headers(record.info())}
            return WireResponse(200, {name: value for name, value in headers.items() if value}, reply.body)
        return WireResponse.json(reply, headers=answer.headers(record.info()))

    def _respond(self, cascade: Cascade, reply: Reply, slot: CacheSlot | None) -> WireResponse:
        record = cascade.record
        if isinstance(reply, CloudReply) and self.config.cloud_reasoning_tags:
            reply = CloudReply(answer.without_reasoning_tags(reply.completion))
        if cascade.job.stream:
            events = events_of(cascade, reply)
            events = self._learning.observed(cascade, events)
            return self._stream(record, cascade, events if slot is None else slot.keep_stream(events, record))
        if isinstance(reply, LocalReply):
            info = record.info()
            completion: Any = answer.local_completion([reply.answer, *reply.further_answers], cascade, info)
        elif isinstance(reply, CloudReply):
            record.notes = answer.notes_in(reply.completion)
            info = record.info()
            completion = {**reply.completion, "updraft": info}
        else:
            raise EngineError("The cascade returned an unrequested stream.")
        response = WireResponse.json(completion, headers=answer.headers(info))
        if slot is not None:
            slot.keep(msgspec.to_builtins(completion), record)
        self._learning.ended(cascade, reply.completion if isinstance(reply, CloudReply) else None)
        return response

    def _repeat(self, job: RoutingRequest, kept: CachedCompletion, record: RequestRecord) -> WireResponse:
        """Return a cached answer, whole or as a stream."""
        completion = answer_of(kept, record)
        if job.stream:
            return self._stream(record, None, stream_of(completion, include_usage=job.include_usage))
        return WireResponse.json(completion, headers=answer.headers(record.info()))

    def _stream(
        self, record: RequestRecord, call: Cascade | DirectCall | None, events: AsyncGenerator[bytes]
    ) -> WireResponse:
        async def end(status: int) -> None:
            self._open.discard(body)
            await self._end(record, call, status)

        body = StreamBody(events, end)
        self._open.add(body)
        return WireResponse(200, {**sse.HEADERS, **answer.headers(record.info(), begun=True)}, body)

    async def _end(self, record: RequestRecord, call: Cascade | DirectCall | None, status: int) -> None:
        """Close the call and write the request's row, even if this wait is cancelled."""
        try:
            if call is not None:
                await call.aclose()
        finally:
            self._write(record, status)
            if isinstance(call, Cascade):
                self._learning.ended(call, None, status)

    async def end_learning(self) -> None:
        """Wait for running comparisons of both tiers, and store what was learned. Idempotent."""
        await self._learning.close()

    @property
    def tasks(self) -> TaskBook | None:
        """Tasks of the running pair; None without the setting `learn`."""
        return self._learning.tasks

    def metrics(self) -> str:
        """Return the learning metrics as Prometheus text."""
        return prometheus.render(self._learning.metrics())

    def _write(self, record: RequestRecord, status: int) -> None:
        record.span.end(record.traced(status), error="" if status < 400 else str(status))
        if self._ledger_writer is not None:
            committed = None
            if record.reserved is not None:  # the commit frees budget, so it wakes requests that wait for budget
                committed = asyncio.get_running_loop().create_future()
                committed.add_done_callback(lambda _: self._in_flight.settled())
            budget = self._budget or Budget({}, self._ledger)
            bookings = budget.bookings(record.caller, record.reserved, record.charge)
            self._ledger_writer.enter(record.row(status), bookings, committed)

    def _keep(self, row: LedgerRow) -> None:
        if self._ledger_writer is not None:
            self._ledger_writer.keep(row)

    def _state(self) -> RouterState:
        learned = self._learning.tasks
        return RouterState(self.config, self.tiers, self._latency, self._budget, learned, self._conversations)

    def flush_ledger(self, timeout_s: float = FLUSH_S) -> None:
        """Wait, in any thread, until all rows so far are committed. After a timeout, the next process commits them."""
        if (writer := self._ledger_writer) is not None and writer.waiting:
            writer.flush(timeout_s)

    async def request(self, request_id: str) -> LedgerRow:
        """Return the ledger row of a request. Raises NotFoundError."""
        row = await self.read_ledger(lambda ledger: ledger.get(request_id))
        if row is None:
            raise NotFoundError(f"Request {request_id[:100]!r} is not in the ledger.")
        return row

    async def feedback(self, request_id: str, *, up: bool) -> bool:
        """Record feedback on an answer. Return whether `updraft learn` will see it. Raises NotFoundError."""
        if not await self._kept_ledger().feedback(request_id, up=up):
            raise NotFoundError(f"Request {request_id[:100]!r} is not in the ledger.")
        return await self._learning.feedback(request_id, up=up)

    def _kept_ledger(self) -> Ledger:
        if self._ledger is None:
            raise NotFoundError(self._ledger_problem or "This router keeps no ledger. Set `ledger` to a file.")
        return self._ledger

    async def names(self) -> ModelNames:
        """Return the accepted model names. Raises the errors of `start`."""
        await self.start()
        return ModelNames(self.config, self.tiers, self._created)

    async def read_ledger(self, look: Callable[[Ledger], T]) -> T:
        """Return the result of `look` on the ledger, over a separate connection that blocks no request. Raises
        NotFoundError if no ledger is kept, and ConfigurationError if the ledger cannot be read."""
        await self.start()
        kept = self._kept_ledger()

        def read() -> T:
            if (writer := self._ledger_writer) is not None:
                writer.flush(collect=True)
            return kept.look(look)

        return await asyncio.to_thread(read)

    @property
    def tiers(self) -> Tiers:
        """Tiers in use. Raises OverloadedError before `start()` and after `close()`."""
        if self._tiers is None:
            raise OverloadedError("The router is closed.")
        return self._tiers


class InterpreterExitError(OverloadedError):
    """The interpreter is shutting down and starts no more threads. A retry would fail, too."""

    default_code = "interpreter_shutdown"
    retryable = False
    retry_after_s = None

    def __init__(self) -> None:
        super().__init__(
            "The Python interpreter is shutting down. Send requests before the main thread ends, not in atexit "
            "handlers: in the main thread, join() the threads that send requests."
        )


def _used(config: RouterConfig) -> tuple[str, ...]:
    """Return the names of request hints that the router itself uses, so that no note calls them ignored."""
    return ("user",) if config.budget_per_user else ()


def _budget(
    config: RouterConfig, ledger: Ledger | None, problem: str = "", in_flight: InFlight | None = None
) -> Budget | None:
    """Return the budget, or None without limits. `problem`: why the ledger, which holds the budget, is not open."""
    limits = dict(zip(SCOPES, (config.budget, config.budget_per_key, config.budget_per_user), strict=True))
    return Budget(limits, ledger, problem, in_flight) if any(limits.values()) else None


async def _finished(work: Callable[[], T]) -> T:
    """Run `work` in a thread and return its result. A cancelled caller still waits, so that no result is lost."""
    done, is_cancelled = asyncio.get_running_loop().run_in_executor(None, work), False
    while not done.done():
        try:
            await asyncio.wait((done,))
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled and (task := asyncio.current_task()) is not None:
        task.cancel()
    return done.result()
