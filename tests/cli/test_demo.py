"""`updraft demo` end to end: real processes, real models, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow
TASKS = 20
FIELDS = ("accuracy", "accuracy_interval", "latency_ms", "tokens", "cost_usd")


def run_demo(environment: dict[str, str], folder: Path, *flags: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    out = folder / "demo.json"
    command = [sys.executable, "-m", "updraft", "demo", "--tasks", str(TASKS), "--json", str(out), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    return done, json.loads(out.read_text()) if out.exists() else {}


def test_the_demo_measures_everything_and_loses_nothing_with_a_node_killed(environment, tmp_path) -> None:
    picture = tmp_path / "demo.svg"
    done, report = run_demo(environment, tmp_path, "--kill-a-node", "--svg", str(picture))
    assert done.returncode == 0, done.stderr
    assert report["n"] == TASKS
    assert report["processes_lost"] == ["node-1"]
    for tier in ("local", "cloud", "routed"):
        assert report[tier]["failures"] == 0
        assert all(field in report[tier] for field in FIELDS)
        low, high = report[tier]["accuracy_interval"]
        assert 0 <= low <= report[tier]["accuracy"] <= high <= 1
        assert 0 < report[tier]["latency_ms"]["p50"] <= report[tier]["latency_ms"]["p95"]
    assert report["local"]["cost_usd"] == 0 < report["cloud"]["cost_usd"]
    assert report["local"]["tokens"]["cloud"] == 0
    assert report["routed"]["saved_usd"] == pytest.approx(report["cloud"]["cost_usd"] - report["routed"]["cost_usd"])
    assert 0 <= report["routed"]["cloud_share"] <= 1
    assert sum(report["routes"].values()) == TASKS
    assert 0 <= report["draft"]["accepted"] <= report["draft"]["proposed"]
    assert report["seconds"] > 0
    assert not [pid for pid in report["pids"].values() if psutil.pid_exists(pid)]
    assert "cloud only" in done.stdout
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize("blow", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak), signal.SIGKILL])
def test_an_interrupted_demo_leaves_no_process(environment, tmp_path, blow: signal.Signals) -> None:
    """SIGKILL leaves no time to tidy up: the children notice by themselves that their parent is gone."""
    with (tmp_path / "stderr").open("w") as stderr:
        demo = subprocess.Popen(
            [sys.executable, "-m", "updraft", "demo", "--tasks", "300"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            process_group=0,
        )
    pids = pids_of(tmp_path / "stderr", demo)
    assert len(pids) == 3
    os.killpg(demo.pid, blow)
    assert demo.wait(60) != 0
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(map(is_running, pids)):
        time.sleep(0.1)
    assert not [pid for pid in pids if is_running(pid)]


def pids_of(log: Path, demo: subprocess.Popen[bytes]) -> list[int]:
    """The processes that a running demo announces, once they are up."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and demo.poll() is None:
        if pids := re.findall(r"pid (\d+)", log.read_text().partition("Running:")[2]):
            return list(map(int, pids))
        time.sleep(0.2)
    raise AssertionError(log.read_text())


def is_running(pid: int) -> bool:
    """An orphan that nobody reaps is gone all the same."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
