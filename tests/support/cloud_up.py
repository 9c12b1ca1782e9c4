"""Runs `updraft cloud up` as an operator does, with clients that send streaming requests until they are stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from gateway_chaos import Attempt, stream
from server_processes import TYPING

MODEL = "pocket-large"
_TOKENS = 40
_TIMEOUT_S = 300.0


@dataclass
class CloudUp:
    """A running cloud: its URL, an API key, its process and its environment."""

    url: str
    key: str
    popen: subprocess.Popen[str]
    environment: dict[str, str]

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def healthy_nodes(self) -> int:
        try:
            return int(httpx.get(f"{self.url}/health", timeout=5).json().get("healthy_nodes", 0))
        except (httpx.HTTPError, ValueError):
            return 0

    def wait_for_nodes(self, condition: Callable[[int], bool]) -> None:
        """Wait until the number of healthy nodes meets `condition` in four checks in a row.

        A single check would not suffice, because each may reach another worker of the gateway.
        """
        in_a_row, until = 0, time.monotonic() + _TIMEOUT_S
        while in_a_row < 4 and time.monotonic() < until:
            in_a_row = in_a_row + 1 if condition(self.healthy_nodes()) else 0
            time.sleep(0.1)
        assert in_a_row == 4, f"{self.healthy_nodes()} nodes"

    def processes(self, words: str) -> list[psutil.Process]:
        """Return the processes of this cloud with `words` in their command line."""
        home = self.environment["UPDRAFT_HOME"]
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if words in " ".join(process.info["cmdline"] or ()) and process.environ().get("UPDRAFT_HOME") == home
        ]


@contextmanager
def cloud_up(config: Path, environment: dict[str, str], key: str, *options: str) -> Iterator[CloudUp]:
    """Run `updraft cloud up` inside the block: yield the cloud once it is ready, and stop it with SIGTERM."""
    with command(["up", str(config), *options], environment) as popen:
        try:
            yield CloudUp(ready_url(popen), key, popen, environment)
        finally:
            popen.send_signal(signal.SIGTERM)
            popen.communicate(timeout=_TIMEOUT_S)


def command(words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start `updraft cloud WORDS` with the settings in `environment`; other settings are not inherited."""
    path = os.pathsep.join(filter(None, [str(TYPING), os.environ.get("PYTHONPATH")]))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("UPDRAFT_", "RAY_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "updraft", "cloud", *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**inherited, "PYTHONPATH": path, **environment},
    )


def ready_url(popen: subprocess.Popen[str]) -> str:
    assert popen.stdout is not None
    for line in popen.stdout:
        if line.startswith("ready "):
            return line.split()[1]
    raise AssertionError(f"updraft cloud up ended with code {popen.wait()}")


@dataclass
class Clients:
    """Clients that each stream the same answer again and again inside the `with` block."""

    cloud: CloudUp
    count: int = 20
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    _stopping: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Clients:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(2 * _TIMEOUT_S)
        assert not self._thread.is_alive(), "a client still waits after its timeout"

    def wait_for_answers(self, count: int) -> None:
        enough, until = len(self.attempts) + count, time.monotonic() + _TIMEOUT_S
        while len(self.attempts) < enough and time.monotonic() < until:
            time.sleep(0.02)

    def failures(self) -> list[Attempt]:
        """Return the attempts with an incomplete answer, or with a text that differs from the most frequent one."""
        texts = [attempt.text for attempt in self.attempts]
        usual = max(set(texts), key=texts.count)
        return [attempt for attempt in self.attempts if not attempt.is_whole or attempt.text != usual]

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # a server may close idle connections
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, limits=limits, headers=self.cloud.headers) as client:
            await asyncio.gather(*(self._ask(client, number) for number in range(self.count)))

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        count = 0
        while not self._stopping.is_set():
            attempt, count = Attempt(f"client-{number}-{count}", MODEL, ""), count + 1
            await stream(client, self.cloud.url, attempt, body())
            self.attempts.append(attempt)


def body() -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    options = {"stream": True, "temperature": 0, "max_tokens": _TOKENS, "ignore_eos": True}
    return {"model": MODEL, "messages": messages, **options}
