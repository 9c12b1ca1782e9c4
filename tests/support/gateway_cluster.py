"""A gateway with two workers in front of scripted and real nodes, with methods that kill or pause any process."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from gateway_keys import make_key
from ports import free_port
from server_processes import FAKE_NODE, Process, running
from tiny_model import write_model
from updraft.cloud_engine.gateway.access.principal import Limits
from updraft.cloud_engine.gateway.ledger.ledger import UsageLedger
from updraft.cloud_engine.gateway.ledger.opening import open_store

CLIENTS = 24
CONCURRENT = 2 * CLIENTS  # limit of the key: a reservation is settled a moment after its answer was read
_STUBS = 4
_LEFT = 2
_STOPPED_S = 5.0
_SETTLED_WORKER_S = 3.0  # minimum age of a worker to kill: the supervisor takes an earlier death for a failed start
_STABLE_CORE_S = 60.0  # seconds between two kills of a node's core (its engine process): more often, the node gives up
_RETURN_S = 120.0


@dataclass
class Group:
    """Nodes that serve the same model. A node is killed or paused only while two others are available."""

    # Function that starts a node on the given port.
    start: Callable[[str], AbstractContextManager[Process]]
    nodes: list[Process]
    # Threads that restart killed nodes, by URL of the node.
    returning: dict[str, threading.Thread] = field(default_factory=dict[str, threading.Thread])
    # Time of the last kill of a node's core, by URL of the node.
    cores_killed: dict[str, float] = field(default_factory=dict[str, float])

    def expendable(self, stopped: set[int]) -> list[Process]:
        """Return the nodes that may be killed or paused now. `stopped`: ids of paused processes."""
        away = {url for url, thread in self.returning.items() if thread.is_alive()}
        here = [node for node in self.nodes if node.url not in away and not stopped & {node.popen.pid, core_of(node)}]
        return here if len(here) > _LEFT else []

    def bring_back(self, node: Process, task: Callable[[], None]) -> None:
        self.returning[node.url] = threading.Thread(target=task)
        self.returning[node.url].start()


@dataclass
class Cluster:
    """The gateway and its nodes, every process of which can be killed or paused."""

    folder: Path
    port: int
    key: str
    admin_key: str
    stubs: Group
    reals: Group
    stack: ExitStack
    gateway: Process | None = None
    #: (start, end) of each kill of a worker or of the whole gateway, including the gateway's restart.
    kills: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    #: (time at which to resume, process id) of each paused process.
    stopped: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    #: Process ids of cores that survived the death of their node.
    outlived: list[int] = field(default_factory=list[int])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    @property
    def admin_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.admin_key}"}

    @property
    def db(self) -> Path:
        return self.folder / "usage.sqlite3"

    def start_gateway(self) -> None:
        nodes = [word for node in (*self.stubs.nodes, *self.reals.nodes) for word in ("--node", node.url)]
        files = ("--ledger", str(self.db), "--keys", str(self.folder / "keys"))
        command = ("-m", "updraft", "gateway", "--port", str(self.port), "--workers", "2", *nodes, *files)
        self.gateway = self.stack.enter_context(running(*command, log=self.folder / f"log-{time.time_ns()}"))

    def workers(self) -> list[psutil.Process]:
        """Return the worker processes that the supervisor considers started."""
        assert self.gateway is not None
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.gateway.popen.pid).children()
            return [child for child in children if time.time() - child.create_time() > _SETTLED_WORKER_S]
        return []

    def kill_worker(self, chance: random.Random) -> bool:
        if not (workers := self.workers()):
            return False
        began, worker = time.monotonic(), chance.choice(workers)
        worker.kill()
        psutil.wait_procs([worker], 60)
        self.kills.append((began, time.monotonic()))
        return True

    def kill_gateway(self, _chance: random.Random) -> bool:
        assert self.gateway is not None
        supervisor = psutil.Process(self.gateway.popen.pid)
        began = time.monotonic()
        workers = supervisor.children()
        supervisor.kill()
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        self.gateway.popen.wait()
        psutil.wait_procs(workers, 60)
        self.start_gateway()
        self.kills.append((began, time.monotonic()))
        return True

    def kill_stub(self, chance: random.Random) -> bool:
        return self._kill_server(self.stubs, chance)

    def kill_server(self, chance: random.Random) -> bool:
        return self._kill_server(self.reals, chance)

    def kill_core(self, chance: random.Random) -> bool:
        """Kill the core of a random real node, which then starts a new core. Return whether a core was killed."""
        group, long_ago = self.reals, time.monotonic() - _STABLE_CORE_S
        stable = [node for node in self._expendable(group) if group.cores_killed.get(node.url, 0.0) < long_ago]
        if not stable or not (core := core_of(node := chance.choice(stable))):
            return False
        os.kill(core, signal.SIGKILL)
        group.cores_killed[node.url] = time.monotonic()

        def restarted() -> None:
            _wait(lambda: not _is_healthy(node.url), 10)
            self.wait_for(node)

        group.bring_back(node, restarted)
        return True

    def _kill_server(self, group: Group, chance: random.Random) -> bool:
        if not (nodes := self._expendable(group)):
            return False
        node = chance.choice(nodes)
        core = core_of(node)
        node.popen.kill()

        def restart() -> None:
            node.popen.wait()
            group.nodes[group.nodes.index(node)] = self.stack.enter_context(group.start(node.url.rpartition(":")[2]))
            if core and _has_core(core):
                self.outlived.append(core)
            self.wait_for(node)

        group.bring_back(node, restart)
        return True

    def _expendable(self, group: Group) -> list[Process]:
        return group.expendable({process for _, process in self.stopped})

    def stop(self, chance: random.Random) -> bool:
        """Pause a random worker, node or core, unless a process is paused already. `resume` continues it later."""
        if self.stopped:
            return False
        nodes = [*self._expendable(self.stubs), *self._expendable(self.reals)]
        processes = [process for node in nodes for process in (node.popen.pid, core_of(node)) if process]
        process = chance.choice([*(worker.pid for worker in self.workers()), *processes] or [0])
        if not process:
            return False
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP)
            self.stopped.append((time.monotonic() + _STOPPED_S, process))
            return True
        return False

    def resume(self, *, everything: bool = False) -> None:
        for entry in tuple(self.stopped):
            until, process = entry
            if everything or time.monotonic() >= until:
                self.stopped.remove(entry)
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)

    def wait_for(self, *nodes: Process) -> None:
        """Wait until `nodes` are healthy in four answers in a row, because answers come from different workers."""
        in_a_row, urls = 0, {node.url for node in nodes}

        def are_in() -> bool:
            nonlocal in_a_row
            with suppress(httpx.HTTPError):
                answer = httpx.get(f"{self.url}/admin/nodes", headers=self.admin_headers, timeout=2)
                healthy = {node["url"] for node in answer.raise_for_status().json()["nodes"] if node["healthy"]}
                in_a_row = in_a_row + 1 if urls <= healthy else 0
            return in_a_row >= 4

        _wait(are_in, _RETURN_S)

    def wait_for_return(self) -> None:
        """Resume all paused processes, and wait until all nodes are healthy again."""
        self.resume(everything=True)
        for group in (self.stubs, self.reals):
            for thread in group.returning.values():
                thread.join()
            self.wait_for(*group.nodes)

    def rows(self) -> list[dict[str, Any]]:
        """Return the ledger's rows after the gateway has ended. Opening the ledger marks intents of dead workers."""
        UsageLedger(open_store(str(self.db))).close()
        with closing(sqlite3.connect(self.db)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute("SELECT * FROM usage")]


def core_of(node: Process) -> int:
    """Return the process id of the node's core; 0 if no core is running."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        for child in psutil.Process(node.popen.pid).children():
            with suppress(psutil.NoSuchProcess):
                if any(word.endswith("core_main") for word in child.cmdline()):
                    return child.pid
    return 0


def _has_core(process: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any(word.endswith("core_main") for word in psutil.Process(process).cmdline())
    return False


def _is_healthy(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    return False


def _wait(condition: Callable[[], bool], limit_s: float) -> None:
    """Wait until `condition` holds, at most `limit_s` seconds."""
    until = time.monotonic() + limit_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)


@contextmanager
def cluster(folder: Path, real_nodes: int) -> Iterator[Cluster]:
    """Run a gateway with scripted nodes and `real_nodes` real nodes. Fewer than three real nodes are never killed."""
    model = write_model(folder / "tiny", 0, context=512)

    def log() -> Path:
        return folder / f"log-{time.time_ns()}"

    def stub(port: str) -> AbstractContextManager[Process]:
        return running(str(FAKE_NODE), "--port", port, "--delay", "0.05", log=log())

    def real(port: str) -> AbstractContextManager[Process]:
        command = ("-m", "updraft", "node", "--port", port, "--threads", "1", "--model", str(model), "--restart")
        return running(*command, "--exit-with-parent", log=log())

    with ExitStack() as stack:
        stubs = Group(stub, [stack.enter_context(stub("0")) for _ in range(_STUBS)])
        reals = Group(real, [stack.enter_context(real("0")) for _ in range(real_nodes)])
        key = make_key(folder / "keys", "tester", limits=Limits(max_concurrency=CONCURRENT, tokens_per_minute=10**9))
        admin_key = make_key(folder / "keys", "admin", "admin")
        started = Cluster(folder, free_port(), key, admin_key, stubs, reals, stack)
        started.start_gateway()
        try:
            yield started
        finally:
            started.resume(everything=True)
            assert started.gateway is not None
            children = (
                psutil.Process(started.gateway.popen.pid).children() if started.gateway.popen.poll() is None else []
            )
            started.gateway.popen.kill()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
