"""Runs a cloud as processes on one machine: restarts crashed processes, and follows changes of the YAML file."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from ...protocol.errors import ConfigurationError, UpdraftError
from ...protocol.http.server import bind_socket
from ...protocol.safety.private_files import file_version
from ..gateway.process import GatewayOptions
from ..node.process import NodeOptions
from .config import CloudConfig
from .credentials import Credentials
from .servers import ServerProcess, gateway_options, node_options, register_nodes

_POLL_S = 0.1
_REGISTER_S = 10.0
_MIN_LIFETIME_S = 10.0  # a process that dies sooner counts as failing at startup
_MAX_EARLY_EXITS = 5
_log = logging.getLogger("updraft.cloud")


def run_local(file: Path, read: Callable[[], CloudConfig], on_ready: Callable[[str], None]) -> None:
    """Serve the cloud described in the file until KeyboardInterrupt, and update its nodes when the file changes.

    Calls `on_ready` with the gateway's URL once all nodes are registered. Raises ConfigurationError, PortInUseError, or
    ServerStartError if a process does not start initially.
    """
    read = partial(_read_local, read)
    seen, config = file_version(file), read()
    Credentials(config.keys).prepare()
    bind_socket(config.gateway.host, config.gateway.port).close()  # check that the port is free before starting a node
    gateway = _Server(gateway_options(config), config.gateway.drain_timeout_s)
    nodes: list[_Server] = []
    leaving: list[_Server] = []
    try:
        url = gateway.process.wait_ready()
        _update(nodes, config)
        on_ready(url)
        while True:
            time.sleep(_POLL_S)
            for server in (gateway, *nodes):
                server.restart_if_dead()
            leaving = [node for node in leaving if node.process.is_alive]
            if seen != (seen := file_version(file)):
                leaving += _followed(nodes, config, read)
    finally:
        gateway.process.stop()  # stop the gateway first, because its requests in flight need the nodes
        for node in (every := [*nodes, *leaving]):
            node.process.ask_to_stop()
        for node in every:
            node.process.stop()


def _read_local(read: Callable[[], CloudConfig]) -> CloudConfig:
    config = read()
    for model in config.models:
        if model.machines > 1:
            raise ConfigurationError(f"models.{model.name}.machines: several machines need --ray.", param="machines")
    return config


def _followed(nodes: list[_Server], config: CloudConfig, read: Callable[[], CloudConfig]) -> list[_Server]:
    """Apply changes of the file's models, and return the nodes that were asked to stop.

    If the file is invalid, log the error and change nothing.
    """
    try:
        changed = read()
        if msgspec.structs.replace(changed, models=config.models) != config:
            _log.warning("Only changes of `models` apply now; restart to apply the other settings.")
        return _update(nodes, msgspec.structs.replace(config, models=changed.models))
    except UpdraftError as error:
        _log.error("The changed file was not applied: %s", error.message)
        return []


def _update(nodes: list[_Server], config: CloudConfig) -> list[_Server]:
    """Start missing nodes, then ask superfluous nodes to stop. Return those nodes, which still finish requests."""
    unchanged: list[_Server] = []
    started: list[_Server] = []
    try:
        for model in config.models:
            for _ in range(model.replicas.min if model.kind == "updraft" else 0):
                options = node_options(config, model, restart=True)
                same = next((node for node in nodes if node.options == options and node not in unchanged), None)
                unchanged += [same] if same else []
                started += [] if same else [_Server(options, model.drain_timeout_s)]
        if started:
            register_nodes(config, [node.process.wait_ready() for node in started], _REGISTER_S)
    except BaseException:
        for node in started:
            node.process.ask_to_stop()
        for node in started:
            node.process.stop()
        raise
    removed = [node for node in nodes if node not in unchanged]
    for node in removed:
        node.process.ask_to_stop()
    nodes[:] = [*unchanged, *started]
    return removed


class _Server:
    """A server process that can be restarted with the same options."""

    def __init__(self, options: GatewayOptions | NodeOptions, drain_s: float) -> None:
        self.options = options
        self._drain_s = drain_s
        self._quick_deaths = 0
        self._restart_at = 0.0
        self._begin()

    def _begin(self) -> None:
        self.process = ServerProcess(self.options, self._drain_s)
        self._started = time.monotonic()

    def restart_if_dead(self) -> None:
        """Restart a dead process, with growing delays. Raises ConfigurationError if it always dies at startup."""
        now = time.monotonic()
        if self.process.is_alive:
            return
        if not self._restart_at:
            is_quick = now - self._started < _MIN_LIFETIME_S
            self._quick_deaths = self._quick_deaths + 1 if is_quick else 0
            if self._quick_deaths >= _MAX_EARLY_EXITS:
                raise ConfigurationError(f"A {self.process.name} keeps dying at startup. See the log above.")
            _log.warning("A %s process died: restarting it", self.process.name)
            self._restart_at = now + self._quick_deaths
        if now >= self._restart_at:
            self._restart_at = 0.0
            self.process.stop()  # close the pipe of the dead process
            self._begin()
