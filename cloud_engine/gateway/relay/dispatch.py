"""One call to the nodes: choose, attempt, fail over, and go on with a stream that broke off."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from hashlib import blake2b

from ....protocol.errors import ModelNotFoundError, OverloadedError, UpdraftError
from ....protocol.http.shell import ATTEMPT_HEADER, TENANT_HEADER
from ....protocol.telemetry.tracing import Span
from ..balancing.node import Node
from ..balancing.registry import NodeRegistry
from ..upstream.client import JSON, Headers, Upstream, UpstreamRequest
from ..upstream.connection import Patience
from ..upstream.failures import UnreachableError, UpstreamFailure, UpstreamTimeout
from ..upstream.timeouts import Timeouts
from .answer import EngineFailure, relay_passage, relay_stream, relay_whole
from .call import Call
from .continuation import BegunAnswer
from .usage import StreamMeter, asking_for_usage

_TRY_ELSEWHERE = frozenset({500, 502, 503, 504})
_HAS_NO_ROUTE = frozenset({404, 405})


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Sends calls to nodes and relays what they answer."""

    registry: NodeRegistry
    upstream: Upstream
    timeouts: Timeouts = field(default_factory=Timeouts)

    async def answer(self, call: Call) -> None:
        """Try nodes until one answers, and others go on with a stream that broke off.

        Raises UpdraftError if no node answers, UpstreamFailure once bytes are out.
        """
        registry, course = self.registry, _Course()
        registry.suspects.check(*_identity(call))
        registry.retries.requested()
        prompt = call.body if call.content_type == JSON else b""
        placement = registry.placement(call.row.key_name, call.model, prompt, call.session)
        try:
            while not course.is_over:
                if call.tried:
                    self._check_retry(call, course)
                async with registry.place(placement, call.tried, call.priority) as node:
                    call.row.node, call.row.retries = node.url, len(call.tried)
                    call.tried.append(node)
                    await self._try(call, node, course)
        except UpdraftError:
            if call.answered and course.failure is not None:
                raise course.failure from None  # the client gets it as an event
            raise

    def _check_retry(self, call: Call, course: _Course) -> None:
        """Raises UpdraftError or UpstreamFailure where no other node is to be asked."""
        self.registry.suspects.check(*_identity(call))
        if course.engine_failures > 1 and course.failure is not None:
            raise course.failure
        if not self.registry.has_another(call.model, call.tried):
            if isinstance(course.failure, UpstreamTimeout):
                raise course.failure
            refusal = self.registry.refusal(call.model)
            if isinstance(refusal, ModelNotFoundError):
                refusal = OverloadedError("Every node that has this model failed on this request: try again.")
            raise refusal
        if course.failure is not None and not call.answered and not self.registry.retries.take():
            raise OverloadedError("Too many requests fail and are retried: try again in a moment.")

    async def _try(self, call: Call, node: Node, course: _Course) -> None:
        """One attempt, and what it says about the node and the request."""
        goes_on, size = call.answered, call.begun.size
        try:
            course.is_over = await self._attempt(call, node, course)
        except EngineFailure as failure:
            course.failure, course.engine_failures = failure, course.engine_failures + 1
            course.erred.append(node)
        except UpstreamTimeout as failure:  # of this request; whether the node hangs is seen by its probes
            course.failure = failure
            course.erred.append(node)
        except UpstreamFailure as failure:
            course.failure = failure
            node.failed(str(failure))
            if goes_on and call.begun.size > size:  # it was past the place at which another node broke off
                self.registry.suspects.answered(*_identity(call))
            if not isinstance(failure, UnreachableError):
                self.registry.suspects.failed((node.url, node.breaker.trips), *_identity(call))
        if course.is_over and call.row.status < 500:
            node.breaker.answered()
            self.registry.suspects.answered(*_identity(call))
            for other in course.erred:
                if other.breaker.erred():
                    other.failed("it fails on requests that other nodes answer")

    async def _attempt(self, call: Call, node: Node, course: _Course) -> bool:
        """False: the node answered that it cannot, and another may."""
        goes_on, body = call.answered, self._body(call, node)
        if body is None:
            return False
        may_move = self.registry.has_another(call.model, call.tried)
        async with AsyncExitStack() as stack:
            span = stack.enter_context(call.span.child("relay", "CLIENT", {"server.address": node.url}))
            async with node.unless_it_hangs():
                request = UpstreamRequest(b"POST", call.path, body, _headers(call, span), call.content_type)
                patience = node.patience(self.timeouts.of_streams) if call.stream else Patience()
                sent = self.upstream.open(node.target, request, patience)
                response = await stack.enter_async_context(sent)
            if goes_on and response.status != 200:  # the client has the status of the first answer
                course.engine_failures += response.status != OverloadedError.status
                return False
            if response.status in _TRY_ELSEWHERE and may_move and self._moves(response.status, course):
                course.erred.append(node)
                return False
            if response.status in _HAS_NO_ROUTE and call.passage is not None and may_move:
                return False
            call.row.status = response.status
            without_key = self.upstream.key_remover(node.target)
            if call.passage is not None:
                with node.giving_up(lambda: response.give_up(node.reason)):
                    await relay_passage(call, call.passage, response, without_key)
            elif call.stream and response.status == 200:
                begun = call.begun.num_tokens
                meter = StreamMeter(call.row, call.usage_options, running=node.tells_usage, begun=begun)
                may_break = may_move and not course.engine_failures
                with node.giving_up(lambda: response.give_up(node.reason)):
                    await relay_stream(call, response, meter, without_key, may_break=may_break)
            else:
                await relay_whole(call, response, without_key)
        return True

    def _moves(self, status: int, course: _Course) -> bool:
        """Whether an error is tried elsewhere: an engine's failure once, a want of room as often as there are nodes."""
        if status != OverloadedError.status:
            if course.engine_failures:
                return False
            course.engine_failures += 1
        return self.registry.retries.take()

    def _body(self, call: Call, node: Node) -> bytes | None:
        """The request body for the node: for the whole answer, or for its missing part. None: it could not go on."""
        body: bytes | None = call.body
        if call.answered:
            counts = call.row.prompt_tokens, call.row.completion_tokens
            body = call.begun.continued(counts, takes_tokens=node.tells_tokens, takes_text=node.tells_usage)
        else:
            call.begun = BegunAnswer(call.path, call.body)
        if body is None or not call.stream or call.passage is not None:
            return body
        return asking_for_usage(body, running=node.tells_usage, tokens=node.tells_tokens)


@dataclass(slots=True)
class _Course:
    """How a call fares."""

    is_over: bool = False
    # Why the last node did not end its answer.
    failure: UpstreamFailure | None = None
    # Nodes that failed at it and went on living.
    erred: list[Node] = field(default_factory=list[Node])
    engine_failures: int = 0


def _identity(call: Call) -> tuple[bytes, bytes, bytes]:
    """The digest by which a repeated request is recognised."""
    return call.row.key_name.encode(), call.path, call.body


def _headers(call: Call, span: Span) -> Headers:
    # Nodes keep the caches of different tenants apart, without being told whose they are.
    tenant = blake2b(call.tenant.encode(), digest_size=16).hexdigest().encode()
    own = [(b"x-request-id", call.id.encode()), (TENANT_HEADER, tenant), (ATTEMPT_HEADER, call.attempt)]
    traced = [(name.encode(), value.encode()) for name, value in span.headers({}).items()]
    replaced = {name for name, _ in traced}
    return [*own, *traced, *(header for header in call.forwarded if header[0] not in replaced)]
