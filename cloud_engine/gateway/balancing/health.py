"""Health checks of nodes: frequent `/health` probes, periodic model lists, and occasional one-token completions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from ....protocol.decoding import UNREADABLE, prepare_types
from ....protocol.errors import OverloadedError
from ..upstream.client import Upstream, UpstreamRequest
from ..upstream.failures import UpstreamFailure, UpstreamTimeout
from ..upstream.pool import OWN_STALL_S
from .node import Model, Node

_PROBE_S = 0.5
_MIN_TIMEOUT_S, _MAX_TIMEOUT_S = 2.0, 10.0
_TIMEOUTS_TO_LEAVE = 3  # consecutive timeouts that take a node out of rotation; a busy machine may miss a probe or two
_HUNG_S = 20.0  # seconds without any data after which a node out of rotation loses its requests in flight
_MODELS_EVERY = 20  # number of probes from one read of the model list to the next
_TOKEN_EVERY_S = 30.0  # seconds without a request after which a node gets a one-token probe
_TOKEN_TIMEOUT_S = 20.0
log = logging.getLogger("updraft.gateway")


class _Models(msgspec.Struct):
    data: list[Model]


prepare_types(_Models)


class ProbeTimeout:
    """Adaptive, bounded probe timeout. Like TCP's retransmission timeout: mean response time plus four deviations."""

    def __init__(self) -> None:
        self._mean_s = self._deviation_s = 0.0

    @property
    def seconds(self) -> float:
        return min(_MAX_TIMEOUT_S, max(_MIN_TIMEOUT_S, self._mean_s + 4 * self._deviation_s))

    def answered(self, after_s: float) -> None:
        off_s = after_s - self._mean_s
        self._mean_s += off_s / 8
        self._deviation_s += (abs(off_s) - self._deviation_s) / 4


class HealthWatch:
    """Watches one node. An occasional one-token completion detects nodes that answer probes but cannot generate."""

    def __init__(self, node: Node, upstream: Upstream, on_probe: Callable[[], None]) -> None:
        """Prepare to watch `node`; `on_probe` is called after each round of probes."""
        self.has_looked = asyncio.Event()
        self._node = node
        self._upstream = upstream
        self._on_probe = on_probe
        self._timeout = ProbeTimeout()
        self._timeouts = 0
        self._silent_since = self._token_at = time.monotonic()

    async def run(self) -> None:
        """Probe the node until cancelled."""
        count = 0
        while True:
            await self.probe(with_models=not self._node.healthy or count % _MODELS_EVERY == 0)
            self.has_looked.set()
            if self._wants_token():
                await self._ask_for_a_token()
            self._on_probe()
            count += 1
            await asyncio.sleep(_PROBE_S)

    async def probe(self, *, with_models: bool) -> None:
        """Probe `/health` (404 and 405 count as healthy) and, if `with_models`, read the model list."""
        node, began = self._node, time.monotonic()
        try:
            async with asyncio.timeout(self._timeout.seconds):
                status, _ = await self._upstream.get(node.target, b"/health")
                if status not in (200, 404, 405):
                    node.failed(f"/health answered {status}")
                    return
                if with_models:
                    status, body = await self._upstream.get(node.target, b"/v1/models")
                    if status != 200:
                        node.failed(f"/v1/models answered {status}")
                        return
                    node.serves(msgspec.json.decode(body, type=_Models).data)
        except OverloadedError:
            return  # the gateway is out of sockets, which says nothing about the node
        except (TimeoutError, UpstreamTimeout):
            self._count_late_probe(began)
        except (UpstreamFailure, *UNREADABLE) as error:
            node.failed(str(error))
        except Exception:  # a fault of the gateway must not end the watch, which would leave the node in rotation
            log.exception("The probe of node %s failed", node.url)
            node.failed("the probe failed: the gateway's log has the traceback")
        else:
            self._timeouts = 0
            self._timeout.answered(time.monotonic() - began)
            node.probed()

    def _count_late_probe(self, since: float) -> None:
        """Count a probe that timed out, unless the node has sent data on another connection since the probe began.

        Nor does a probe count during which the gateway itself was stalled.
        Requests in flight stay longer than the node's place in the rotation: it may be slow, and they are half done.
        """
        if time.monotonic() - since > self._timeout.seconds + OWN_STALL_S:
            return
        if self._upstream.last_heard(self._node.target) > since:
            self._timeouts = 0
            return
        if not self._timeouts:
            self._silent_since = since
        self._timeouts += 1
        if self._timeouts < _TIMEOUTS_TO_LEAVE:
            return
        reason = f"{self._timeouts} consecutive probes timed out after {self._timeout.seconds:.1f} s"
        self._node.failed(reason)
        if time.monotonic() - self._silent_since >= _HUNG_S:
            self._upstream.give_up(self._node.target, reason)

    def _mark_hung(self, reason: str) -> None:
        """Take the node out of rotation and fail its requests in flight."""
        self._node.failed(reason)
        self._upstream.give_up(self._node.target, reason)

    def _wants_token(self) -> bool:
        """Return whether to send a token probe: only to an idle, healthy node, never to a billed third-party server."""
        node, now = self._node, time.monotonic()
        if node.in_flight or not node.healthy or not node.models or not node.tells_usage:
            self._token_at = now
        return now - self._token_at >= _TOKEN_EVERY_S

    async def _ask_for_a_token(self) -> None:
        node, self._token_at = self._node, time.monotonic()
        body = msgspec.json.encode({"model": node.models[0], "prompt": "a", "max_tokens": 1})
        try:
            async with asyncio.timeout(_TOKEN_TIMEOUT_S):
                async with self._upstream.open(
                    node.target, UpstreamRequest(b"POST", b"/v1/completions", body)
                ) as response:
                    await response.read_whole()
        except (UpstreamFailure, TimeoutError) as error:
            self._mark_hung(f"the one-token probe failed: {error or 'timed out'}")
        except OverloadedError:
            return
        else:
            if response.status >= 500 and response.status != OverloadedError.status:
                node.failed(f"the one-token probe got status {response.status}")
