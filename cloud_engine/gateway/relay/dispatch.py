"""One call to the nodes: choose, attempt, fail over until the first byte is out."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from hashlib import blake2b

from ....protocol.errors import ModelNotFoundError, OverloadedError, UpdraftError
from ....protocol.http.shell import ATTEMPT_HEADER, TENANT_HEADER
from ..balancing.nodes import Node, NodeRegistry
from ..upstream.client import Headers, Upstream, UpstreamFailure
from .answer import relay_stream, relay_whole
from .call import Call
from .usage import StreamMeter, asking_for_usage

_TRY_ELSEWHERE = frozenset({500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Sends calls to nodes and relays what they answer."""

    registry: NodeRegistry
    upstream: Upstream

    async def answer(self, call: Call) -> None:
        """Try nodes until one answers. Raises UpdraftError if none does, UpstreamFailure once bytes are out."""
        while True:
            node = self.registry.choose(call.model, call.tried)
            if node is None:
                raise self._refusal(call)
            call.row.node, call.row.retries = node.url, len(call.tried)
            call.tried.append(node)
            is_last = not self.registry.has_another(call.model, call.tried)
            try:
                with self.registry.load(node):
                    if await self._attempt(call, node, is_last=is_last):
                        return
            except UpstreamFailure as failure:
                node.failed(str(failure))
                if call.answered:
                    raise

    async def _attempt(self, call: Call, node: Node, *, is_last: bool) -> bool:
        """One attempt. False: the node answered that it cannot, and another may."""
        tells_usage = node.tells_usage
        body = asking_for_usage(call.body, running=tells_usage) if call.stream else call.body
        async with AsyncExitStack() as stack:
            async with node.unless_it_hangs():  # until its first byte, after which another node could not take over
                sent = self.upstream.open("POST", node.target, call.path, body, _headers(call))
                response = await stack.enter_async_context(sent)
            if response.status in _TRY_ELSEWHERE and not is_last:
                return False
            call.row.status = response.status
            without_key = self.upstream.key_remover(node.target)
            if call.stream and response.status == 200:
                meter = StreamMeter(call.row, call.usage_options, running=tells_usage)
                await relay_stream(call, response, meter, without_key)
            else:
                await relay_whole(call, response, without_key)
        return True

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
