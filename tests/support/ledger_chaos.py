"""Two daemons, apps and commands that share one ledger and are killed at random, while clients record all answers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import runpy
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx
import updraft
from router_fakes import FakeCloud
from waiting import wait_for

TOKENS = 15  # tokens per answer of the fake cloud
LIMIT = 1400  # budget per user in tokens; `updraft ask` reserves 1,024
PAUSE_S = 0.03  # seconds that a client waits between two requests
_PROCESSES = multiprocessing.get_context("forkserver")  # imports the package only once for all processes
_PROCESSES.set_forkserver_preload(["updraft", "updraft.cli.main", "updraft.router.server.app", "updraft.cli.servers"])


def _app(end: str) -> None:
    client = updraft.OpenAI(max_retries=0)
    for _ in range(2):
        answer = client.chat.completions.create(
            model="cloud", messages=[{"role": "user", "content": "hi"}], max_tokens=5, user=f"app-{os.getpid()}"
        )
        print((answer.model_extra or {})["updraft"]["request_id"], flush=True)
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def command(*arguments: str) -> None:
    sys.argv = ["updraft", *arguments]
    runpy.run_module("updraft", run_name="__main__")


def _backup(ledger: str) -> None:
    with sqlite3.connect(ledger) as live, sqlite3.connect(":memory:") as copy:
        live.backup(copy)
        assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def _work(home: str, output: str, work: Callable[..., None], arguments: tuple[str, ...]) -> None:
    """Run `work(*arguments)` in this child process, with its output in the file `output`."""
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.environ["UPDRAFT_HOME"] = home
    work(*arguments)


_READY = re.compile(r"^ready (\S+)", re.MULTILINE)


class SharedHome:
    """The `UPDRAFT_HOME` that all processes share."""

    def __init__(self, folder: Path, cloud: FakeCloud) -> None:
        self.folder = folder / "home"
        self.folder.mkdir(mode=0o700)
        self.ledger = self.folder / "ledger.sqlite3"
        (self.folder / "config.toml").write_text(
            f'cloud_url = "{cloud.url}"\ncloud_model = "large"\n[budget_per_user]\ncloud_tokens = {LIMIT}\n'
        )
        self._outputs = count()
        #: Request ids of complete answers, and the number of complete answers per user.
        self.answered: list[str] = []
        self.users: dict[str, int] = {}
        self.refused = 0
        #: Descriptions of errors that must not happen.
        self.faults: list[str] = []

    def start(self, work: Callable[..., None], *arguments: str) -> tuple[BaseProcess, Path]:
        """Start a process that runs `work`, and return it with the path of its output file."""
        output = self.folder.parent / f"output-{next(self._outputs)}"
        process = _PROCESSES.Process(target=_work, args=(str(self.folder), str(output), work, arguments))
        process.start()
        return process, output

    def run(self, work: Callable[..., None], *arguments: str) -> str:
        process, output = self.start(work, *arguments)
        process.join(60)
        text = output.read_text()
        if "error: budget spent" in text and "Traceback" not in text:  # all commands share one user's budget
            self.refused += 1
        elif process.exitcode not in (0, -signal.SIGKILL) or "Traceback" in text:
            self.faults.append(f"{arguments} ended with {process.exitcode}: {text[-500:]}")
        return text


class Daemon:
    """A daemon with two clients: one asks all the time, the other reads the page's data all the time."""

    def __init__(self, home: SharedHome) -> None:
        self._home = home
        self._asked = 0
        self._ends = threading.Event()
        self._begin()

    def _begin(self) -> None:
        self._ends.clear()
        self._process, output = self._home.start(command, "serve", "--port", "0")
        wait_for(lambda: _READY.search(output.read_text() if output.exists() else "") or not self._process.is_alive())
        self._url = _READY.findall(output.read_text())[0]
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._ask, self._look)]
        for thread in self._threads:
            thread.start()

    def restart(self, *, killed: bool = True) -> None:
        self.end(killed=killed)
        self._begin()

    def end(self, *, killed: bool = True) -> None:
        self._process.kill() if killed else self._process.terminate()
        self._process.join(60)
        self._ends.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._ends.wait(PAUSE_S):
                self._asked += 1
                user = f"user-{self._asked // 100}"  # the same names on both daemons
                body = {"model": "cloud", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
                body |= {"user": user, "stream": bool(self._asked % 3)}
                with contextlib.suppress(httpx.HTTPError):
                    response = client.post("/v1/chat/completions", json=body)
                    self._note(user, response)

    def _note(self, user: str, response: httpx.Response) -> None:
        home, text = self._home, response.text
        if response.status_code == 200 and (not self._asked % 3 or text.rstrip().endswith("[DONE]")):
            home.answered.append(response.headers["x-updraft-request-id"])
            home.users[user] = home.users.get(user, 0) + 1
        elif response.status_code == 429:
            home.refused += 1
        elif '"draining"' not in text:
            home.faults.append(f"unexpected answer {response.status_code}: {text[-300:]}")

    def _look(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._ends.wait(0.1):
                for path in ("/updraft/requests?limit=5", "/updraft/savings", "/health"):
                    with contextlib.suppress(httpx.HTTPError):
                        response = client.get(path)
                        works = response.status_code == 200 and "unavailable" not in response.text
                        if not works and '"draining"' not in response.text:
                            self._home.faults.append(f"{path} {response.status_code}: {response.text[:300]}")


def make_trouble(home: SharedHome, daemons: list[Daemon], rounds: int, seed: int) -> None:
    """Run `rounds` actions in random order: restart or kill a daemon, run an app or a command, back up the ledger."""
    chosen = random.Random(seed)

    def app(end: str) -> None:
        home.answered.extend(home.run(_app, end).split())

    def ask() -> None:
        answer = home.run(command, "ask", "--tier", "cloud", "--json", "hi")
        home.answered.extend(re.findall(r'"request_id": "([^"]+)"', answer))

    actions: list[Callable[[], object]] = [
        lambda: chosen.choice(daemons).restart(),
        lambda: chosen.choice(daemons).restart(killed=chosen.random() < 0.5),
        lambda: app("killed"),
        lambda: app("without close"),
        ask,
        lambda: home.run(command, "log", "--json"),
        lambda: home.run(command, "usage", "--json"),
        lambda: home.run(_backup, str(home.ledger)),
    ]
    order = [action for _ in range(rounds // len(actions) + 1) for action in actions][:rounds]
    chosen.shuffle(order)
    for action in order:
        action()


def ids_in(ledger: Path) -> list[str]:
    with closing(sqlite3.connect(ledger)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [request_id for (request_id,) in connection.execute("SELECT id FROM requests WHERE status = 200")]
