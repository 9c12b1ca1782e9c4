"""Ray Serve deployments: the gateway, with or without Serve's proxies in front, and the nodes.

Nodes register with the gateway. The gateway sends requests to nodes over HTTP, not through Ray, so routing and metering
are the same as without Ray.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
from typing import Any

import httpx
import ray
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from ...protocol.errors import EngineDownError
from ..gateway.process import open_gateway
from .config import CloudConfig, ModelDeployment
from .credentials import Credentials
from .ray_machines import NodeGroup, start_group
from .servers import ServerProcess, gateway_options, node_options, register_nodes

_TIMEOUT_S = 5.0
_GAUGES = {
    "updraft_engine_running": "requests",
    "updraft_engine_waiting": "requests",
    "updraft_engine_kv_usage_ratio": "kv_usage",
}


@serve.ingress()
class Gateway:
    """A gateway process. The node deployments are parameters only so that Ray deploys them too."""

    def __init__(self, config: CloudConfig, *_nodes: Any) -> None:
        self._options = gateway_options(config)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return open_gateway(self._options)


class DirectGateway:
    """Runs the whole gateway in a child process that itself listens on the port; Serve only monitors the process."""

    def __init__(self, config: CloudConfig, *_nodes: Any) -> None:
        self._process = ServerProcess(gateway_options(config), config.gateway.drain_timeout_s)
        self._process.wait_ready()

    def check_health(self) -> None:
        if not self._process.is_alive:
            raise EngineDownError("The gateway process died.")

    async def __del__(self) -> None:
        await asyncio.to_thread(self._process.stop)


class EngineNode:
    """A node in a separate process. The replica is ready once the node is registered with the gateway."""

    def __init__(self, config: CloudConfig, model: ModelDeployment) -> None:
        host = ray.util.get_node_ip_address() if config.insecure else "127.0.0.1"
        options = node_options(config, model, host)
        group = start_group(options, model) if model.machines > 1 else NodeGroup(options)
        self._machines = group.actors
        self._process = ServerProcess(group.options, model.drain_timeout_s, **group.environment)
        url = self._process.wait_ready()
        headers = {"authorization": f"Bearer {Credentials(config.keys).node_key()}"}
        self._node = httpx.AsyncClient(base_url=url, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        register_nodes(config, [url])

    async def check_health(self) -> None:
        """Raise an error if the node or its engine is down, so that Ray replaces the replica."""
        if not self._process.is_alive:
            raise EngineDownError("The node process died.")
        (await self._node.get("/health")).raise_for_status()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics for `LoadAutoscaler`."""
        answer = (await self._node.get("/metrics")).raise_for_status()
        stats = {"requests": 0.0, "kv_usage": 0.0}
        for family in text_string_to_metric_families(answer.text):
            if family.name in _GAUGES:
                stats[_GAUGES[family.name]] += family.samples[0].value
        return stats

    async def __del__(self) -> None:
        """Deregister the node from the gateway at once, and let its requests in flight finish."""
        await self._node.aclose()
        await asyncio.to_thread(self._process.stop)
