"""A gateway with two workers before four nodes, clients that stream, and somebody who kills and stops all of them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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
TIMEOUT_S = 60.0
STOPPED_S = 5.0
_STUBS = 3
_REAL_PROMPTS = 4
_REAL_TOKENS = 40
_SETTLED_WORKER_S = 3.0  # the supervisor takes workers that die sooner for ones that cannot start


@dataclass
class Attempt:
    """One request as its client saw it."""

    id: str
    model: str
    expected: str
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    # 0: there was no answer.
    status: int = 0
    text: str = ""
    usage: dict[str, int] = field(default_factory=dict[str, int])
    # The type of the error that the client was told.
    error: str = ""
    # How its connection broke.
    broke: str = ""
    is_done: bool = False

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.is_done and not self.error and not self.broke


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
    #: When a gateway or a worker was killed.
    kills: list[float] = field(default_factory=list[float])
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
        self.kills.append(time.monotonic())
        chance.choice(workers).kill()
        return True

    def kill_gateway(self, _chance: random.Random) -> bool:
        assert self.gateway is not None
        supervisor = psutil.Process(self.gateway.popen.pid)
        self.kills.append(time.monotonic())
        workers = supervisor.children()
        supervisor.kill()
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        self.gateway.popen.wait()
        psutil.wait_procs(workers, 10)
        self.start_gateway()
        return True

    def kill_node(self, chance: random.Random) -> bool:
        """Two others are left: the next one may be killed once this one is in again."""
        if self.returning is not None and self.returning.is_alive():
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
        process = chance.choice([*workers, *(node.popen.pid for node in self.nodes)])
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP)
            self.stopped.append((time.monotonic() + STOPPED_S, process))
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


class Clients:
    """Stream again and again until they are told to stop."""

    def __init__(self, target: Cluster) -> None:
        self.attempts: list[Attempt] = []
        self._target = target
        self._real_texts = [_undisturbed(target.real.url, prompt) for prompt in range(_REAL_PROMPTS)]
        self._whole = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(2 * TIMEOUT_S)
        assert not self._thread.is_alive(), "a client has no answer after its timeout"

    def wait_for_answers(self, count: int) -> None:
        """So many more whole answers; whoever was stopped for long enough goes on meanwhile."""
        before, until = self._whole, time.monotonic() + TIMEOUT_S
        while self._whole < before + count and time.monotonic() < until:
            self._target.resume()
            time.sleep(0.05)

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, headers=self._target.headers) as client:
            await asyncio.gather(*(self._ask(client, number) for number in range(CLIENTS)))

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        for count in range(10**6):
            if self._stopping.is_set():
                return
            id_, prompt = f"client-{number}-{count}", count % _REAL_PROMPTS
            if number % 10:
                text = f"{id_} says what no other one says, letter by letter"
                attempt, body = Attempt(id_, "echo", text), _body("echo", text)
            else:
                attempt, body = Attempt(id_, "tiny", self._real_texts[prompt]), _real_body(prompt)
            await stream(client, self._target.url, attempt, body)
            self.attempts.append(attempt)
            self._whole += attempt.is_whole
            if not attempt.is_whole:
                await asyncio.sleep(0.3)


async def stream(
    client: httpx.AsyncClient,
    url: str,
    attempt: Attempt,
    body: dict[str, Any],
    all_began: asyncio.Barrier | None = None,
) -> None:
    """Ask, and write down all that comes. `all_began`: to be waited for behind the first event."""
    asked = client.stream("POST", f"{url}/v1/chat/completions", json=body, headers={"x-request-id": attempt.id})
    try:
        async with asyncio.timeout(TIMEOUT_S), asked as response:
            attempt.status = response.status_code
            if attempt.status != 200:
                attempt.error = json.loads(await response.aread())["error"]["type"]
                return
            async for line in response.aiter_lines():
                if all_began is not None:
                    await all_began.wait()
                    all_began = None
                _read(line, attempt)
    except TimeoutError:
        attempt.broke = "timeout"
    except httpx.TransportError as error:
        attempt.broke = type(error).__name__
    finally:
        attempt.ended = time.monotonic()


def _read(line: str, attempt: Attempt) -> None:
    if line == "data: [DONE]":
        attempt.is_done = True
    elif line.startswith("data: "):
        event = json.loads(line[6:])
        if "error" in event:
            attempt.error = event["error"]["type"]
            return
        attempt.usage = event.get("usage") or attempt.usage
        attempt.text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def all_at_once(target: Cluster, count: int) -> list[Attempt]:
    """So many streams that each begins before any of them ends."""

    async def run() -> list[Attempt]:
        all_began = asyncio.Barrier(count)
        attempts = [Attempt(f"burst-{number}", "echo", f"burst {number} " + "x" * 60) for number in range(count)]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, headers=target.headers) as client:
            asked = (stream(client, target.url, each, _body("echo", each.expected), all_began) for each in attempts)
            await asyncio.gather(*asked)
        return attempts

    return asyncio.run(run())


Action = Literal["node", "worker", "gateway", "stop"]
_ACTIONS: dict[Action, Callable[[Cluster, random.Random], bool]] = {
    "node": Cluster.kill_node,
    "worker": Cluster.kill_worker,
    "gateway": Cluster.kill_gateway,
    "stop": Cluster.stop,
}
_WEIGHTS = (5, 6, 0.6, 4)


def make_trouble(target: Cluster, clients: Clients, kills: int) -> dict[Action, int]:
    """So many kills and stops at random, with some answers between them."""
    chance, done = random.Random(kills), dict[Action, int](node=0, worker=0, gateway=0, stop=0)
    while sum(done.values()) < kills:
        action = chance.choices(tuple(_ACTIONS), _WEIGHTS)[0]
        done[action] += _ACTIONS[action](target, chance)
        clients.wait_for_answers(chance.randrange(10))
    target.resume(everything=True)
    if target.returning is not None:
        target.returning.join()
    target.wait_for_nodes()
    return done


def _body(model: str, text: str, **more: Any) -> dict[str, Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, "messages": [{"role": "user", "content": text}], **options, **more}


def _real_body(prompt: int) -> dict[str, Any]:
    return _body("tiny", f"Tell me story {prompt}", temperature=0, max_tokens=_REAL_TOKENS, ignore_eos=True)


def _undisturbed(url: str, prompt: int) -> str:
    attempt = Attempt("", "tiny", "")
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=_real_body(prompt), timeout=120) as response:
        for line in response.iter_lines():
            _read(line, attempt)
    return attempt.text
