"""`/admin/nodes`: the list of nodes, and the heartbeats by which nodes register.

The shared node key is sent to a registered node only after the node has proved that it knows the key, so that a key
with the scope `node` cannot be used to obtain the shared key.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...protocol.decoding import decode, prepare_types
from ...protocol.errors import ConfigurationError, InvalidRequestError
from ...protocol.http.access import host_is_loopback, is_loopback
from ...protocol.http.app import read_body, send_json
from .access.keys import KeyStore
from .access.principal import Scope
from .balancing.directory import LEASE_S, NodeDirectory
from .balancing.node import Node, NodeAddress
from .balancing.registry import NodeRegistry
from .upstream.client import Upstream
from .upstream.pool import is_literal_address, may_register


class Heartbeat(msgspec.Struct, forbid_unknown_fields=True):
    """A node's heartbeat. The gateway reads the list of models from the node itself."""

    # URL at which the gateway reaches the node.
    url: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
    # Maximum requests in flight on the node. None: the gateway's default.
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    # Proof that the node knows its API key, made by `key_proof`. None: the node requires no key.
    proof: Annotated[str, msgspec.Meta(max_length=128)] | None = None


prepare_types(Heartbeat)
_OF_PROXIES = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")


class NodeRoutes:
    """The handlers of `/admin/nodes`. `requests_in_flight` returns counts by node URL, summed over all workers."""

    def __init__(
        self,
        keys: KeyStore,
        registry: NodeRegistry,
        upstream: Upstream,
        requests_in_flight: Callable[[], Mapping[str, int]],
    ) -> None:
        self._keys = keys
        self._registry = registry
        self._upstream = upstream
        self._requests_in_flight = requests_in_flight

    async def list(self, request: Request) -> Response:
        self._admit(request, "admin")
        in_flight = self._requests_in_flight()
        shown = [
            {
                "url": node.url,
                "healthy": node.healthy,
                "reason": node.breaker.reason,
                "models": node.models,
                "in_flight": in_flight.get(node.url, node.in_flight),
            }
            for node in self._registry.nodes
        ]
        return send_json({"nodes": shown})

    async def register(self, request: Request) -> Response:
        """Register a node, or renew its lease. A new node is probed first."""
        self._admit(request, "node")
        directory = self._directory()
        heartbeat = decode(await read_body(request), Heartbeat)
        node = _node(heartbeat, gets_shared_key=(is_proven := self._is_proven(heartbeat)))
        if not any(known.url == node.url for known in self._registry.nodes):
            failure = await _why_out_of_reach(node, request) or await self._registry.failure_of(node)
            if failure and heartbeat.proof is not None and not is_proven:
                failure += ". The node's API key differs from this gateway's UPDRAFT_NODE_API_KEY"
            if failure:
                raise InvalidRequestError(
                    f"This gateway cannot use the node {node.url}: {failure}.", param="url", code="node_unusable"
                )
        await asyncio.to_thread(directory.register, node.url, heartbeat.concurrency, is_proven=is_proven)
        await self._registry.follow_directory()
        return send_json({"url": node.url, "lease_s": LEASE_S})

    async def remove(self, request: Request) -> Response:
        """Remove a node. Its requests in flight continue."""
        self._admit(request, "node")
        directory = self._directory()
        heartbeat = decode(await read_body(request), Heartbeat)
        url = _node(heartbeat).url
        if removed := url not in self._registry.configured:
            removed = await asyncio.to_thread(directory.remove, url, is_proven=self._is_proven(heartbeat))
            await self._registry.follow_directory()
        return send_json({"url": url, "removed": removed})

    def _is_proven(self, heartbeat: Heartbeat) -> bool:
        return heartbeat.proof is not None and self._upstream.is_proven(heartbeat.url, heartbeat.proof)

    def _admit(self, request: Request, scope: Scope) -> None:
        self._keys.principal(request.headers.get("authorization", "")).require(scope)

    def _directory(self) -> NodeDirectory:
        if (directory := self._registry.directory) is None:
            raise InvalidRequestError("This gateway runs with --no-auth, so nodes cannot register.", code="no_keys")
        return directory


async def _why_out_of_reach(node: Node, request: Request) -> str:
    """Return why the node may not register the address in its URL; empty if the address is allowed."""
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(
            node.target.host.decode(), node.target.port, type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError):
        return "the node's host name cannot be resolved"
    is_local = _is_from_this_machine(request) and is_literal_address(node.target.host.decode())
    for *_, address in addresses:
        if not may_register(str(address[0]), is_local=is_local):
            return f"nodes may not register the address {address[0]}"
    return ""


def _is_from_this_machine(request: Request) -> bool:
    """Return whether the caller is on this machine. Loopback connections do not count if a proxy made them."""
    if request.client is None or not is_loopback(request.client.host):
        return False
    return host_is_loopback(request.headers.get("host", "")) and not any(map(request.headers.get, _OF_PROXIES))


def _node(heartbeat: Heartbeat, *, gets_shared_key: bool = False) -> Node:
    """Return the node of a heartbeat. Raises InvalidRequestError for an invalid URL."""
    try:
        node = Node(NodeAddress(heartbeat.url, gets_shared_key=gets_shared_key, is_registered=True))
    except ConfigurationError as error:
        raise InvalidRequestError(
            "url must be an http(s) URL such as http://10.0.0.1:4116.", param="url", code="invalid_value"
        ) from error
    if node.target.authorization:
        raise InvalidRequestError("url must not contain a user or a password.", param="url", code="invalid_value")
    return node
