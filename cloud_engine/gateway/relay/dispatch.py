"""Dispatch of one call to the nodes: selection, hedging, fail-over, and continuation of interrupted streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import msgspec

from ....protocol.errors import (
    ERROR_CODE_HEADER,
    REQUEST_FAILED,
    ModelNotFoundError,
    OverloadedError,
    QuarantinedRequestError,
    UpdraftError,
)
from ....protocol.http.app import ATTEMPT_HEADER, TENANT_HEADER, WEIGHT_HEADER
from ....protocol.telemetry.tracing import Span
from ..balancing.affinity import Placement
from ..balancing.node import Node
from ..balancing.quarantine import NodeFailure
from ..balancing.registry import NodeRegistry
from ..upstream.client import JSON, Headers, Response, Upstream, UpstreamRequest
from ..upstream.connection import SilenceTimeouts, UnreadRequestError
from ..upstream.failures import AnswerFailure, AnswerTooLargeError, UnreachableError, UpstreamFailure, UpstreamTimeout
from ..upstream.timeouts import Timeouts
from .answer import relay_passthrough, relay_stream, relay_whole
from .budget_cap import REFUSALS
from .call import Call
from .continuation import PartialAnswer
from .counters import Counters
from .usage import StreamMeter, asking_for_usage

_OVERLOADED = 529  # Anthropic's status
_IS_FULL = frozenset({408, 429, 503, _OVERLOADED})
_HAS_NO_ROUTE = frozenset({404, 405, 501})  # 501: llama.cpp's status for endpoints that its options disable
_FAILED = frozenset({402, *range(500, 600)}) - _HAS_NO_ROUTE  # 402: the operator's account at this provider is used up
_MAX_ENGINE_FAILURES = 2
_FINAL = (ERROR_CODE_HEADER.encode(), REQUEST_FAILED.encode())


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Sends calls to nodes and relays their answers."""

    registry: NodeRegistry
    upstream: Upstream
    timeouts: Timeouts = field(default_factory=Timeouts)
    counters: Counters = field(default_factory=Counters)

    async def answer(self, call: Call) -> None:
        """Try nodes until one answers. If a stream breaks off, other nodes continue it.

        Raises UpdraftError if no node answers, or UpstreamFailure if the answer breaks off after the first bytes.
        """
        registry, state = self.registry, _DispatchState()
        registry.quarantine.check(*_identity(call))
        registry.retries.requested()
        prompt = call.body if call.content_type == JSON else b""
        placement = registry.placement(call.row.key_name, call.model, prompt, call.session)
        try:
            while not state.is_over:
                if call.tried:
                    self._check_retry(call, state)
                elif self._may_be_hedged(call):
                    await self._hedged(call, placement, state)
                    continue
                async with registry.place(placement, call.tried, call.place) as node:
                    call.tried.append(node)
                    await self._try(call, node, state)
        except UpdraftError:
            if call.answered and state.failure is not None:
                raise state.failure from None  # the client gets the failure as a stream event
            raise

    def _may_be_hedged(self, call: Call) -> bool:
        """Return whether to hedge a first attempt. Retries are never hedged, because the request may crash nodes."""
        return self.timeouts.hedge_after_s is not None and call.place.priority != "batch" and call.content_type == JSON

    async def _hedged(self, call: Call, placement: Placement, state: _DispatchState) -> None:
        """Make the first attempt, and a second one if the node stays silent too long. The first answer wins."""
        attempts, hedge = state.attempts, None

        def start(node: Node, attempt: Coroutine[None, None, None]) -> None:
            attempts[node] = asyncio.create_task(attempt)
            # The node is released in a callback, because a cancelled task may never have started.
            attempts[node].add_done_callback(lambda _: self.registry.give_back(node, placement))

        first = await self.registry.take(placement, (), call.place)
        call.row.node, call.tried = first.url, [first]
        start(first, self._try(call, first, state))
        try:
            await asyncio.wait(attempts.values(), timeout=self.timeouts.hedge_after_s)
            with suppress(QuarantinedRequestError):  # meanwhile, identical requests may have crashed nodes
                self.registry.quarantine.check(*_identity(call))
                is_silent = state.winner is None and not attempts[first].done()
                hedge = self.registry.take_spare(placement, call.tried) if is_silent else None
            if hedge is not None:
                call.tried.insert(0, hedge)
                start(hedge, self._try_hedge(call, hedge, state))
            await asyncio.wait(attempts.values())
        finally:
            for attempt in attempts.values():
                attempt.cancel()
            outcomes = await asyncio.gather(*attempts.values(), return_exceptions=True)
            if hedge is not None:
                self.counters.own.of("hedge", "won" if state.winner is hedge else "lost")[0] += 1
        failures = [
            outcome
            for node, outcome in zip(attempts, outcomes, strict=True)
            if isinstance(outcome, Exception) and state.winner in (None, node)
        ]
        attempts.clear()
        for failure in failures:
            raise failure

    async def _try_hedge(self, call: Call, node: Node, state: _DispatchState) -> None:
        with suppress(OverloadedError):  # no file descriptor is free for the hedge; the first attempt continues
            await self._try(call, node, state)

    def _check_retry(self, call: Call, state: _DispatchState) -> None:
        """Check whether another node may be tried. Raises UpdraftError or UpstreamFailure if not."""
        self.registry.quarantine.check(*_identity(call))
        if state.engine_failures >= _MAX_ENGINE_FAILURES and state.failure is not None:
            raise state.failure
        if not self.registry.has_alternative(call.model, call.tried):
            if isinstance(state.failure, (UpstreamTimeout, AnswerFailure)):
                raise state.failure
            refusal = self.registry.refusal(call.model)
            if isinstance(refusal, ModelNotFoundError):
                refusal = OverloadedError("Every node that serves this model failed on this request: try again.")
            raise refusal
        if state.failure is not None and not call.answered and not self.registry.retries.take():
            raise OverloadedError("The retry budget is used up because too many requests fail: try again shortly.")

    async def _try(self, call: Call, node: Node, state: _DispatchState) -> None:
        """Make one attempt, and update the node's health and the request's quarantine record."""
        began, size = time.monotonic(), call.begun.size
        try:
            state.is_over = await self._attempt(call, node, state)
        except AnswerTooLargeError:
            raise
        except (AnswerFailure, UpstreamTimeout, UnreadRequestError) as failure:  # the node may nevertheless be healthy
            state.failure = failure
            state.engine_failures += isinstance(failure, AnswerFailure)
            if isinstance(failure, AnswerFailure) and failure.is_final:
                state.engine_failures = _MAX_ENGINE_FAILURES
            state.erred.append(node)
        except UpstreamFailure as failure:
            others_broke_off, state.failure = state.failure is not None, failure
            is_suspect = not isinstance(failure, UnreachableError)
            node.failed(str(failure), is_suspect=is_suspect)
            if is_suspect:
                got_further = others_broke_off and call.begun.size > size
                self.registry.quarantine.failed(NodeFailure(node.url, began, got_further), *_identity(call))
        if state.is_over and call.row.status not in _FAILED:
            node.breaker.succeeded()
            self.registry.quarantine.answered(*_identity(call))
            for other in state.erred:
                other.erred()

    async def _attempt(self, call: Call, node: Node, state: _DispatchState) -> bool:
        """Send the request to one node and relay the answer. Return False if another node should be tried.

        If the node refuses the cap of a budget, the request is repeated with another cap.
        """
        body, cap = self._body(call, node), None if call.answered else call.cap
        if body is None:
            state.num_unasked += 1
            return False
        if not state.attempts:
            call.row.node, call.row.retries = node.url, len(call.tried) - 1 - state.num_unasked
        while True:
            if node.tells_usage and not node.tells_tokens and call.content_type == JSON:  # vLLM or SGLang
                body = _with_cache_salt(body, call.place.tenant)
            with call.span.child("relay", "CLIENT", {"server.address": node.url}) as span:
                request = UpstreamRequest(b"POST", call.path, body, _headers(call, span), call.content_type, call.sent)
                silence_timeouts = node.silence_timeouts(self.timeouts.of_streams) if call.stream else SilenceTimeouts()
                async with self.upstream.open(node.target, request, silence_timeouts) as response:
                    if cap is not None and response.status in REFUSALS:
                        refusal = await response.read_whole(call.hold)
                        if (other := cap.replaced(refusal)) is not None:
                            cap, body = other, _with_usage(call, node, other.body)
                            continue
                        response = replace(response, body=refusal)  # noqa: PLW2901
                    if _FINAL in response.headers:
                        state.engine_failures = _MAX_ENGINE_FAILURES
                        if call.answered:
                            return False
                    elif self._should_try_another(call, node, response.status, state):
                        return False
                    if state.attempts:
                        if call.stream and response.status == 200:
                            await response.wait_for_body()
                        state.won_by(node, call)
                    call.row.status, call.cap = response.status, cap or call.cap
                    await self._relay(call, node, response, state)
            return True

    def _should_try_another(self, call: Call, node: Node, status: int, state: _DispatchState) -> bool:
        """Return whether to try another node: always if this one is full or lacks the path, once if it has failed."""
        is_full = status in _IS_FULL
        if call.answered:  # the client already has status 200, so no other status can be relayed
            state.engine_failures += status != 200 and not is_full
            return status != 200
        if not self.registry.has_alternative(call.model, call.tried) and not state.other_nodes(node):
            return False
        if status in _HAS_NO_ROUTE and call.passthrough is not None:
            return True
        if status != 200 and status not in _FAILED and state.other_nodes(node):
            call.tried.remove(node)  # this node may be tried again if the other one fails too
            return True
        if status in _HAS_NO_ROUTE:
            return self.registry.retries.take()
        if status not in _FAILED | _IS_FULL or (state.engine_failures and not is_full):
            return False
        state.engine_failures += not is_full
        if not state.other_nodes(node) and not self.registry.retries.take():
            return False
        state.erred.append(node)
        return True

    async def _relay(self, call: Call, node: Node, response: Response, state: _DispatchState) -> None:
        without_key = self.upstream.key_remover(node.target)
        if call.passthrough is not None:
            await relay_passthrough(call, call.passthrough, response, without_key)
        elif call.stream and response.status == 200:
            meter = StreamMeter(
                call.row,
                call.usage_options,
                running=node.tells_usage,
                begun=call.begun.num_tokens_before,
                size=call.size,
            )
            may_break = not state.engine_failures and self.registry.has_alternative(call.model, call.tried)
            await relay_stream(call, response, meter, without_key, may_break=may_break)
        else:
            await relay_whole(call, response, without_key)

    def _body(self, call: Call, node: Node) -> bytes | None:
        """Return the body for the node: the whole request or its continuation. None if the node cannot continue."""
        body: bytes | None = call.body
        if call.answered and not call.begun.is_empty:
            counts = call.row.prompt_tokens, call.row.completion_tokens, call.row.cached_tokens
            body = call.begun.continued(counts, takes_tokens=node.tells_tokens, takes_text=node.tells_usage)
        else:
            call.begun = PartialAnswer(call.path, call.body)
        return None if body is None else _with_usage(call, node, body)


@dataclass(slots=True)
class _DispatchState:
    """The state of a call across its attempts."""

    is_over: bool = False
    # Failure of the latest attempt.
    failure: UpstreamFailure | None = None
    # Nodes that failed on this call but are still up.
    erred: list[Node] = field(default_factory=list[Node])
    engine_failures: int = 0
    # Number of nodes that were skipped because they cannot continue the stream.
    num_unasked: int = 0
    # Hedged attempts, one task per node. The first to get an answer cancels the other.
    attempts: dict[Node, asyncio.Task[None]] = field(default_factory=dict[Node, asyncio.Task[None]])
    # Node whose hedged attempt won.
    winner: Node | None = None

    def other_nodes(self, node: Node) -> list[Node]:
        """Return the other nodes with an attempt in flight."""
        return [other for other, attempt in self.attempts.items() if other is not node and not attempt.done()]

    def won_by(self, node: Node, call: Call) -> None:
        """Cancel the other attempts, and forget their nodes as if never tried."""
        self.winner, aborted = node, self.other_nodes(node)
        for other in aborted:
            self.attempts[other].cancel()
        call.tried = [*(each for each in call.tried if each is not node and each not in aborted), node]
        call.row.node, call.row.retries = node.url, len(call.tried) - 1


def _identity(call: Call) -> tuple[bytes, bytes, bytes]:
    """Return the parts of a request by which the quarantine recognises identical requests."""
    return call.row.key_name.encode(), call.path, call.body


def _with_usage(call: Call, node: Node, body: bytes) -> bytes:
    """Return the request of `call`; if it streams a completion, with the usage reports that the node supports."""
    if not call.stream or call.passthrough is not None:
        return body
    return asking_for_usage(body, running=node.tells_usage, tokens=node.tells_tokens)


def _with_cache_salt(body: bytes, tenant: str) -> bytes:
    """Return the request with a `cache_salt` that only this tenant has, and that includes the caller's own salt."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    salt = blake2b(b"%b %b" % (tenant.encode(), fields.get("cache_salt", b""))).hexdigest()
    return msgspec.json.encode({**fields, "cache_salt": salt})


def _headers(call: Call, span: Span) -> Headers:
    # Nodes keep the caches of tenants apart by this hash, and never learn the tenant's name.
    tenant = blake2b(call.place.tenant.encode(), digest_size=16).hexdigest().encode()
    own = [(b"x-request-id", call.id.encode()), (TENANT_HEADER, tenant), (ATTEMPT_HEADER, call.attempt)]
    if call.place.weight != 1:
        own.append((WEIGHT_HEADER, str(call.place.weight).encode()))
    traced = [(name.encode(), value.encode()) for name, value in span.headers({}).items()]
    replaced = {name for name, _ in traced}
    return [*own, *traced, *(header for header in call.forwarded if header[0] not in replaced)]
