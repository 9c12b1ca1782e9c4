"""The gateway as a process: its options, and the way to a served port."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from ...protocol.decoding import prepare_types
from ...protocol.errors import ConfigurationError
from ...protocol.http.access import Access, check_keyless
from ...protocol.http.server import DRAIN_S, bind_socket, exit_with_parent, serve
from ...protocol.http.tls import TlsFiles, check_encrypted
from ...protocol.safety.system import outlive_hangup
from .access.keys import KeyStore
from .limits.accounting import AccountingOptions
from .relay.counters import ServiceObjective
from .upstream.timeouts import Timeouts

if TYPE_CHECKING:
    from fastapi import FastAPI

    from .balancing.directory import NodeDirectory
    from .balancing.node import NodeAddress
    from .balancing.registry import BalancingMemory
    from .relay.shared_rows import SharedRows

_COLLECT_AFTER = 10_000  # objects


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The options of a gateway: its address, its callers, and its nodes."""

    # URLs of OpenAI-compatible servers, which may hold passwords.
    nodes: Sequence[str] = field(repr=False)
    # The ledger, prices and limits; a URL may hold a password.
    accounting: AccountingOptions = field(repr=False)
    # The key database. None needs `no_auth`, and serves loopback addresses only.
    keys: Path | None = None
    no_auth: bool = False
    host: str = "127.0.0.1"
    port: int = 0
    # Sent to the nodes.
    node_api_key: str | None = field(default=None, repr=False)
    # A TOML file with further nodes.
    nodes_file: Path | None = None
    # Requests that a node gets at a time; None for as many as come.
    node_concurrency: int | None = None
    # Requests that wait while every node has as many as it may.
    max_waiting: int = 256
    # `Relay` may add two seconds to that of the whole.
    timeouts: Timeouts = field(default_factory=Timeouts)
    # Both as in `Access`.
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    # What streams are measured against.
    objective: ServiceObjective = field(default_factory=ServiceObjective)
    # Megabytes of answers that are kept for requests that ask the same again, over all workers.
    response_cache_mb: int = 0
    # Processes behind the port.
    workers: int = 1
    # The time that requests in flight get to finish on SIGTERM.
    drain_seconds: float = DRAIN_S
    # Certificate and key of the server. None: plain HTTP, beyond loopback only if `insecure`.
    tls: TlsFiles | None = None
    insecure: bool = False
    ready_file: Path | None = None
    exit_with_parent: bool = False


prepare_types(GatewayOptions)


@dataclass(frozen=True, slots=True)
class _Shared:
    """The memory that workers have in common."""

    rows: SharedRows
    balancing: BalancingMemory


def run_gateway(options: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises PortInUseError or ConfigurationError.

    SIGHUP changes nothing: keys and certificates are read again as soon as they change.
    """
    from .balancing.registry import BalancingMemory
    from .relay.shared_rows import SharedRows
    from .workers import Supervisor

    _checked(options)
    outlive_hangup()
    import_module(f"{__package__}.app")  # here, so that a worker which replaces another has it
    shared = _Shared(SharedRows(options.workers), BalancingMemory())
    with bind_socket(options.host, options.port) as sock:
        # All workers share this mode: one that waits in `accept` would wait with all streams.
        sock.setblocking(False)
        if options.workers == 1:
            if options.exit_with_parent:
                exit_with_parent(options.drain_seconds)
            _serve(options, sock, shared, 0)
            return

        def work(number: int) -> None:
            exit_with_parent(options.drain_seconds)
            _serve(options, sock, shared, number)

        Supervisor(options.workers, work, options.drain_seconds, exit_with_parent=options.exit_with_parent).run()


def _checked(options: GatewayOptions) -> None:
    """Raises ConfigurationError for what no worker could start with."""
    from ...accounting.ledger.workers import MAX_WORKERS
    from .balancing.registry import NodeRegistry
    from .limits.accounting import check_accounting
    from .upstream.client import Upstream

    if not 1 <= options.workers <= MAX_WORKERS:
        raise ConfigurationError(f"workers must be 1 to {MAX_WORKERS}, got {options.workers}.", param="workers")
    _keys(options)
    check_encrypted(options.host, options.tls, insecure=options.insecure)
    Access((options.host, *options.allowed_hosts), tuple(options.allowed_origins))
    directory = _directory(options)
    NodeRegistry(_nodes(options), Upstream(options.node_api_key), options.max_waiting, directory)
    if directory is not None:
        directory.create()
    check_accounting(options.accounting)


def open_gateway(options: GatewayOptions) -> FastAPI:
    """A gateway for a server of somebody else's, as the only worker of its process. Raises ConfigurationError."""
    from .balancing.registry import BalancingMemory
    from .relay.shared_rows import SharedRows

    _checked(options)
    return _app(replace(options, workers=1), _Shared(SharedRows(), BalancingMemory()), 0)


def _serve(options: GatewayOptions, sock: socket, shared: _Shared, worker: int) -> None:
    app = _app(options, shared, worker)
    _collect_seldom()
    serve(
        app,
        sock=sock,
        ready_file=options.ready_file,
        drain_s=options.drain_seconds,
        announces=worker == 0,
        tls=options.tls,
    )


def _app(options: GatewayOptions, shared: _Shared, worker: int) -> FastAPI:
    """One worker. All state that it shares with others is in the database and in `shared`."""
    from .app import create_gateway_app
    from .balancing.node import part_of_worker
    from .balancing.registry import NodeRegistry
    from .limits.accounting import open_accounting
    from .relay.counters import Counters
    from .relay.dispatch import Dispatch
    from .relay.relay import Relay
    from .relay.response_cache import ResponseCache
    from .upstream.client import Upstream
    from .upstream.pool import PoolLimits

    keys = _keys(options)
    access = Access((options.host, *options.allowed_hosts), tuple(options.allowed_origins))
    upstream = Upstream(options.node_api_key, PoolLimits(connect_s=options.timeouts.connect_s))
    waiting = part_of_worker(options.max_waiting, options.workers, worker)
    registry = NodeRegistry(_nodes(options, worker), upstream, waiting, _directory(options, worker), shared.balancing)
    prices = {node.url: node.price for node in registry.nodes if node.price is not None}
    accounting = open_accounting(options.accounting, prices)
    counters = Counters(shared.rows, worker, options.objective)
    cache = ResponseCache(options.response_cache_mb * 2**20 // options.workers, registry)
    relay = Relay(Dispatch(registry, upstream, options.timeouts, counters), keys, accounting, counters, cache)
    return create_gateway_app(relay, access)


def _collect_seldom() -> None:
    """The modules live for ever, and requests leave no circles: looking through all of them again and again is dear."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 20, 50)


def _nodes(options: GatewayOptions, worker: int = 0) -> list[NodeAddress]:
    """As one worker sees them. It does not know of the others' requests, and has its part of each node's limit."""
    from .balancing.node import NodeAddress
    from .balancing.nodes_file import read_nodes

    listed = [] if options.nodes_file is None else read_nodes(options.nodes_file, options.node_concurrency)
    nodes = [*(NodeAddress(url, concurrency=options.node_concurrency) for url in options.nodes), *listed]
    limits = [node.concurrency for node in nodes if node.concurrency is not None]
    if limits and min(limits) < options.workers:
        raise ConfigurationError(
            f"A node that takes {min(limits)} requests at a time cannot be shared by {options.workers} workers: "
            "use fewer workers, or raise its concurrency.",
            param="node_concurrency",
        )
    return [node.of_worker(options.workers, worker) for node in nodes]


def _directory(options: GatewayOptions, worker: int = 0) -> NodeDirectory | None:
    """The directory of registered nodes. None without keys: nobody could be told from a stranger."""
    from .balancing.directory import NodeDirectory

    if options.keys is None:
        return None
    return NodeDirectory(Path(f"{options.keys}.nodes"), options.node_concurrency, options.workers, worker)


def _keys(options: GatewayOptions) -> KeyStore:
    if options.keys is not None and options.no_auth:
        raise ConfigurationError("--keys and --no-auth exclude each other.", param="no_auth")
    if options.keys is not None:
        return KeyStore(options.keys)
    if not options.no_auth:
        raise ConfigurationError("Give --keys PATH, or --no-auth to let everybody on this machine in.", param="keys")
    check_keyless(options.host, "give --keys PATH instead of --no-auth")
    return KeyStore(None)
