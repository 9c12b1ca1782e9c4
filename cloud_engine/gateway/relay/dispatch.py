"""One call to the nodes: choose, attempt, fail over until the first byte is out."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from hashlib import blake2b

from ....protocol.errors import ModelNotFoundError, OverloadedError, UpdraftError
from ....protocol.http.shell import ATTEMPT_HEADER, TENANT_HEADER
from ..balancing.nodes import Node, NodeRegistry
from ..upstream.client import Headers, Upstream, UpstreamRequest
from ..upstream.failures import UpstreamFailure
from .answer import EngineFailure, relay_stream, relay_whole
from .call import Call
from .continuation import BegunAnswer
from .usage import StreamMeter, asking_for_usage

_TRY_ELSEWHERE = frozenset({500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Sends calls to nodes and relays what they answer."""

    registry: NodeRegistry
    upstream: Upstream

    async def answer(self, call: Call) -> None:
        """Try nodes until one answers, and others go on with a stream that broke off.

        Raises UpdraftError if no node answers, UpstreamFailure once bytes are out.
        """
        failure: UpstreamFailure | None = None
        while True:
            node = self.registry.choose(call.model, call.tried)
            if node is None:
                raise self._refusal(call) if failure is None or not call.answered else failure
            call.row.node, call.row.retries = node.url, len(call.tried)
            call.tried.append(node)
            is_last = not self.registry.has_another(call.model, call.tried)
            try:
                with self.registry.load(node):
                    if await self._attempt(call, node, is_last=is_last):
                        return
            except EngineFailure as broken:
                failure = broken
            except UpstreamFailure as broken:
                node.failed(str(broken))
                failure = broken

    async def _attempt(self, call: Call, node: Node, *, is_last: bool) -> bool:
        """One attempt. False: the node answered that it cannot, and another may."""
        goes_on, tells_usage = call.answered, node.tells_usage
        body = self._body(call, node)
        if body is None:
            return False
        async with AsyncExitStack() as stack:
            async with node.unless_it_hangs():  # until its first byte, after which another node could not take over
                sent = self.upstream.open(node.target, UpstreamRequest(b"POST", call.path, body, _headers(call)))
                response = await stack.enter_async_context(sent)
            if response.status in _TRY_ELSEWHERE and not is_last:
                return False
            if goes_on and response.status != 200:
                return False  # the client has the status of the first answer
            call.row.status = response.status
            without_key = self.upstream.key_remover(node.target)
            if call.stream and response.status == 200:
                begun = call.begun.num_tokens
                meter = StreamMeter(call.row, call.usage_options, running=tells_usage, begun=begun)
                await relay_stream(call, response, meter, without_key, may_break=not is_last)
            else:
                await relay_whole(call, response, without_key)
        return True

    def _body(self, call: Call, node: Node) -> bytes | None:
        """What the node is asked: all of the answer, or what is missing of it. None: it could not go on."""
        body: bytes | None = call.body
        if call.answered:
            counts = call.row.prompt_tokens, call.row.completion_tokens
            body = call.begun.continued(counts, takes_tokens=node.tells_tokens, takes_text=node.tells_usage)
        else:
            call.begun = BegunAnswer(call.path, call.body)
        if body is None or not call.stream:
            return body
        return asking_for_usage(body, running=node.tells_usage, tokens=node.tells_tokens)

    def _refusal(self, call: Call) -> UpdraftError:
        refusal = self.registry.refusal(call.model)
        if call.tried and isinstance(refusal, ModelNotFoundError):
            return OverloadedError("Every node that has this model failed on this request: try again.")
        return refusal


def _headers(call: Call) -> Headers:
    # Nodes keep the caches of different keys apart, without being told whose they are.
    tenant = blake2b(call.row.key_name.encode(), digest_size=16).hexdigest().encode()
    own = [(b"x-request-id", call.id.encode()), (TENANT_HEADER, tenant), (ATTEMPT_HEADER, call.attempt)]
    return [*own, *call.forwarded]
