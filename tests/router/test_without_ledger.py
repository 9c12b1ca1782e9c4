"""Without a writable home requests go on: no ledger, and a typed error only where a budget or a store needs one."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bound_rights import needs_mounts, of_another_user, python
from cascade_bench import Bench, run
from router_fakes import FakeCloud, ScriptedLocal, running_cloud
from updraft.protocol.errors import ConfigurationError, StorageError
from updraft.protocol.http.wire import WireRequest
from updraft.router.accounting.budget import BudgetLimits
from updraft.router.accounting.ledger import Ledger, RequestWriter
from updraft.router.config import RouterConfig
from updraft.router.factory import open_cloud, open_middle_tiers
from updraft.router.router import Router
from updraft.router.state import Tiers

# A client in a process of its own: its answers, and the errors of what needs a file.
APP = """
import json, sys, openai, updraft
outcomes = {}
with updraft.OpenAI(cloud_url=sys.argv[1], cloud_model="big", max_retries=0, **json.loads(sys.argv[2])) as client:
    ask = lambda: client.chat.completions.create(model="cloud", messages=[{"role": "user", "content": "hello"}])
    looks = {"files": client.files.list, "batches": client.batches.list, "why": lambda: client.updraft.why("x")}
    for name, look in {"first": ask, "second": ask, **looks}.items():
        try:
            reply = look()
            outcomes[name] = reply.choices[0].message.content if look is ask else "ok"
        except openai.APIStatusError as error:
            outcomes[name] = [error.status_code, error.code]
print(json.dumps(outcomes))
"""


NO_LOCKS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
static int call(const char *name, int file, int command, va_list rest) {
    void *argument = va_arg(rest, void *);
    if (command == F_SETLK || command == F_SETLKW) { errno = ENOLCK; return -1; }
    return ((int (*)(int, int, ...))dlsym(RTLD_NEXT, name))(file, command, argument);
}
int fcntl(int file, int command, ...) {
    va_list rest; va_start(rest, command); int done = call("fcntl", file, command, rest); va_end(rest); return done;
}
int fcntl64(int file, int command, ...) {
    va_list rest; va_start(rest, command); int done = call("fcntl64", file, command, rest); va_end(rest); return done;
}
"""


@pytest.fixture(scope="module")
def shared_cloud() -> Iterator[FakeCloud]:
    with running_cloud() as cloud:
        yield cloud


def _home(kind: str, folder: Path) -> dict[str, str]:
    """Variables for `bound_rights.python`."""
    folder.chmod(0o755)
    home = folder / "home"
    home.mkdir()
    if kind == "of another user":
        return {"HOME": str(of_another_user(home, 0o700))}
    if kind == "missing":
        return {"HOME": str(of_another_user(home, 0o755) / "nonexistent")}
    if kind == "the folder of another user":
        return {"HOME": str(folder), "UPDRAFT_HOME": str(of_another_user(home, 0o700))}
    if kind == "a file":
        home.rmdir()
        home.write_text("x")
        return {"HOME": str(home)}
    needs_mounts()
    options = "ro" if kind == "read-only" else "size=64k"
    mount = f"mount -t tmpfs -o {options} tmpfs {home}"
    if kind == "full":
        mount += f" && {{ cat /dev/zero > {home}/rest 2>/dev/null; true; }}"
    return {"HOME": str(home), "mount": mount}


KINDS = ["of another user", "missing", "the folder of another user", "a file", "read-only", "full"]


@pytest.mark.parametrize("kind", KINDS)
def test_requests_continue(kind: str, shared_cloud: FakeCloud, tmp_path: Path) -> None:
    done = python("-c", APP, shared_cloud.url, "{}", **_home(kind, tmp_path))
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert status.pop("first") == status.pop("second") == "The cloud says hello."
    assert status == {
        "files": [503, "storage_unusable"],
        "batches": [503, "storage_unusable"],
        "why": [404, "not_found"],
    }
    assert done.stderr.count("Serving without a ledger") == 1


def test_a_budget_needs_its_ledger(shared_cloud: FakeCloud, tmp_path: Path) -> None:
    variables = _home("of another user", tmp_path)
    done = python("-c", APP, shared_cloud.url, "{}", **variables, UPDRAFT_BUDGET_CLOUD_TOKENS="1000")
    status = json.loads(done.stdout)
    assert status["first"] == status["second"] == [429, "ledger_unavailable"]


@pytest.mark.parametrize(("given", "named"), [('{"ledger": null}', {}), ("{}", {"UPDRAFT_LEDGER": "none"})])
def test_no_ledger_wants_no_home(given: str, named: dict[str, str], shared_cloud: FakeCloud, tmp_path: Path) -> None:
    done = python("-c", APP, shared_cloud.url, given, **_home("of another user", tmp_path), **named)
    assert json.loads(done.stdout)["first"] == "The cloud says hello."
    assert "without a ledger" not in done.stderr


def test_a_gateway_needs_its_ledger(shared_cloud: FakeCloud, tmp_path: Path) -> None:
    command = ["gateway", "--no-auth", "--port", "0", "--node", shared_cloud.url.removesuffix("/v1")]
    done = python("-m", "updraft", *command, **_home("of another user", tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("error: Cannot use ") and done.stderr.count("\n") == 1, done.stderr


def test_doctor_says_so(shared_cloud: FakeCloud, tmp_path: Path) -> None:
    program = "from updraft.cli.doctor.checks import check_ledger; print(*check_ledger())"
    done = python("-c", program, **_home("of another user", tmp_path))
    assert "status='fail'" in done.stdout and "requests go unrecorded" in done.stdout, done


COMMANDS = """
import sys
from typer.testing import CliRunner
from updraft.cli.main import app
for command in sys.argv[1:]:
    done = CliRunner().invoke(app, command.split())
    assert done.exception is None or "Permission denied" not in str(done.exception), (command, done)
    print(done.stdout)
"""


def test_commands_work_without_a_home(shared_cloud: FakeCloud, tmp_path: Path) -> None:
    cloud = {"UPDRAFT_CLOUD_URL": shared_cloud.url, "UPDRAFT_CLOUD_MODEL": "big"}
    commands = ["ask --tier cloud hello", "log", "usage", "models", "policy list", "feedback x up", "keys list"]
    done = python("-c", COMMANDS, *commands, **_home("of another user", tmp_path), **cloud)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The cloud says hello.")


@pytest.fixture
def bench(cloud: FakeCloud, tmp_path: Path) -> Any:
    def make(ledger: Path, **settings: Any) -> Bench:
        config = RouterConfig(cloud_url=cloud.url, cloud_model="big", ledger=ledger, **settings)
        tiers = Tiers(None, open_cloud(config), None, middle_tiers=open_middle_tiers(config))
        return Bench(Router(config, tiers), ScriptedLocal(), ledger)

    return make


async def health(bench: Bench) -> dict[str, Any]:
    answer = await bench.handle(WireRequest("GET", "/health", {}, b""))
    assert isinstance(answer.body, bytes)
    return json.loads(answer.body)


def test_a_corrupt_ledger_stops_nobody_and_comes_back(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = tmp_path / "ledger.sqlite3"
    ledger.write_bytes(b"no database at all" * 100)
    monkeypatch.setattr("updraft.router.router.RETRY_S", 0.01)

    async def test() -> None:
        b = bench(ledger, budget=BudgetLimits(cloud_tokens=10_000))
        assert (await health(b)) == {"status": "ok", "ledger": "unavailable"}
        assert (await b.answer("cloud"))["error"]["code"] == "ledger_unavailable"
        ledger.unlink()
        while True:  # a request starts the next try, and does not wait for it
            await asyncio.sleep(0.02)
            if "error" not in await b.answer("cloud"):
                break
        assert (await health(b)) == {"status": "ok"}
        await b.router.close()
        assert b.rows()[0].status == 200

    run(test())
    said = [record.getMessage() for record in caplog.records if "ledger" in record.getMessage()]
    assert len(said) == 2, said


def test_a_ledger_whose_links_lead_nowhere_stops_nobody(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite3").symlink_to(tmp_path / "ledger.sqlite3")

    async def test() -> None:
        b = bench(tmp_path / "ledger.sqlite3")
        assert "error" not in await b.answer("cloud")
        assert (await health(b)) == {"status": "ok", "ledger": "unavailable"}
        await b.router.close()

    run(test())


def test_a_disk_that_fills_up_later_stops_nobody(bench: Any, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.sqlite3"

    async def test() -> None:
        b = bench(ledger)
        await b.answer("cloud")
        database = b.router._ledger_writer._store._database
        with database.use() as connection:
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
            connection.execute(f"PRAGMA max_page_count={pages}")
        for number in range(40):  # until the last page is full
            assert "error" not in await b.answer("cloud", user=f"user-{number}")
        while b.router.ledger_problem is None:  # noqa: ASYNC110 - the writer's thread sets no event
            await asyncio.sleep(0.01)
        assert (await health(b)) == {"status": "ok", "ledger": "unavailable"}
        with database.use() as connection:
            connection.execute("PRAGMA max_page_count=100000")
        assert "error" not in await b.answer("cloud")
        await b.router.close()
        assert len(b.rows()) == 42

    run(test())


def _empty(file: Path) -> None:
    subprocess.run(["truncate", "-s", "0", str(file)], check=True)  # this process must not open the file


def _replace(file: Path) -> None:
    other = file.with_name("other")
    Ledger(other).close()
    other.replace(file)


def _delete_log(file: Path) -> None:
    file.with_name(f"{file.name}-wal").unlink()


@pytest.mark.skipif(sys.platform == "win32", reason="an open file stays at its path")
@pytest.mark.parametrize(
    "harm", [lambda file: file.rename(file.with_name("moved")), Path.unlink, _empty, _replace, _delete_log]
)
def test_ledger_that_disappears_is_reported_once(
    bench: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], object]
) -> None:
    ledger = tmp_path / "ledger.sqlite3"

    async def test() -> None:
        b = bench(ledger)
        await b.answer("cloud")
        assert (await health(b)) == {"status": "ok"}
        await asyncio.to_thread(b.router.flush_ledger)
        harm(ledger)
        for _ in range(3):
            assert "error" not in await b.answer("cloud")
        assert caplog.text.count("was moved, replaced, deleted or emptied") == 1, "without a look at /health"
        assert str(ledger) in caplog.text
        assert (await health(b)) == {"status": "ok", "ledger": "unavailable"}
        if ledger.with_name("moved").exists():
            ledger.with_name("moved").rename(ledger)
            assert (await health(b)) == {"status": "ok"}
        await b.router.close()

    with caplog.at_level(logging.ERROR, logger="updraft.router"):
        run(test())


def test_a_failed_look_at_the_ledger_counts_until_the_next_one(bench: Any, tmp_path: Path) -> None:
    async def test() -> None:
        b = bench(tmp_path / "ledger.sqlite3")
        await b.answer("cloud")

        def fail(_: Ledger) -> None:
            raise sqlite3.DatabaseError("database disk image is malformed")

        with pytest.raises(StorageError, match="malformed"):
            await b.router.read_ledger(fail)
        assert (await health(b)) == {"status": "ok", "ledger": "unavailable"}
        assert len(await b.router.read_ledger(lambda ledger: ledger.rows())) == 1
        assert (await health(b)) == {"status": "ok"}
        await b.router.close()

    run(test())


def test_a_file_system_without_locks(shared_cloud: FakeCloud, tmp_path: Path) -> None:
    """As some network mounts and FUSE file systems are: each lock fails."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    source, shim = tmp_path / "locks.c", tmp_path / "locks.so"
    source.write_text(NO_LOCKS)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    variables = {"HOME": str(tmp_path), "LD_PRELOAD": str(shim)}
    done = python("-c", APP, shared_cloud.url, "{}", **variables)
    assert json.loads(done.stdout)["second"] == "The cloud says hello.", done
    assert done.stderr.count("Serving without a ledger") == 1


def test_a_ledger_of_a_newer_version_is_refused(bench: Any, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.sqlite3"
    Ledger(ledger).close()
    with closing(sqlite3.connect(ledger)) as connection:
        connection.execute("PRAGMA user_version=99")

    async def test() -> None:
        b = bench(ledger)
        with pytest.raises(ConfigurationError, match="format 99"):
            await b.router.start()
        await b.router.close()

    run(test())


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Writers of ledgers that wait: the first event tells that one does, the second lets them go on."""
    begun, goes_on = threading.Event(), threading.Event()

    class SlowWriter(RequestWriter):
        def __init__(self, *given: Any) -> None:
            begun.set()
            goes_on.wait(30)
            super().__init__(*given)

    monkeypatch.setattr("updraft.router.router.RequestWriter", SlowWriter)
    yield begun, goes_on
    goes_on.set()


def test_settings_that_change_while_a_ledger_is_opened_hold_for_its_budget(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opening: tuple[threading.Event, threading.Event]
) -> None:
    ledger, (begun, goes_on) = tmp_path / "ledger.sqlite3", opening
    ledger.write_bytes(b"no database at all" * 100)
    monkeypatch.setattr("updraft.router.router.RETRY_S", 0.5)

    async def test() -> None:
        b = bench(ledger, budget=BudgetLimits(cloud_tokens=10_000))
        await b.answer("cloud")
        ledger.unlink()
        await asyncio.sleep(0.6)
        await b.answer("cloud")
        await asyncio.to_thread(begun.wait, 30)
        await b.router.reconfigure(replace(b.router.config, budget=BudgetLimits(cloud_tokens=20_000)))
        goes_on.set()
        await b.router._ledger_retry
        assert "error" not in await b.answer("cloud", max_tokens=15_000), "the new limit holds"
        await b.router.close()

    run(test())


def test_a_start_that_is_cancelled_leaves_no_writer(
    bench: Any, tmp_path: Path, opening: tuple[threading.Event, threading.Event]
) -> None:
    (begun, goes_on), before = opening, threading.enumerate()

    async def test() -> None:
        b = bench(tmp_path / "ledger.sqlite3")
        start = asyncio.create_task(b.router.start())
        await asyncio.to_thread(begun.wait, 30)
        b.router._loading.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        await asyncio.gather(start, return_exceptions=True)
        await b.router.close()

    run(test())
    assert "updraft-ledger" not in [thread.name for thread in threading.enumerate() if thread not in before]


def test_nothing_is_made_in_the_background_that_nobody_could_retrieve(
    bench: Any, cloud: FakeCloud, tmp_path: Path
) -> None:
    (tmp_path / "answers").write_bytes(b"no database at all" * 100)

    async def test() -> None:
        b = bench(tmp_path / "ledger.sqlite3", store=tmp_path / "answers")
        body = json.dumps({"model": "cloud", "input": "hello", "background": True}).encode()
        made = await b.handle(WireRequest("POST", "/v1/responses", {}, body))
        assert isinstance(made.body, bytes)
        assert (made.status, json.loads(made.body)["error"]["code"]) == (503, "storage_unusable")
        await b.router.close()

    run(test())
    assert not cloud.requests
