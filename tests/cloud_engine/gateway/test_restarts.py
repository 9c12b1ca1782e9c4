"""Workers that share a port: they drain on SIGTERM, outlive SIGHUP, obey one key database, and keep budgets."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from gateway_keys import make_key
from updraft.cloud_engine.gateway.access.principal import Limits
from waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="workers are forked")
PRICES = '[[prices]]\nmodel = "echo"\ninput = 1000\noutput = 1000\n'


@pytest.fixture
def start(spawn: Any, tmp_path: Path) -> Callable[..., Any]:
    def start(node: Any, *more: str) -> Any:
        files = ("--ledger", str(tmp_path / "usage"), "--keys", str(tmp_path / "keys"))
        return spawn("-m", "updraft", "gateway", "--port", "0", "--node", node.url, *files, "--workers", "2", *more)

    return start


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ask(url: str, key: str, text: str = "hello") -> httpx.Response:
    """On a connection of its own, which any worker may take."""
    body = {"model": "echo", "messages": [{"role": "user", "content": text}], "max_tokens": 100}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=bearer(key), timeout=60)


def test_sigterm_ends_streams_whole_and_sighup_ends_none(
    start: Callable[..., Any], spawn_held_node: Any, hold: Path, tmp_path: Path
) -> None:
    """The first half of a rolling restart: what has begun goes on, and what comes is sent elsewhere."""
    key = make_key(tmp_path / "keys", "tester")
    gateway = start(spawn_held_node())
    workers = psutil.Process(gateway.popen.pid).children()
    for process in (gateway.popen.pid, *(worker.pid for worker in workers)):
        os.kill(process, signal.SIGHUP)
    all_began, texts = threading.Barrier(9), list[str]()
    body = {"model": "echo", "messages": [{"role": "user", "content": "x" * 100}], "stream": True}

    def stream() -> None:
        with httpx.stream(
            "POST", f"{gateway.url}/v1/chat/completions", json=body, headers=bearer(key), timeout=60
        ) as response:
            lines = response.iter_lines()
            first = next(lines)
            all_began.wait(60)
            texts.append("".join([first, *lines]))

    threads = [threading.Thread(target=stream) for _ in range(8)]
    for thread in threads:
        thread.start()
    all_began.wait(60)
    gateway.popen.send_signal(signal.SIGTERM)
    hold.unlink()
    for thread in threads:
        thread.join()
    assert gateway.popen.wait(60) == 0
    assert all(text.count('"content":"x"') == 100 and text.endswith("data: [DONE]") for text in texts)
    with closing(sqlite3.connect(tmp_path / "usage")) as connection:
        rows = connection.execute("SELECT state, status, completion_tokens FROM usage").fetchall()
    assert rows == [("settled", 200, 100)] * 8


def test_a_stream_gets_the_seconds_of_the_drain_and_no_more(
    start: Callable[..., Any], spawn_held_node: Any, tmp_path: Path
) -> None:
    key = make_key(tmp_path / "keys", "tester")
    gateway = start(spawn_held_node(), "--drain-timeout-s", "0.2")
    body = {"model": "echo", "messages": [{"role": "user", "content": "x" * 1500}], "stream": True}
    url = f"{gateway.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=bearer(key), timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        gateway.popen.send_signal(signal.SIGTERM)
        *_, last = [line for line in lines if line]
    assert '"code":"draining"' in last
    assert gateway.popen.wait(60) == 0


def test_keys_that_are_made_at_once_work_at_every_worker_until_they_are_revoked(
    start: Callable[..., Any], fake_node: Any, tmp_path: Path
) -> None:
    admin = bearer(make_key(tmp_path / "keys", "operator", "admin"))
    url = start(fake_node).url

    def make(number: int) -> dict[str, Any]:
        made = httpx.post(f"{url}/admin/keys", json={"name": f"team-{number}"}, headers=admin, timeout=60)
        assert made.status_code == 201, made.text
        return made.json()

    with ThreadPoolExecutor(12) as pool:
        made = list(pool.map(make, range(12)))
        assert [each.status_code for each in pool.map(lambda each: ask(url, each["key"]), made)] == [200] * 12
        listed = httpx.get(f"{url}/admin/keys", headers=admin, timeout=60).json()["keys"]
        assert len(listed) == 13
        for each in made:
            httpx.delete(f"{url}/admin/keys/{each['id']}", headers=admin, timeout=60).raise_for_status()
        asked = [each["key"] for each in made] * 2
        wait_for(lambda: {each.status_code for each in pool.map(lambda key: ask(url, key), asked)} == {401})


def test_budget_holds_across_kills(start: Callable[..., Any], fake_node: Any, tmp_path: Path) -> None:
    """By `kill -9` of the workers, and of the whole gateway; what is spent is what the ledger says."""
    (tmp_path / "prices.toml").write_text(PRICES)
    key = make_key(tmp_path / "keys", "tester", limits=Limits(usd_per_day=1.0))
    gateway = start(fake_node, "--prices", str(tmp_path / "prices.toml"))
    asked = 0
    while (answer := ask(gateway.url, key)).status_code == 200:
        asked += 1
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "budget_exceeded"), answer.text
    assert asked > 3
    workers = psutil.Process(gateway.popen.pid).children()
    for worker in workers:
        worker.kill()
    psutil.wait_procs(workers, 30)
    assert ask(gateway.url, key).status_code == 429
    for process in (psutil.Process(gateway.popen.pid), *psutil.Process(gateway.popen.pid).children()):
        process.kill()
    gateway.popen.wait()
    again = start(fake_node, "--prices", str(tmp_path / "prices.toml"))
    assert ask(again.url, key).status_code == 429
    again.popen.terminate()
    assert again.popen.wait(60) == 0
    with closing(sqlite3.connect(tmp_path / "usage")) as connection:
        (spent,) = connection.execute("SELECT SUM(cost_usd) FROM usage").fetchone()
    assert 0.7 < spent <= 1.0


def test_a_gateway_comes_back_while_orphans_end_and_a_node_hangs(
    start: Callable[..., Any], spawn_fake_node: Any, tmp_path: Path
) -> None:
    """`kill -9` of the supervisor alone: its workers leave the port at once, and finish what they have begun."""
    key, node, hung = make_key(tmp_path / "keys", "tester"), spawn_fake_node("--delay", "0.1"), spawn_fake_node()
    gateway = start(node, "--node", hung.url, "--drain-timeout-s", "600")
    body = {"model": "echo", "messages": [{"role": "user", "content": "x" * 1800}], "stream": True}
    port, again = gateway.url.rpartition(":")[2], None
    hung.popen.send_signal(signal.SIGSTOP)
    with httpx.stream(
        "POST", f"{gateway.url}/v1/chat/completions", json=body, headers=bearer(key), timeout=60
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        gateway.popen.kill()
        for _ in range(5):
            with suppress(AssertionError):  # the port is not free yet
                again = again or start(node, "--node", hung.url, "--port", port)
        assert again is not None
        assert ask(again.url, key).status_code == 200
        assert [next(lines) for _ in range(4)]
