"""Child processes: ready when we say so, gone when we are."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from updraft.cli.shared.processes import Child, ChildError, signals_as_interrupts, stop_all

SERVER = '''
"""A stand-in for a node: writes its address, then waits."""
import argparse, pathlib, signal, time
parser = argparse.ArgumentParser()
parser.add_argument("--port")
parser.add_argument("--ready-file", type=pathlib.Path)
parser.add_argument("--exit-with-parent", action="store_true")
parser.add_argument("--fail", action="store_true")
parser.add_argument("--silent", action="store_true")
parser.add_argument("--stubborn", action="store_true")
options = parser.parse_args()
if options.fail:
    raise SystemExit("the model file is gone")
if options.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if not options.silent:
    options.ready_file.write_text("http://127.0.0.1:1")
time.sleep(600)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "standin.py").write_text(SERVER)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    stop_all(started)


def start(children: list[Child], folder: Path, *arguments: str) -> Child:
    children.append(Child("standin", "standin", arguments, folder))
    return children[-1]


def test_ready_then_gone(folder: Path, children: list[Child]) -> None:
    child = start(children, folder)
    assert child.wait_ready(30) == "http://127.0.0.1:1"
    assert psutil.pid_exists(child.pid)
    child.stop()
    assert not child.alive
    assert not psutil.pid_exists(child.pid)


def test_a_child_that_dies_at_once_says_why(folder: Path, children: list[Child]) -> None:
    with pytest.raises(ChildError, match="the model file is gone"):
        start(children, folder, "--fail").wait_ready(30)


def test_slow_start_is_reported(folder: Path, children: list[Child], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("updraft.cli.shared.processes.QUIET_S", 0.2)
    lines: list[str] = []
    child = start(children, folder, "--silent")
    child.log.write_text("loading weights\n")
    with pytest.raises(ChildError):
        child.wait_ready(1, lines.append)
    assert lines
    assert all(re.fullmatch(r"standin has been starting for \d s: loading weights", line) for line in lines)


def test_a_child_that_is_never_ready_is_given_up(folder: Path, children: list[Child]) -> None:
    with pytest.raises(ChildError, match=r"not ready within 1 s"):
        start(children, folder, "--silent").wait_ready(1)


def test_a_child_that_ignores_the_request_is_killed(
    folder: Path, children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("updraft.cli.shared.processes.GRACE_S", 0.2)
    child = start(children, folder, "--stubborn")
    child.wait_ready(30)
    child.stop()
    assert not psutil.pid_exists(child.pid)


def test_ctrl_c_does_not_reach_the_child(folder: Path, children: list[Child]) -> None:
    child = start(children, folder)
    assert os.getpgid(child.pid) != os.getpgid(0)


def test_a_request_to_leave_is_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), signals_as_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
