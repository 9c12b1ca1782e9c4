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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TASKS = 20
FIELDS = ("accuracy", "accuracy_interval", "latency_ms", "tokens", "cost_usd")


def run_demo(environment: dict[str, str], folder: Path, *flags: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    out = folder / "demo.json"
    command = [sys.executable, "-m", "updraft", "demo", "--tasks", str(TASKS), "--json", str(out), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    return done, json.loads(out.read_text()) if out.exists() else {}


def test_the_demo_measures_everything_and_loses_nothing_with_a_node_killed(environment, tmp_path) -> None:
    picture = tmp_path / "demo.svg"
    done, found = run_demo(environment, tmp_path, "--kill-a-node", "--svg", str(picture))
    assert done.returncode == 0, done.stderr
    assert found["n"] == TASKS
    assert found["processes_lost"] == ["node-1"]
    for tier in ("local", "cloud", "routed"):
        assert found[tier]["failures"] == 0
        assert all(field in found[tier] for field in FIELDS)
        low, high = found[tier]["accuracy_interval"]
        assert 0 <= low <= found[tier]["accuracy"] <= high <= 1
        assert 0 < found[tier]["latency_ms"]["p50"] <= found[tier]["latency_ms"]["p95"]
    assert found["local"]["cost_usd"] == 0 < found["cloud"]["cost_usd"]
    assert found["local"]["tokens"]["cloud"] == 0
    assert found["routed"]["saved_usd"] == pytest.approx(found["cloud"]["cost_usd"] - found["routed"]["cost_usd"])
    assert 0 <= found["routed"]["cloud_share"] <= 1
    assert sum(found["routes"].values()) == TASKS
    assert 0 <= found["draft"]["accepted"] <= found["draft"]["proposed"]
    assert found["seconds"] > 0
    assert not [pid for pid in found["pids"].values() if psutil.pid_exists(pid)]
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
        if found := re.findall(r"pid (\d+)", log.read_text().partition("Running:")[2]):
            return list(map(int, found))
        time.sleep(0.2)
    raise AssertionError(log.read_text())


def is_running(pid: int) -> bool:
    """An orphan that nobody reaps is gone all the same."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
