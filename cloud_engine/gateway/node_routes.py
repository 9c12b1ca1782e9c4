"""`/admin/nodes`: the nodes behind the gateway, and the heartbeats by which nodes come and stay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...protocol.decoding import decode, prepare_types
from ...protocol.errors import ConfigurationError, InvalidRequestError
from ...protocol.http.shell import read_body, send_json
from .access.keys import KeyStore
from .access.principal import Scope
from .balancing.directory import LEASE_S, NodeDirectory
from .balancing.node import Node, NodeAddress
from .balancing.registry import NodeRegistry


class Heartbeat(msgspec.Struct, forbid_unknown_fields=True):
    """A node's registration. Its models are read from the node."""

    # Under which the gateway reaches it.
    url: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
    # Requests that it takes at a time. None: as the gateway is set.
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None


prepare_types(Heartbeat)


class NodeRoutes:
    """`requests_in_flight`: by node, over all workers."""

    def __init__(
        self, keys: KeyStore, registry: NodeRegistry, requests_in_flight: Callable[[], Mapping[str, int]]
    ) -> None:
        self._keys = keys
        self._registry = registry
        self._requests_in_flight = requests_in_flight

    async def list(self, request: Request) -> Response:
        self._admit(request, "admin")
        in_flight = self._requests_in_flight()
        shown = [
            {
                "url": node.url,
                "healthy": node.healthy,
                "reason": node.reason,
                "models": node.models,
                "in_flight": in_flight.get(node.url, node.in_flight),
            }
            for node in self._registry.nodes
        ]
        return send_json({"nodes": shown})

    async def register(self, request: Request) -> Response:
        """A heartbeat. Of a node that is new here, the models are asked for first."""
        self._admit(request, "node")
        directory = self._directory()
        heartbeat = decode(await read_body(request), Heartbeat)
        node = _node(heartbeat)
        if not any(known.url == node.url for known in self._registry.nodes):
            failure = await self._registry.failure_of(node)
            if failure:
                raise InvalidRequestError(
                    f"{node.url} is no node that this gateway can use: {failure}.", param="url", code="node_unusable"
                )
        await asyncio.to_thread(directory.register, node.url, heartbeat.concurrency)
        await self._registry.follow_directory()
        return send_json({"url": node.url, "lease_s": LEASE_S})

    async def remove(self, request: Request) -> Response:
        """A node that leaves: requests in flight on it go on."""
        self._admit(request, "node")
        directory = self._directory()
        url = _node(decode(await read_body(request), Heartbeat)).url
        await asyncio.to_thread(directory.remove, url)
        await self._registry.follow_directory()
        return send_json({"url": url, "removed": True})

    def _admit(self, request: Request, scope: Scope) -> None:
        self._keys.principal(request.headers.get("authorization", "")).require(scope)

    def _directory(self) -> NodeDirectory:
        if (directory := self._registry.directory) is None:
            raise InvalidRequestError("This gateway runs with --no-auth: nodes cannot register.", code="no_keys")
        return directory


def _node(heartbeat: Heartbeat) -> Node:
    """Raises InvalidRequestError."""
    try:
        node = Node(NodeAddress(heartbeat.url))
    except ConfigurationError as error:
        raise InvalidRequestError(
            "url must be an http(s) URL such as http://10.0.0.1:4116.", param="url", code="invalid_value"
        ) from error
    if node.target.authorization:
        raise InvalidRequestError("url must hold no user and no password.", param="url", code="invalid_value")
    return node
