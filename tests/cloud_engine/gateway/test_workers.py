"""Several workers behind one port: one that is killed is replaced, counters are of all, SIGTERM ends all."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serving import serving
from starlette.types import Receive, Scope, Send
from updraft.cloud_engine.gateway.workers import Supervisor
from updraft.protocol.errors import ConfigurationError
from waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="workers are forked")
BODY = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}


def answered(url: str) -> int:
    match = re.search(r'^updraft_gateway_requests_total\{status="200"\} (\d+)', httpx.get(f"{url}/metrics").text, re.M)
    return int(match[1]) if match else 0


def ask(url: str) -> bool:
    """On a connection of its own, which any worker may take. False: that worker was being killed."""
    try:
        answer = httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=60)
    except httpx.TransportError:
        return False
    return answer.status_code == 200


def check_gauges_of_all_workers(url: str, node: str) -> None:
    """A stream is held open; whichever worker is asked knows of it."""
    held = {**BODY, "messages": [{"role": "user", "content": "word " * 300}], "stream": True}
    expected = f'updraft_gateway_node_in_flight{{node="{node}"}} 1.0\n'
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=held, timeout=60) as stream:
        lines = stream.iter_lines()  # closes the stream when it is gone
        assert next(lines)
        told = 0

        def all_know() -> bool:  # a worker tells the others twice a second
            nonlocal told
            told = told + 1 if expected in httpx.get(f"{url}/metrics").text else 0
            return told == 10

        wait_for(all_know)


def test_a_session_stays_at_its_node_whichever_worker_is_asked(
    spawn: Any, spawn_fake_node: Any, tmp_path: Path
) -> None:
    nodes = [spawn_fake_node().url for _ in range(4)]
    command = ["gateway", "--port", "0", "--no-auth", "--exit-with-parent", "--workers", "2"]
    listed = [word for node in nodes for word in ("--node", node)]
    running = spawn("-m", "updraft", *command, *listed, "--ledger", str(tmp_path / "db"))

    def served(column: str) -> set[str]:
        with closing(sqlite3.connect(tmp_path / "db")) as connection:
            return {value for (value,) in connection.execute(f"SELECT {column} FROM usage WHERE status = 200")}

    body = {**BODY, "prompt_cache_key": "my session"}
    with httpx.Client(headers={"connection": "close"}, timeout=60) as client:

        def ask_some() -> bool:
            for _ in range(10):
                assert client.post(f"{running.url}/v1/chat/completions", json=body).status_code == 200
            return len(served("worker")) == 2

        wait_for(ask_some)
        ask_some()
    assert len(served("node")) == 1


def test_killed_worker_is_replaced_and_its_counters_stay(
    spawn: Any, spawn_held_node: Any, hold: Path, tmp_path: Path
) -> None:
    node = spawn_held_node()
    command = ["gateway", "--port", "0", "--no-auth", "--exit-with-parent", "--node", node.url, "--workers", "2"]
    running = spawn("-m", "updraft", *command, "--ledger", str(tmp_path / "db"))
    supervisor = psutil.Process(running.popen.pid)
    check_gauges_of_all_workers(running.url, node.url)
    hold.unlink()
    assert sum(ask(running.url) for _ in range(10)) == 10
    assert answered(running.url) == 10, "whoever answers knows of all"
    killed = supervisor.children()
    assert len(killed) == 2
    for worker in killed:
        worker.kill()
    wait_for(lambda: ask(running.url))
    assert answered(running.url) == 11
    workers = supervisor.children()
    assert len(workers) == 2
    assert not {worker.pid for worker in workers} & {worker.pid for worker in killed}
    running.popen.send_signal(signal.SIGTERM)
    assert running.popen.wait(60) == 0
    psutil.wait_procs(workers, 60)
    assert not any(worker.is_running() for worker in workers)


def test_deaths_that_a_request_caused_are_known_to_other_workers(spawn: Any, tmp_path: Path) -> None:
    """It gets further each time: three nodes of one worker die, one of the next worker, and then it is refused."""
    deaths: list[int] = []

    async def dies(scope: Scope, receive: Receive, send: Send) -> None:
        begins = {"type": "http.response.start", "status": 200, "headers": []}
        if scope["path"] in ("/health", "/v1/models"):
            listed = b'{"data": [{"id": "echo", "owned_by": "vllm"}]}'
            await send(begins)
            await send({"type": "http.response.body", "body": listed})
            return
        while (await receive()).get("more_body"):
            pass
        event = b'data: {"choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": null}]}\n\n'
        await send(begins)
        await send({"type": "http.response.body", "body": event, "more_body": True})
        deaths.append(scope["server"][1])
        raise ConnectionError("as if it were killed")

    with ExitStack() as stack:
        nodes = [word for _ in range(3) for word in ("--node", stack.enter_context(serving(dies)))]
        command = ["gateway", "--port", "0", "--no-auth", "--exit-with-parent", *nodes, "--workers", "2"]
        running = spawn("-m", "updraft", *command, "--ledger", str(tmp_path / "db"))

        def ask() -> str:
            return httpx.post(f"{running.url}/v1/chat/completions", json={**BODY, "stream": True}, timeout=60).text

        assert "send the request again" in ask()
        assert len(set(deaths)) == len(deaths) == 3
        workers = psutil.Process(running.popen.pid).children()
        for worker in workers:
            worker.kill()
        psutil.wait_procs(workers, 60)
        assert "send the request again" in ask()
        assert "request_quarantined" in ask()
        assert len(deaths) == 4


def test_workers_that_cannot_start_end_the_gateway_with_their_cause() -> None:
    with pytest.raises(ConfigurationError, match=r"5 workers in a row died .* the last with exit code 3: "):
        Supervisor(1, lambda _number: os._exit(3), exit_with_parent=False, drain_s=1.0).run()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the flags of open files")
def test_the_socket_never_blocks_also_while_a_worker_starts(spawn: Any, spawn_fake_node: Any, tmp_path: Path) -> None:
    """Its mode is that of all workers: a blocking one would hold up every stream of a worker that found no client."""
    command = ["gateway", "--port", "0", "--no-auth", "--node", spawn_fake_node().url, "--workers", "2"]
    running = spawn("-m", "updraft", *command, "--ledger", str(tmp_path / "db"))
    supervisor = psutil.Process(running.popen.pid)
    files = [
        path for path in Path(f"/proc/{supervisor.pid}/fd").iterdir() if str(path.readlink()).startswith("socket:")
    ]
    (flags,) = [Path(f"/proc/{supervisor.pid}/fdinfo/{path.name}") for path in files]
    supervisor.children()[0].kill()
    looks = 0
    while looks < 20 or len(supervisor.children()) < 2 or not ask(running.url):
        looks += 1
        assert int(re.findall(r"flags:\s+(\d+)", flags.read_text())[0], 8) & os.O_NONBLOCK
        time.sleep(0.05)
