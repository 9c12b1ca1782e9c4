"""A gateway with two workers before four nodes, and the ways to kill and stop each of them."""

from __future__ import annotations

import os
import random
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from gateway_keys import make_key
from server_processes import FAKE_NODE, Process, running
from tiny_model import write_model
from updraft.cloud_engine.gateway.access.principal import Limits
from updraft.cloud_engine.gateway.ledger.ledger import UsageLedger
from updraft.cloud_engine.gateway.ledger.opening import open_store

CLIENTS = 20
CONCURRENT = 2 * CLIENTS  # the key's limit: an answer is read a moment before its reservation is settled
_STUBS = 3
_STOPPED_S = 5.0
_SETTLED_WORKER_S = 3.0  # the supervisor takes workers that die sooner for ones that cannot start


@dataclass
class Cluster:
    """Everything that can be killed."""

    folder: Path
    port: int
    key: str
    nodes: list[Process]
    real: Process
    stack: ExitStack
    gateway: Process | None = None
    #: From when to when workers, or all, were being killed.
    kills: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    #: Who is stopped, and until when.
    stopped: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    #: Starts the node anew that was killed last.
    returning: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    @property
    def db(self) -> Path:
        return self.folder / "usage.sqlite3"

    @property
    def lacks_a_node(self) -> bool:
        """Whether one is killed or stopped: the two others are to be left alone."""
        stubs, stopped = {node.popen.pid for node in self.nodes}, {process for _, process in self.stopped}
        return bool(stubs & stopped) or (self.returning is not None and self.returning.is_alive())

    def start_gateway(self) -> None:
        nodes = [word for node in (*self.nodes, self.real) for word in ("--node", node.url)]
        files = ("--db", str(self.db), "--keys", str(self.folder / "keys"))
        command = ("-m", "updraft", "gateway", "--port", str(self.port), "--workers", "2", *nodes, *files)
        self.gateway = self.stack.enter_context(running(*command, log=self.folder / f"log-{time.time_ns()}"))

    def workers(self) -> list[psutil.Process]:
        """Those that have started."""
        assert self.gateway is not None
        with suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.gateway.popen.pid).children()
            return [each for each in found if time.time() - each.create_time() > _SETTLED_WORKER_S]
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
        self.kills.append((began, time.monotonic()))
        self.start_gateway()
        return True

    def kill_node(self, chance: random.Random) -> bool:
        """Two others are left: the next one may be killed once this one is in again."""
        if self.lacks_a_node:
            return False
        number = chance.randrange(_STUBS)
        node = self.nodes[number]
        node.popen.kill()

        def restart() -> None:
            node.popen.wait()
            self.nodes[number] = self.stack.enter_context(stub(node.url.rpartition(":")[2]))
            self.wait_for_nodes()

        self.returning = threading.Thread(target=restart)
        self.returning.start()
        return True

    def stop(self, chance: random.Random) -> bool:
        """Stop a worker or a stub, and go on: `resume` lets it run again."""
        workers = [each.pid for each in self.workers()]
        process = chance.choice(
            [*workers, *(() if self.lacks_a_node else (node.popen.pid for node in self.nodes))] or [0]
        )
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

    def wait_for_nodes(self) -> None:
        """Until every worker that answers has all nodes in: whichever was asked, several times in a row."""
        in_a_row, until = 0, time.monotonic() + 60
        while in_a_row < 4 and time.monotonic() < until:
            with suppress(httpx.HTTPError):
                health = httpx.get(f"{self.url}/health", timeout=2).json()
                in_a_row = in_a_row + 1 if health.get("healthy_nodes") == _STUBS + 1 else 0
            time.sleep(0.05)

    def rows(self) -> list[dict[str, Any]]:
        """What is in the ledger, after the gateway's end and with the dead ones' intents marked."""
        UsageLedger(open_store(str(self.db))).close()
        with closing(sqlite3.connect(self.db)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute("SELECT * FROM usage")]


@contextmanager
def stub(port: str = "0") -> Iterator[Process]:
    with running(str(FAKE_NODE), "--port", port, "--delay", "0.02") as process:
        yield process


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        model = write_model(folder / "tiny", 0, context=512)
        nodes = [stack.enter_context(stub()) for _ in range(_STUBS)]
        command = ("-m", "updraft", "node", "--port", "0", "--threads", "1", "--model", str(model))
        real = stack.enter_context(running(*command, "--exit-with-parent"))
        key = make_key(folder / "keys", "tester", limits=Limits(concurrent=CONCURRENT, tokens_per_minute=10**9))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        made = Cluster(folder, port, key, nodes, real, stack)
        made.start_gateway()
        try:
            yield made
        finally:
            made.resume(everything=True)
            assert made.gateway is not None
            children = psutil.Process(made.gateway.popen.pid).children() if made.gateway.popen.poll() is None else []
            made.gateway.popen.kill()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
