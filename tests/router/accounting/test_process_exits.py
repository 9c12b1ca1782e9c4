"""Apps that end, fork or are killed in any way: every answer keeps its row, and nothing hangs."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from router_fakes import FakeCloud
from updraft.router.accounting.ledger import Ledger, RequestWriter, collect_rows

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked and killed by signal")

BEGIN = """
import atexit, asyncio, multiprocessing, os, sys, threading, time
import updraft

client = updraft.OpenAI(max_retries=0)

def ask(n=1, client=client, **fields):
    for _ in range(n):
        answer = client.chat.completions.create(model="cloud", messages=[{"role": "user", "content": "hi"}], **fields)
        os.write(1, answer.model_extra["updraft"]["request_id"].encode() + b"\\n")
"""
ENDS = {
    "the end of the program": "ask(5)",
    "sys.exit in a coroutine": "async def main():\n    ask(5)\n    sys.exit(0)\nasyncio.run(main())",
    "an exception": "ask(5)\nraise SystemExit(0)",
    "SIGTERM": "ask(5)\nos.kill(os.getpid(), 15)",
    "SIGKILL": "ask(5)\nos.kill(os.getpid(), 9)",
    "os._exit": "ask(5)\nos._exit(0)",
    "a thread that is no daemon": "ask(1)\nthreading.Thread(target=ask, args=(4,)).start()",
}


def run(program: str, home: Path, cloud: FakeCloud) -> subprocess.CompletedProcess[str]:
    settings = {"UPDRAFT_HOME": str(home), "UPDRAFT_CLOUD_URL": cloud.url, "UPDRAFT_CLOUD_MODEL": "big"}
    return subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def ids(home: Path) -> list[str]:
    """Of the rows, after those that ended processes left behind are in."""
    collect_rows(home / "ledger.sqlite3")
    with closing(Ledger(home / "ledger.sqlite3")) as ledger:
        return sorted(row.id for row in ledger.rows(limit=10**6) if row.status == 200)


@contextmanager
def busy(ledger: Path) -> Iterator[None]:
    """Another process holds the write lock."""
    with closing(sqlite3.connect(ledger, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


@pytest.mark.parametrize("end", ENDS)
def test_every_answer_keeps_its_row_beside_a_busy_writer(cloud: FakeCloud, tmp_path: Path, end: str) -> None:
    Ledger(tmp_path / "ledger.sqlite3").close()
    with busy(tmp_path / "ledger.sqlite3"):
        done = run(ENDS[end], tmp_path, cloud)
    assert len(done.stdout.split()) == 5, done.stderr
    assert ids(tmp_path) == sorted(done.stdout.split())
    assert ids(tmp_path) == sorted(done.stdout.split()), "once, whoever looks how often"


def test_requests_in_atexit_handlers_work_or_are_refused_by_name(cloud: FakeCloud, tmp_path: Path) -> None:
    program = """
def late(client):
    try:
        ask(1, client)
    except Exception as error:
        print("refused:", error, flush=True)

atexit.register(late, client)
atexit.register(late, updraft.OpenAI(max_retries=0, cloud_model="other"))
ask(1)
"""
    done = run(program, tmp_path, cloud)
    first, *late = done.stdout.splitlines()
    assert len(late) == 2, done.stderr
    assert all("refused: " not in line or "interpreter is shutting down" in line for line in late), late
    assert ids(tmp_path) == sorted([first, *(line for line in late if "refused" not in line)])
    assert done.stderr == ""


def test_first_requests_of_threads_after_the_main_thread_are_refused_by_name(cloud: FakeCloud, tmp_path: Path) -> None:
    """No thread pool starts at this point, so a retry would only wait."""
    program = """
def late(client):
    threading.main_thread().join()
    try:
        ask(1, client)
    except Exception as error:
        print(error.response.headers["x-should-retry"], error, flush=True)

threading.Thread(target=late, args=(client.with_options(max_retries=5),)).start()
"""
    done = run(program, tmp_path, cloud)
    assert done.stdout.startswith("false "), done.stdout
    assert "join() the threads" in done.stdout
    assert done.stderr == ""


FORKS = """
ends = threading.Event()

def go_on():
    while not ends.is_set():
        ask(1)

ask(1)  # fills openai's cached properties, whose locks Python 3.11 would copy to the child
threads = [threading.Thread(target=go_on) for _ in range(4)]
for thread in threads:
    thread.start()
children = []
for _ in range(12):
    child = os.fork()
    if child == 0:
        ask(1)
        os._exit(0)
    children.append(child)
    assert os.waitpid(child, 0)[1] == 0
ends.set()
for thread in threads:
    thread.join()
process = multiprocessing.get_context("fork").Process(target=ask)
process.start()
process.join(30)
assert process.exitcode == 0
client.close()
"""


def test_forks_beside_busy_threads_neither_hang_nor_lose_a_row(cloud: FakeCloud, tmp_path: Path) -> None:
    done = run(FORKS, tmp_path, cloud)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split()
    assert len(printed) > 13
    assert ids(tmp_path) == sorted(printed)


def test_a_child_of_a_fork_holds_no_lock_of_its_parent(cloud: FakeCloud, tmp_path: Path) -> None:
    """The child outlives its parent: the rows that the parent left are entered nevertheless."""
    Ledger(tmp_path / "ledger.sqlite3").close()
    program = """
ask(2)
if os.fork() == 0:
    os.close(1), os.close(2)
    time.sleep(20)
    os._exit(0)
os.kill(os.getpid(), 9)
"""
    with busy(tmp_path / "ledger.sqlite3"):
        done = run(program, tmp_path, cloud)
    assert ids(tmp_path) == sorted(done.stdout.split())
    assert len(done.stdout.split()) == 2


ENDS_AFTER_THE_ANSWER = {"exit": "", "os._exit": "os._exit(0)", "SIGKILL": "os.kill(os.getpid(), 9)"}


@pytest.mark.parametrize("max_tokens", [500, 1], ids=["reserved too much", "reserved too little"])
@pytest.mark.parametrize("end", ENDS_AFTER_THE_ANSWER)
def test_row_of_an_ended_process_replaces_its_reservation_once(
    cloud: FakeCloud, tmp_path: Path, end: str, max_tokens: int
) -> None:
    """The other process locks the ledger between the reservation and the end, so that only the journal has the row."""
    path, cloud.delay_s = tmp_path / "ledger.sqlite3", 1.0
    journal, copy = tmp_path / "ledger.sqlite3.workers", tmp_path / "copy"
    (tmp_path / "config.toml").write_text("[prices]\ncloud_input = 0\ncloud_output = 2.0\n[budget]\nusd = 1.0\n")
    program = f"ask(max_tokens={max_tokens})\n{ENDS_AFTER_THE_ANSWER[end]}"
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(run, program, tmp_path, cloud)
        while not cloud.requests:
            assert not ended.done()
            time.sleep(0.01)
        with busy(path):
            assert len(ended.result().stdout.split()) == 1
    assert spent(path) == (0, pytest.approx(max_tokens * 2e-6))
    shutil.copytree(journal, copy)
    collect_rows(path)
    assert spent(path) == (1, pytest.approx(4 * 2e-6))
    shutil.copytree(copy, journal, dirs_exist_ok=True)  # as if killed between the commit and the journal's removal
    collected = RequestWriter(path)
    assert collected.flush()
    collected.close()
    assert spent(path) == (1, pytest.approx(4 * 2e-6))


def spent(path: Path) -> tuple[int, float]:
    """Return the number of rows and the dollars in `spending`, which include all rows' costs if there are rows."""
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT count(*), count(*), sum(cloud_tokens + cloud_prompt_tokens), sum(cost_usd) FROM requests"
        count, *rows = connection.execute(query).fetchone()
        (booked,) = connection.execute("SELECT requests, cloud_tokens, usd FROM spending").fetchall()
    assert not count or booked == pytest.approx(rows)
    return count, booked[-1]


IN_FLIGHT = """
def asks(**fields):
    client.chat.completions.create(model="cloud", messages=[{"role": "user", "content": "hi"}], **fields)

threading.Thread(target=asks, daemon=True, kwargs=FIELDS).start()
sys.stdin.read()  # until the cloud has the request
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("budget", [False, True])
def test_killed_request_in_flight_leaves_a_row(cloud: FakeCloud, tmp_path: Path, *, stream: bool, budget: bool) -> None:
    """The row charges what the budget has reserved or, without a budget, the caller's limit."""
    cloud.mode = "slow"
    lines = ["[prices]", "cloud_input = 1.0", "cloud_output = 2.0", *(["[budget]", "usd = 1.0"] if budget else [])]
    (tmp_path / "config.toml").write_text("\n".join(lines))
    settings = {"UPDRAFT_HOME": str(tmp_path), "UPDRAFT_CLOUD_URL": cloud.url, "UPDRAFT_CLOUD_MODEL": "big"}
    program = BEGIN + IN_FLIGHT.replace("FIELDS", f"dict(stream={stream}, max_tokens=500)")
    app = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, **settings}, stdin=subprocess.PIPE, text=True
    )
    with app:
        while not cloud.requests:
            assert app.poll() is None
            time.sleep(0.01)
        app.communicate("")
    assert app.returncode == -9
    collect_rows(tmp_path / "ledger.sqlite3")
    with closing(Ledger(tmp_path / "ledger.sqlite3")) as ledger:
        [row] = ledger.rows()
        assert (row.status, row.route, row.cloud_model) == (499, "none", "big")
        assert row.failure == "the process was killed during the request"
        with ledger.transaction() as connection:
            spent = connection.execute("SELECT cloud_tokens, usd FROM spending").fetchall()
        tokens = row.cloud_prompt_tokens + row.cloud_tokens
        assert spent == ([(tokens, pytest.approx(row.cost_usd))] if budget else [])
        assert row.cloud_prompt_tokens and row.cloud_tokens == 500
        assert row.cost_usd
