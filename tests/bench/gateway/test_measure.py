"""`updraft bench gateway`, from a stub node to figures."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner
from updraft.cli.main import app


@pytest.mark.skipif(sys.platform != "linux", reason="processes are pinned to cores")
def test_of_short_runs(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = "bench gateway --concurrencies 1,4 --streams 2 --duration-s 0.2 --memory-duration-s 1 --json"
    result = CliRunner().invoke(app, [*command.split(), str(out)])
    assert result.exit_code == 0, result.output
    metrics = json.loads(out.read_text())["metrics"]
    for name in ("updraft", "direct"):
        for concurrency in ("c1", "c4"):
            assert metrics[f"{name}.{concurrency}.failures"] == 0
            assert metrics[f"{name}.{concurrency}.requests_per_s"] > 0
            assert 0 < metrics[f"{name}.{concurrency}.p50_ms"] <= metrics[f"{name}.{concurrency}.p99_ms"]
    assert metrics["updraft.stream.failures"] == 0
    assert metrics["updraft.stream.cpu_us_per_frame"] > 0
    frontier = [metrics[f"updraft.frontier.requests_per_s_at_p99_{limit}ms"] for limit in (1, 5, 10, 50)]
    assert frontier == sorted(frontier)
    assert metrics["updraft.memory.mb"] > 10
    assert metrics["updraft.memory_of_streams.requests"] > 10
    assert metrics["most_requests_per_s.updraft"] > 0
    assert metrics["overload.failures"] == 0
    assert metrics["overload.goodput_share"] > 0
    assert metrics["overload.peak_share"] > 0
