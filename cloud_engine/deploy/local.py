"""A cloud as plain processes of one machine: what dies is started anew."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import chain, repeat

from ...protocol.errors import ConfigurationError
from .config import CloudConfig, ModelDeployment
from .credentials import Credentials
from .servers import ServerProcess, gateway_options, node_options

_POLL_S = 0.1
_QUICK_S = 10.0  # a process that lives shorter did not serve
_MAX_QUICK = 5
_log = logging.getLogger("updraft.cloud")


def run_local(config: CloudConfig, on_ready: Callable[[str], None]) -> None:
    """Serve until KeyboardInterrupt. `on_ready` is told the gateway's address when every model has its nodes.

    Raises ConfigurationError, or ServerStartError for what does not start.
    """
    Credentials(config.keys).prepare()
    gateway = _Server(lambda: ServerProcess(gateway_options(config), config.gateway.drain_seconds))
    nodes: list[_Server] = []
    try:
        url = gateway.process.wait_ready()
        wanted = chain.from_iterable(
            repeat(model, model.replicas.min) for model in config.models if model.kind == "updraft"
        )
        nodes += [_Server(_starter(config, model)) for model in wanted]
        for node in nodes:
            node.process.wait_ready()
        on_ready(url)
        while True:
            time.sleep(_POLL_S)
            for server in (gateway, *nodes):
                server.restart_if_dead()
    finally:
        gateway.process.stop()  # first: what it has in flight needs the nodes
        for node in nodes:
            node.process.ask_to_stop()
        for node in nodes:
            node.process.stop()


def _starter(config: CloudConfig, model: ModelDeployment) -> Callable[[], ServerProcess]:
    return lambda: ServerProcess(node_options(config, model, restart=True), model.drain_seconds)


class _Server:
    """A process, and the way to start another in its place."""

    def __init__(self, start: Callable[[], ServerProcess]) -> None:
        self._start = start
        self._quick_deaths = 0
        self._restart_at = 0.0
        self._begin()

    def _begin(self) -> None:
        self.process = self._start()
        self._started = time.monotonic()

    def restart_if_dead(self) -> None:
        """Sooner the first time than the next. Raises ConfigurationError for one that dies whenever it is started."""
        now = time.monotonic()
        if self.process.is_alive:
            return
        if not self._restart_at:
            is_quick = now - self._started < _QUICK_S
            self._quick_deaths = self._quick_deaths + 1 if is_quick else 0
            if self._quick_deaths >= _MAX_QUICK:
                raise ConfigurationError(f"A {self.process.name} dies whenever it is started: see the log above.")
            _log.warning("A %s died: starting it anew", self.process.name)
            self._restart_at = now + self._quick_deaths
        if now >= self._restart_at:
            self._restart_at = 0.0
            self.process.stop()  # releases its pipe
            self._begin()
