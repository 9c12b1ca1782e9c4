"""The gateway's ledger in SQLite and in a real PostgreSQL: no row is lost or doubled, whatever dies or fills up."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ledger_worker
import programs
import pytest
from homes import home_in
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_worker import row
from updraft.cloud_engine.gateway.ledger.ledger import UsageLedger
from updraft.cloud_engine.gateway.ledger.metering import USAGE
from updraft.cloud_engine.gateway.ledger.opening import open_reader, open_store
from updraft.protocol.errors import ConfigurationError, OverloadedError
from waiting import wait_for


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The URL of a server of our own."""
    initdb = shutil.which("initdb", path=programs.path())
    if initdb is None or importlib.util.find_spec("psycopg") is None:
        pytest.skip("needs PostgreSQL's programs, and the package psycopg")
    with TemporaryDirectory() as folder:
        yield from served(initdb, Path(folder))


def served(initdb: str, folder: Path) -> Iterator[str]:
    demote = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] if os.geteuid() == 0 else []
    if demote:  # the server refuses to run as root
        shutil.chown(folder, "nobody", "nogroup")
    data, user = folder / "data", "tester"
    subprocess.run(
        [*demote, initdb, "-D", data, "-U", user, "-A", "trust", "-N"], check=True, stdout=subprocess.DEVNULL
    )
    program = str(Path(initdb).with_name("postgres"))
    command = [*demote, program, "-D", str(data), "-h", "", "-k", str(folder), "-F"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        url = f"postgresql://{user}@/postgres?host={folder}"
        import psycopg

        until = time.monotonic() + 300
        while True:
            try:
                psycopg.connect(url).close()
                break
            except psycopg.OperationalError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        yield url
        server.send_signal(signal.SIGINT)  # without waiting for clients


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "usage.sqlite3")
    import psycopg

    monkeypatch.setenv("UPDRAFT_HOME", str(home_in(tmp_path)))  # where rows stand before their commit
    url = request.getfixturevalue("postgres")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS usage, usage_schema")
    return url


def rows(where: str) -> list[dict[str, Any]]:
    with open_reader(where).rows() as reading:
        return list(reading)


def is_file(where: str) -> bool:
    """Whether an intent is no row before its worker is dead."""
    return not where.startswith("postgresql:")


def start(where: str, requests: int, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, ledger_worker.__file__, where, str(requests), *more]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


def go(worker: subprocess.Popen[str]) -> None:
    assert line(worker) == "ready"
    assert worker.stdin is not None
    worker.stdin.write("go\n")
    worker.stdin.flush()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_several_processes_write_one_ledger(where: str) -> None:
    workers = [start(where, 200) for _ in range(4)]
    for worker in workers:
        go(worker)
    for worker in workers:
        worker.communicate("go\n")
    written = rows(where)
    assert len(written) == 800
    assert {each["state"] for each in written} == {"settled"}
    assert Counter(each["completion_tokens"] for each in written) == dict.fromkeys(range(200), 4)


def test_only_intents_of_killed_workers_are_abandoned(where: str) -> None:
    """Every intent that was promised becomes a row, once; those of a worker that lives stay open."""
    with start(where, 20, "--hold") as living, start(where, 10_000) as victim:
        go(living)
        promised = [line(living).split()[-1] for _ in range(20)]
        go(victim)
        killed = [line(victim).split()[-1] for _ in range(150)]
        victim.kill()
        more = victim.communicate()[0].splitlines()
        killed += [text.split()[-1] for text in more if len(text) == len("opened ") + 32]  # the last may be cut
        UsageLedger(open_store(where)).close()
        states = {each["id"]: each["state"] for each in rows(where)}
        assert {states.get(each, "no row") for each in promised} == {"no row" if is_file(where) else "intent"}
        assert {states[each] for each in killed} <= {"settled", "abandoned"}
        assert len(states) == len(rows(where)) >= len(killed)
        living.communicate("go\n")
    UsageLedger(open_store(where)).close()
    assert Counter(each["state"] for each in rows(where))["abandoned"] >= 20


def test_settled_once(where: str) -> None:
    async def work() -> None:
        ledger = UsageLedger(open_store(where))
        opened, refused = row(1), row(2)
        await ledger.open(opened)
        assert [each["state"] for each in rows(where)] == ([] if is_file(where) else ["intent"])
        opened.completion_tokens = 5
        ledger.settle(opened)
        opened.completion_tokens = 7
        ledger.settle(opened)
        refused.status = 429
        ledger.settle(refused)
        ledger.close()
        assert [(each["completion_tokens"], each["state"]) for each in rows(where)] == [(5, "settled"), (0, "settled")]

    run(work())


BOOKED = """
import asyncio, os, sys
from ledger_worker import row
from updraft.cloud_engine.gateway.ledger.ledger import UsageLedger
from updraft.cloud_engine.gateway.ledger.metering import USAGE
from updraft.cloud_engine.gateway.ledger.opening import open_store

async def work():
    ledger, answered, begun = UsageLedger(open_store(sys.argv[1])), row(1), row(2)
    for each in (answered, begun):
        each.cost_usd = 0.5
        await ledger.open(each)
    answered.status, answered.completion_tokens, answered.cost_usd = 200, 7, 0.25
    ledger.book(answered)
    os.kill(os.getpid(), 9)

asyncio.run(work())
"""


def test_booked_usage_survives_a_kill(where: str) -> None:
    path = os.pathsep.join([str(Path(ledger_worker.__file__).parent), *sys.path])
    subprocess.run([sys.executable, "-c", BOOKED, where], check=False, env={**os.environ, "PYTHONPATH": path})
    UsageLedger(open_store(where)).close()
    names = "request_id", "state", "completion_tokens", "cost_usd"
    kept = {tuple(each[name] for name in names) for each in rows(where)}
    assert kept == {("request-1", "settled", 7, 0.25), ("request-2", "abandoned", 0, 0.5)}


def test_missing_database_is_reported_at_the_start_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.setenv("UPDRAFT_HOME", str(home_in(tmp_path)))
    store = open_store("postgresql://tester:secret@127.0.0.1:1/none")
    with pytest.raises(ConfigurationError, match="as the usage database") as refused:
        store.check()
    assert "secret" not in refused.value.message
    with pytest.raises(ConfigurationError, match="not the URL of a PostgreSQL database") as refused:
        open_store("postgresql://tester:secret@[::1/none")  # libpq would repeat all of it
    assert "secret" not in refused.value.message

    async def work() -> None:
        ledger = UsageLedger(store, on_failure="continue")
        opened = row(1)
        await ledger.open(opened)
        ledger.settle(opened)
        await asyncio.to_thread(wait_for, lambda: ledger.failing)
        ledger.close(0.1)

    run(work())
    (kept,) = tmp_path.rglob("gateway-*.workers/intents-0")
    assert b"request-1" in kept.read_bytes(), "it is written when the server is back"


def test_the_thread_outlives_what_nobody_foresaw(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file of another program's that names a worker, and a store that is broken."""
    store = open_store(tmp_path / "usage")
    other = open_store(tmp_path / "usage")
    (tmp_path / "usage.workers" / "worker-1").write_bytes(other.worker.encode() + b"\xff")
    (tmp_path / "usage.workers" / "intents-2").mkdir()

    async def work() -> None:
        write, broken = store.write, True

        def breaking(*batch: Any) -> None:
            if broken:
                raise AttributeError("nobody foresaw this")
            write(*batch)

        monkey.setattr(store, "write", breaking)
        ledger = UsageLedger(store)
        ledger.settle(row(1))
        await asyncio.to_thread(wait_for, lambda: ledger.failing)
        broken = False
        assert ledger.flush(300)
        ledger.close()

    with pytest.MonkeyPatch.context() as monkey:
        run(work())
    other.close()
    assert [each["state"] for each in rows(str(tmp_path / "usage"))] == ["settled"]
    assert "nobody foresaw this" in caplog.text
    assert "intents-2" in caplog.text


def test_a_row_that_the_database_refuses_is_left_out_alone(where: str) -> None:
    async def work() -> None:
        ledger = UsageLedger(open_store(where))
        for number, model in enumerate(("a", "\ud800", "b")):
            each = row(number)
            each.model = model
            ledger.settle(each)
        assert ledger.flush(300)
        assert [each["model"] for each in rows(where)] == ["a", "b"]
        assert ledger.lost == 1
        ledger.close()

    run(work())


def test_old_rows_go(where: str) -> None:
    async def work() -> None:
        ledger = UsageLedger(open_store(where))
        for number, age_days in enumerate((3, 1, 0)):
            each = row(number)
            each.started_at -= age_days * 86_400
            ledger.settle(each)
        ledger.close()
        ledger = UsageLedger(open_store(where), keep_days=2)
        ledger.settle(row(3))
        for _ in range(600):
            names = {each["request_id"] for each in rows(where)}
            if names == {"request-1", "request-2", "request-3"}:
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail(f"still there: {names}")
        ledger.close()

    run(work())


def test_a_clock_that_runs_ahead_deletes_no_rows(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even at the second start, when the newest row states the wrong time."""

    async def work() -> None:
        ledger = UsageLedger(open_store(where))
        for number, age_days in enumerate((1, 0)):
            each = row(number)
            each.started_at -= age_days * 86_400
            ledger.settle(each)
        ledger.close()
        wall = time.time
        monkeypatch.setattr(time, "time", lambda: wall() + 40 * 86_400)
        for number in (2, 3):
            ledger = UsageLedger(open_store(where), keep_days=2)
            ledger.settle(row(number))
            assert ledger.flush(300, collect=True)
            ledger.close()
        assert len(rows(where)) == 4

    run(work())


@pytest.mark.parametrize("action", ["stop", "continue"])
def test_a_database_that_is_locked(tmp_path: Path, action: Any) -> None:
    """Requests stop or go on as the operator chose; what came to an end before is written once it is free."""
    file = tmp_path / "usage.sqlite3"

    async def work() -> None:
        ledger = UsageLedger(open_store(file), on_failure=action)
        before, during = row(1), row(2)
        await ledger.open(before)
        with closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            ledger.settle(before)
            await asyncio.to_thread(wait_for, lambda: ledger.failing)
            if action == "stop":
                with pytest.raises(OverloadedError) as refused:
                    await ledger.open(during)
                assert (refused.value.status, refused.value.code) == (503, "ledger_unavailable")
            else:
                await ledger.open(during)
            assert not ledger.flush(0.01)
            assert open_reader(file).totals(["key"]) == []  # reads go on
            other.execute("ROLLBACK")
        ledger.settle(during)
        assert ledger.flush(300)
        assert [each["state"] for each in rows(str(file))] == ["settled"] * 2
        assert ledger.lost == 0
        ledger.close()

    run(work())


def _empty(file: Path) -> None:
    os.truncate(file, 0)


@pytest.mark.parametrize("action", ["stop", "continue"])
@pytest.mark.parametrize("harm", [Path.unlink, _empty, lambda file: file.rename(file.with_name("moved"))])
def test_rows_of_a_database_that_goes_away_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], object], action: Any
) -> None:
    """They are written once the file is back, or by the next process."""
    file, moved = tmp_path / "usage.sqlite3", tmp_path / "moved"

    async def work() -> None:
        ledger = UsageLedger(open_store(file), on_failure=action)
        ledger.settle(row(1))
        assert ledger.flush(300)
        harm(file)
        opened = row(2)
        await ledger.open(opened)
        ledger.settle(opened)
        await asyncio.to_thread(wait_for, lambda: ledger.failing)
        if action == "stop":
            with pytest.raises(OverloadedError):
                await ledger.open(row(3))
        if moved.exists():
            moved.rename(file)
            assert ledger.flush(300)
        ledger.close(0.1)

    run(work())
    assert caplog.text.count("was moved, replaced, deleted or emptied") == 1
    if harm is _empty:
        file.unlink()  # what the last checkpoint has left is no database
    UsageLedger(open_store(file)).close()
    assert "request-2" in {each["request_id"] for each in rows(str(file))}


def test_a_refusal_has_its_status_in_the_file_of_intents(tmp_path: Path) -> None:
    async def work() -> None:
        store = open_store(tmp_path / "usage.sqlite3")
        ledger, refused = UsageLedger(store), row(1)
        ledger.book(refused)
        refused.status = 503
        with closing(sqlite3.connect(tmp_path / "usage.sqlite3", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            ledger.settle(refused)
            assert store.intents is not None
            (kept,) = store.intents.records().values()
            assert dict(zip(USAGE.columns, USAGE.row_in(kept).values, strict=True))["status"] == 503
            other.execute("ROLLBACK")
        ledger.close()

    run(work())


def test_a_ledger_that_hangs_is_closed_in_time(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite3"

    async def work() -> None:
        ledger = UsageLedger(open_store(file))
        with closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            ledger.settle(row(1))
            closing_thread = asyncio.create_task(asyncio.to_thread(ledger.close, 0.5))
            await asyncio.wait_for(closing_thread, 60)
            other.execute("ROLLBACK")

    run(work())


FULL = """
import asyncio, resource, sys
from ledger_worker import row
from updraft.cloud_engine.gateway.ledger.ledger import UsageLedger
from updraft.cloud_engine.gateway.ledger.metering import USAGE
from updraft.cloud_engine.gateway.ledger.opening import open_store
from updraft.protocol.errors import OverloadedError

async def work():
    ledger, opened = UsageLedger(open_store(sys.argv[1]), on_failure=sys.argv[2]), 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    refused = 0
    while not ledger.failing or opened + refused < 2000 or (sys.argv[2] == "stop" and not refused):
        opening = row(opened + refused)
        try:
            await ledger.open(opening)
            opened += 1
        except OverloadedError:
            refused += 1
        ledger.settle(opening)  # refused ones have rows too
        if refused > 3:
            break
        await asyncio.sleep(0)
    assert ledger.failing or refused
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    while not ledger.flush(1):
        pass
    ledger.settle(row(9999))
    ledger.close()
    print(opened, refused, ledger.lost)

asyncio.run(work())
"""


@pytest.mark.parametrize("action", ["stop", "continue"])
def test_a_full_disk(tmp_path: Path, action: str) -> None:
    """The kernel refuses to let the files grow; promised rows are written once the disk has space again."""
    file = tmp_path / "usage.sqlite3"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    path = os.pathsep.join([str(Path(ledger_worker.__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(file), action],
        check=False,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    opened, refused, lost = map(int, done.stdout.split())
    assert (refused > 0) == (action == "stop")
    assert lost == 0
    assert Counter(each["state"] for each in rows(str(file))) == {"settled": opened + refused + 1}


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["open", "settle", "flush", "crash"])), max_size=30))
def test_any_order_of_events_leaves_one_row_each(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, str]]
) -> None:
    """The first settlement counts, also after the intent was abandoned."""
    file = tmp_path_factory.mktemp("usage") / "usage.sqlite3"

    async def work() -> None:
        ledger = UsageLedger(open_store(file))
        known = [row(number) for number in range(6)]
        wanted: dict[str, tuple[str, int]] = {}
        for at, (number, event) in enumerate(events):
            each = known[number]
            if event == "open":
                await ledger.open(each)
                wanted.setdefault(each.id, ("intent", 0))
            elif event == "settle":
                each.completion_tokens = at
                ledger.settle(each)
                if wanted.get(each.id, ("", 0))[0] != "settled":
                    wanted[each.id] = ("settled", at)
            elif event == "flush":
                assert ledger.flush(60)
            else:
                ledger.close()  # its slot is free, as after a crash
                ledger = UsageLedger(open_store(file))
                wanted = {
                    key: ("abandoned", 0) if state == "intent" else (state, tokens)
                    for key, (state, tokens) in wanted.items()
                }
        ledger.close()
        UsageLedger(open_store(file)).close()
        states = {each["id"]: (each["state"], each["completion_tokens"]) for each in rows(str(file))}
        assert {key: state for key, (state, _) in states.items()} == {
            key: state.replace("intent", "abandoned") for key, (state, _) in wanted.items()
        }
        assert {key: each for key, each in states.items() if each[0] == "settled"} == {
            key: each for key, each in wanted.items() if each[0] == "settled"
        }

    run(work())


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "usage.sqlite3"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE usage (id INTEGER)")
    with pytest.raises(ConfigurationError, match="is not a usage database of Updraft"):
        open_store(file)
