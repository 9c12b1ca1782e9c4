"""Features that some systems lack are named in one module, and everything else starts and runs without them."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from updraft.accounting.ledger.workers import WorkerSlot, orphaned_intents
from updraft.protocol.safety import system

ROOT = Path(__file__).parents[3]
LACKING = {
    "os": {"getuid", "geteuid", "getgid", "fork", "statvfs", "killpg", "O_CLOEXEC", "O_NOFOLLOW", "fchmod", "fchown"},
    "signal": {"SIGHUP", "SIGKILL", "SIGALRM", "SIGPROF", "SIGUSR1", "alarm", "setitimer", "pthread_sigmask"},
    "socket": {"AF_UNIX"},
}
MODULES = {"fcntl", "resource", "pwd", "grp", "termios"}
#: The tests of a GPU end a whole group of processes: they run on Linux.
EXEMPT = {"protocol/safety/system.py", "bench/gpu/parts.py"}
#: Python's own event loop and processes need them on this system.
STAYS = {"AF_UNIX", "SIGKILL"}
#: Remove the functions that Windows lacks before Updraft is imported. Python's own modules are already loaded.
WITHOUT = f"""
import asyncio, multiprocessing, os, pathlib, shutil, signal, socket, ssl, subprocess, sys, tempfile
import fastapi, httpx, openai, platformdirs, psutil, rich.console, rich.progress, typer, uvicorn
for module, names in {LACKING!r}.items():
    for name in names:
        if name not in {STAYS!r} and hasattr(sys.modules[module], name):
            delattr(sys.modules[module], name)
for name in {MODULES!r}:
    sys.modules[name] = None
"""


def uses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in LACKING.get(node.value.id, ()):
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from filter(MODULES.__contains__, [node.module])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("ipc://"):
            yield "ipc://"


def test_they_are_named_in_one_module() -> None:
    packages = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"]
    sources = [path for package in packages for path in package.rglob("*.py")]
    uses_by_file = {str(path.relative_to(ROOT)): set(uses(ast.parse(path.read_text()))) for path in sources}
    assert {name: names for name, names in uses_by_file.items() if names and name not in EXEMPT} == {}
    assert uses_by_file["protocol/safety/system.py"], "the search finds what is there"


def run(code: str, home: Path) -> str:
    environment = {**os.environ, "UPDRAFT_HOME": str(home), "PYTHONPATH": str(ROOT / ".typing")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_line_starts_without_them(tmp_path: Path) -> None:
    code = """
from typer.testing import CliRunner
from updraft.cli.main import app
for words in (["version"], ["--help"], ["models"], ["why"]):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 or "There is no ledger" in str(done.exception), (words, done.exception)
print("done")
"""
    assert run(code, tmp_path) == "done\n"


@pytest.mark.slow
def test_the_sdk_answers_without_them(tmp_path: Path) -> None:
    """On the device, which starts children and keeps notes, a ledger and a policy's lock."""
    pytest.importorskip("llama_cpp")
    code = """
import updraft
from updraft.local_engine.store.library import Library
with Library().lock("a"):
    pass
with updraft.OpenAI(local="pocket") as client:
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    print(client.chat.completions.create(model="local", messages=messages).choices[0].message.content)
"""
    assert "5" in run(code, tmp_path)


@pytest.mark.slow
def test_the_daemon_serves_without_them(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    code = """
import threading
from updraft.cli.shared.processes import signals_as_interrupts
from updraft.router.server.app import DaemonOptions, run_daemon
from updraft.router.settings_sources import load_config

def ask(url):
    def client():
        body = {"model": "local", "messages": [{"role": "user", "content": "What is 2 + 3?"}]}
        try:
            print(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).status_code, flush=True)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=client).start()

with signals_as_interrupts():
    run_daemon(DaemonOptions(load_config({"local": "pocket"}), port=0), on_ready=ask)
"""
    assert "200" in run(code, tmp_path).splitlines()


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """`msvcrt` instead of `fcntl`: a handle locks bytes from its position on, and a second lock of them fails."""
    holders: dict[tuple[int, int], int] = {}

    def locking(handle: int, mode: int, length: int) -> None:
        at = (os.fstat(handle).st_ino, os.lseek(handle, 0, os.SEEK_CUR))
        assert length == 1
        if (mode == 0) != (holders.get(at) == handle) or (mode == 2 and at in holders):
            raise PermissionError(13, "Permission denied")
        if mode == 2:
            holders[at] = handle
        else:
            del holders[at]

    def close(handle: int) -> None:
        for at in [at for at, holder in holders.items() if holder == handle]:
            del holders[at]
        real_close(handle)

    real_close, fake = os.close, SimpleNamespace(locking=locking, LK_UNLCK=0, LK_NBLCK=2)
    monkeypatch.setattr(os, "close", close)
    monkeypatch.setattr(system, "_module", {"msvcrt": fake}.get)


@pytest.mark.usefixtures("windows")
def test_files_are_locked_on_windows(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_bytes(b"0123456789")
    first, second = (os.open(path, os.O_RDWR) for _ in range(2))
    assert os.read(first, 4) == b"0123"
    assert system.try_lock(first) and system.try_lock(first), "the lock of this handle already"
    assert not system.try_lock(second)
    assert os.read(first, 6) == b"456789", "the position stays"
    system.unlock(first)
    with system.locked(second):
        assert not system.try_lock(first)
    os.close(second)
    assert system.try_lock(first)
    os.close(first)


@pytest.mark.usefixtures("windows")
def test_two_programs_share_no_intents_on_windows(tmp_path: Path) -> None:
    with closing(WorkerSlot(tmp_path)) as first, closing(WorkerSlot(tmp_path)) as second:
        assert (first.number, second.number) == (0, 1)
        second.intents.touch()
        assert list(orphaned_intents(tmp_path, 4, first.number)) == []
        assert sorted(first.live_ids()) == sorted([first.id, second.id])
        second.close()
        assert list(orphaned_intents(tmp_path, 4, first.number)) == [second.intents]
