"""The gateway as a process: its options, and the start of its workers."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ...protocol.decoding import prepare_types
from ...protocol.errors import ConfigurationError
from ...protocol.http.access import Access, check_keyless
from ...protocol.http.server import DRAIN_S, bind_socket, exit_with_parent, serve
from ...protocol.http.tls import TlsFiles, check_encrypted
from ...protocol.safety.system import ignore_hangup
from .access.keys import KeyStore
from .limits.accounting import AccountingOptions
from .relay.counters import ServiceObjective
from .upstream.timeouts import Timeouts

if TYPE_CHECKING:
    from fastapi import FastAPI

    from .balancing.directory import NodeDirectory
    from .balancing.node import NodeAddress
    from .balancing.registry import SharedBalancingState
    from .relay.shared_rows import SharedRows

_COLLECT_AFTER = 10_000  # new objects after which garbage is collected


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The settings of a gateway."""

    # URLs of OpenAI-compatible servers; they may contain passwords.
    nodes: Sequence[str] = field(repr=False)
    # Settings of the ledger, prices and limits; a URL may contain a password.
    accounting: AccountingOptions = field(repr=False)
    # The key database. None requires `no_auth`, and limits the gateway to loopback addresses.
    keys: Path | None = None
    no_auth: bool = False
    host: str = "127.0.0.1"
    port: int = 0
    # API key sent to the nodes.
    node_api_key: str | None = field(default=None, repr=False)
    # TOML file with further nodes.
    nodes_file: Path | None = None
    # Maximum requests in flight per node; None: unlimited.
    max_concurrency_per_node: int | None = None
    # Maximum number of queued requests while all nodes are full.
    max_waiting: int = 256
    # Timeouts in seconds. `Relay` may exceed `timeout_s` by two seconds, to ask a node for the tokens used.
    timeouts: Timeouts = field(default_factory=Timeouts)
    # Accepted `Host` and `Origin` headers; see `Access`.
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    # Latency objective. The metrics count the streams that meet it.
    objective: ServiceObjective = field(default_factory=ServiceObjective)
    # Size of the response cache in MiB, over all workers. 0: no cache.
    response_cache_mb: int = 0
    workers: int = 1
    # Time for requests in flight to finish after SIGTERM, in seconds.
    drain_timeout_s: float = DRAIN_S
    # Certificate and key of the server. None: plain HTTP, allowed beyond loopback only if `insecure`.
    tls: TlsFiles | None = None
    insecure: bool = False
    ready_file: Path | None = None
    exit_with_parent: bool = False


prepare_types(GatewayOptions)


def run_gateway(options: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises PortInUseError or ConfigurationError.

    SIGHUP is ignored: keys and certificates are reloaded when they change.
    """
    from .balancing.registry import SharedBalancingState
    from .relay.shared_rows import SharedRows
    from .workers import Supervisor

    _checked(options)
    ignore_hangup()
    import_module(f"{__package__}.app")  # before forking, so that no worker has to import the app
    rows, balancing = SharedRows(options.workers), SharedBalancingState()
    with bind_socket(options.host, options.port) as sock:
        # The workers share this socket. If another worker accepts a connection first, `accept` must not block.
        sock.setblocking(False)

        def work(number: int) -> None:
            if options.exit_with_parent or options.workers > 1:
                exit_with_parent(options.drain_timeout_s)
            app = _app(options, rows, balancing, number)
            _collect_seldom()
            serve(
                app,
                sock=sock,
                ready_file=options.ready_file,
                drain_s=options.drain_timeout_s,
                announces=number == 0,
                tls=options.tls,
            )

        if options.workers == 1:
            work(0)
        else:
            Supervisor(options.workers, work, options.drain_timeout_s, exit_with_parent=options.exit_with_parent).run()


def _checked(options: GatewayOptions) -> None:
    """Check the settings before workers start. Raises ConfigurationError."""
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
    """Return the gateway's app for an external ASGI server, as a single worker. Raises ConfigurationError."""
    from .balancing.registry import SharedBalancingState
    from .relay.shared_rows import SharedRows

    _checked(options)
    return _app(replace(options, workers=1), SharedRows(), SharedBalancingState(), 0)


def _app(options: GatewayOptions, rows: SharedRows, balancing: SharedBalancingState, worker: int) -> FastAPI:
    """Return the app of one worker. The database, `rows` and `balancing` hold the state that workers share."""
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
    upstream = Upstream(options.node_api_key, PoolLimits(connect_s=options.timeouts.connect_timeout_s))
    waiting = part_of_worker(options.max_waiting, options.workers, worker)
    registry = NodeRegistry(_nodes(options, worker), upstream, waiting, _directory(options, worker), balancing)
    prices = {node.url: node.price for node in registry.nodes if node.price is not None}
    accounting = open_accounting(options.accounting, prices)
    counters = Counters(rows, worker, options.objective)
    cache = ResponseCache(options.response_cache_mb * 2**20 // options.workers, registry)
    relay = Relay(Dispatch(registry, upstream, options.timeouts, counters), keys, accounting, counters, cache)
    return create_gateway_app(relay, access, logs_limits=worker == 0)


def _collect_seldom() -> None:
    """Collect garbage rarely: modules live forever and requests leave no cycles, so full collections only cost time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 20, 50)


def _nodes(options: GatewayOptions, worker: int = 0) -> list[NodeAddress]:
    """Return the configured nodes, each with one worker's share of its concurrency limit."""
    from .balancing.node import NodeAddress
    from .balancing.nodes_file import read_nodes

    listed = [] if options.nodes_file is None else read_nodes(options.nodes_file, options.max_concurrency_per_node)
    nodes = [*(NodeAddress(url, concurrency=options.max_concurrency_per_node) for url in options.nodes), *listed]
    limits = [node.concurrency for node in nodes if node.concurrency is not None]
    if limits and min(limits) < options.workers:
        raise ConfigurationError(
            f"A node limited to {min(limits)} concurrent requests cannot be shared by {options.workers} workers: "
            "use fewer workers, or raise its max_concurrency.",
            param="max_concurrency_per_node",
        )
    return [node.of_worker(options.workers, worker) for node in nodes]


def _directory(options: GatewayOptions, worker: int = 0) -> NodeDirectory | None:
    """Return the directory of registered nodes, or None without keys, since heartbeats need authentication."""
    from .balancing.directory import NodeDirectory

    if options.keys is None:
        return None
    return NodeDirectory(Path(f"{options.keys}.nodes"), options.max_concurrency_per_node, options.workers, worker)


def _keys(options: GatewayOptions) -> KeyStore:
    if options.keys is not None and options.no_auth:
        raise ConfigurationError("--keys and --no-auth cannot be used together: drop one of them.", param="no_auth")
    if options.keys is not None:
        return KeyStore(options.keys)
    if not options.no_auth:
        raise ConfigurationError("Give --keys PATH, or --no-auth to allow every caller on this machine.", param="keys")
    check_keyless(options.host, "give --keys PATH instead of --no-auth")
    return KeyStore(None)
