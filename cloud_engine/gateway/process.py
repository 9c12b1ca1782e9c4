"""The gateway as a process: its options, and the way to a served port."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...protocol.errors import ConfigurationError
from ...protocol.http.access import Access, check_keyless
from ...protocol.http.server import bind_socket, exit_with_parent, serve
from .access.keys import KeyStore


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Where a gateway listens, whom it serves, and what it stands in front of."""

    # URLs of OpenAI-compatible servers, which may hold passwords.
    nodes: Sequence[str] = field(repr=False)
    # The SQLite file for usage rows.
    db: Path
    # The key file. None needs `no_auth`, and serves loopback addresses only.
    keys: Path | None = None
    no_auth: bool = False
    host: str = "127.0.0.1"
    port: int = 0
    # Sent to the nodes.
    node_api_key: str | None = field(default=None, repr=False)
    # For a request from its arrival to its last byte; `Relay` may add two seconds.
    timeout_s: float = 600.0
    # Both as in `Access`.
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    ready_file: Path | None = None
    exit_with_parent: bool = False


def run_gateway(options: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises PortInUseError or ConfigurationError."""
    from .app import create_gateway_app
    from .balancing.nodes import NodeRegistry
    from .ledger.metering import Meter
    from .relay.counters import Counters
    from .relay.dispatch import Dispatch
    from .relay.relay import Relay
    from .upstream.client import Upstream

    if options.exit_with_parent:
        exit_with_parent()
    if not (options.timeout_s > 0 and math.isfinite(options.timeout_s)):
        raise ConfigurationError(f"timeout_s must be a number above 0, got {options.timeout_s}.", param="timeout_s")
    keys = _keys(options)
    access = Access((options.host, *options.allowed_hosts), tuple(options.allowed_origins))
    upstream = Upstream(options.node_api_key)
    registry = NodeRegistry(options.nodes, upstream)
    with bind_socket(options.host, options.port) as sock:
        relay = Relay(Dispatch(registry, upstream), keys, Meter(options.db), Counters(), options.timeout_s)
        serve(create_gateway_app(relay, access), sock=sock, ready_file=options.ready_file)


def _keys(options: GatewayOptions) -> KeyStore:
    if options.keys is not None and options.no_auth:
        raise ConfigurationError("--keys and --no-auth exclude each other.", param="no_auth")
    if options.keys is not None:
        return KeyStore.load(options.keys)
    if not options.no_auth:
        raise ConfigurationError("Give --keys FILE, or --no-auth to let everybody on this machine in.", param="keys")
    check_keyless(options.host, "give --keys FILE instead of --no-auth")
    return KeyStore(())
