"""The deployments on Ray Serve: the gateway, behind Serve's proxies or direct, and nodes that register with it.

Requests go from the gateway to the nodes over HTTP, not through Ray: affinity, fail-over and metering are as ever.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import ray
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from ...protocol.errors import ConfigurationError, EngineDownError
from ...protocol.http.access import key_proof
from ..gateway.process import open_gateway
from .config import CloudConfig, ModelDeployment
from .credentials import Credentials
from .servers import ServerProcess, gateway_options, node_options

_TIMEOUT_S = 5.0
_REGISTER_S = 60.0
_PAUSE_S = 0.3
_FOLLOWED_S = 1.0  # for which other replicas of the gateway may not know of a node
_GAUGES = {
    "updraft_engine_running": "requests",
    "updraft_engine_waiting": "requests",
    "updraft_engine_kv_usage_ratio": "kv_usage",
}


@serve.ingress()
class Gateway:
    """One process of the gateway. It is given the deployments behind it so that Ray deploys them too."""

    def __init__(self, config: CloudConfig, *_nodes: Any) -> None:
        self._options = gateway_options(config)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return open_gateway(self._options)


class DirectGateway:
    """The whole gateway, in a process of its own that listens itself: Serve only watches over it."""

    def __init__(self, config: CloudConfig, *_nodes: Any) -> None:
        self._process = ServerProcess(gateway_options(config), config.gateway.drain_seconds)
        self._process.wait_ready()

    def check_health(self) -> None:
        if not self._process.is_alive:
            raise EngineDownError("The gateway's process died.")

    async def __del__(self) -> None:
        await asyncio.to_thread(self._process.stop)


class EngineNode:
    """One node, in a process of its own. It is ready when the gateway knows of it."""

    def __init__(self, config: CloudConfig, model: ModelDeployment) -> None:
        host = ray.util.get_node_ip_address() if config.insecure else "127.0.0.1"
        options = node_options(config, model, host)
        self._process = ServerProcess(options, model.drain_seconds)
        url = self._process.wait_ready()
        credentials = Credentials(config.keys)
        node_key = credentials.node_key()
        headers = {"authorization": f"Bearer {node_key}"}
        self._node = httpx.AsyncClient(base_url=url, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        _register(config.url, credentials.register_key(), {"url": url, "proof": key_proof(node_key, url)})

    async def check_health(self) -> None:
        """Raises for a node that is gone, or whose engine is: Ray then replaces the replica."""
        if not self._process.is_alive:
            raise EngineDownError("The node's process died.")
        (await self._node.get("/health")).raise_for_status()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The figures that `LoadPolicy` reads."""
        answer = (await self._node.get("/metrics")).raise_for_status()
        found = {"requests": 0.0, "kv_usage": 0.0}
        for family in text_string_to_metric_families(answer.text):
            if family.name in _GAUGES:
                found[_GAUGES[family.name]] += family.samples[0].value
        return found

    async def __del__(self) -> None:
        """The node leaves the gateway at once, and finishes what is in flight."""
        await self._node.aclose()
        await asyncio.to_thread(self._process.stop)


def _register(gateway: str, key: str, heartbeat: dict[str, str]) -> None:
    """Once more than the node does itself: a replica that Ray counts as running must be one that gets requests."""
    until, reason = time.monotonic() + _REGISTER_S, ""
    while time.monotonic() < until:
        try:
            answer = httpx.post(
                f"{gateway}/admin/nodes",
                json=heartbeat,
                headers={"authorization": f"Bearer {key}"},
                timeout=_TIMEOUT_S,
                trust_env=False,
            )
            if answer.is_success:
                time.sleep(_FOLLOWED_S)
                return
            reason = answer.text[:500]
        except httpx.HTTPError as error:
            reason = f"{type(error).__name__}: {error}"
        time.sleep(_PAUSE_S)
    raise ConfigurationError(
        f"The gateway {gateway} does not take the node {heartbeat['url']}: {reason}. "
        "Between machines, set `insecure: true`."
    )
