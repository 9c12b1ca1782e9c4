"""`make gpu` without a GPU: its parts, their times and exit codes, and the final table."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner
from updraft.bench.engine.measure import EngineBenchOptions
from updraft.bench.engine.step_gaps import Activity, between_steps, idle_time
from updraft.bench.gpu import device_tests as gpu_tests
from updraft.bench.gpu import parts as gpu
from updraft.bench.gpu.parts import PARTS, Part, run, run_parts
from updraft.bench.gpu.summary import LIMITS, Limit, metric, over_best_peer, read, rows, time_ratio, worst_share
from updraft.bench.kernels.attention_cases import attention_cases
from updraft.bench.kernels.cases import row_cases
from updraft.bench.kernels.measure import Row
from updraft.bench.shared.report import write_json
from updraft.cli.main import app


def test_all_parts_fit_into_ten_minutes() -> None:
    assert sum(part.seconds for part in PARTS) <= gpu._TOTAL_S < 600
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert {limit.part for limit in LIMITS} <= {part.name for part in PARTS}


@pytest.mark.parametrize("part", [part for part in PARTS if part.words[0] == "updraft"], ids=lambda part: part.name)
def test_a_part_is_a_command_that_there_is(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option is known, every group and shape, up to where a device is needed."""
    questions: list[EngineBenchOptions] = []

    def note(options: EngineBenchOptions, *_: object) -> dict[str, float]:
        questions.append(options)
        return {}

    monkeypatch.setattr("updraft.bench.engine.measure.measure", note)
    words = [word.format(json=tmp_path / "out.json") for word in part.words[1:]]
    result = CliRunner().invoke(app, words)
    if "kernels" in words:
        assert torch.cuda.is_available() or "needs a CUDA device" in str(result.exception)
        return
    assert result.exit_code == 0, result.output
    (options,) = questions
    assert options.device == "cuda" and options.groups
    assert json.loads((tmp_path / "out.json").read_text())["config"]["shape"] == options.shape


@pytest.mark.parametrize(("outcomes", "status"), [((True, True), 0), ((True, False), 1), ((), 5)])
def test_each_file_of_tests_has_a_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], outcomes: tuple[bool, ...], status: int
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    for number, outcome in enumerate(outcomes):
        lines = ("import os", "import pytest", "@pytest.mark.gpu", "def test_it():", "    print(os.getpid())")
        (tmp_path / f"test_{number}.py").write_text("\n".join((*lines, f"    assert {outcome}", "")))
    assert gpu_tests.main([str(tmp_path)]) == status
    printed = capfd.readouterr().err
    assert (printed.count("1 passed in"), printed.count("1 failed in")) == (sum(outcomes), outcomes.count(False))


def test_the_paths_of_the_tests_are_there() -> None:
    (tests,) = (part for part in PARTS if part.words[0] == "updraft.bench.gpu.device_tests")
    assert all((gpu.ROOT / word).is_dir() for word in tests.words if word.startswith("tests/"))


def test_each_part_runs_whatever_becomes_of_the_others(tmp_path: Path) -> None:
    parts = [
        Part("fails", 20, ("timeit", "-n", "1", "-r", "1", "raise SystemExit(3)")),
        Part("hangs", 1, ("timeit", "-n", "1", "-r", "1", "import time; time.sleep(60)")),
        Part("writes", 20, ("timeit", "-n", "1", "-r", "1", "open('{json}', 'w').write('{{}}')")),
    ]
    results = tmp_path / "results"
    results.mkdir()
    (results / "gpu-2026-01-01-fails.json").write_text('{"metrics": {"of": "an earlier run"}}')
    codes = run_parts(parts, results, "gpu-2026-01-01")
    assert codes == {"fails": 1, "hangs": 124, "writes": 0}
    assert read(results, "gpu-2026-01-01") == {"writes": {}}


def test_parts_share_the_remaining_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_TOTAL_S", 2)
    sleeps = [Part(name, 60, ("timeit", "-n", "1", "-r", "1", "import time; time.sleep(60)")) for name in "ab"]
    started = time.monotonic()
    assert run_parts(sleeps, tmp_path, "gpu-2026-01-01") == {"a": 124, "b": 124}
    assert time.monotonic() - started < 50


def test_a_part_that_is_stopped_takes_its_children_along(tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
open({str(child)!r}, 'w').write(str(held.pid))
time.sleep(60)
"""
    (tmp_path / "stubborn.py").write_text(code)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(tmp_path))
        patched.setattr(gpu, "_GRACE_S", 0.2)
        started = time.monotonic()
        assert run(("stubborn",), 2) == 124
    assert time.monotonic() - started < 50
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.wait_procs([psutil.Process(int(child.read_text()))], timeout=5)
        assert psutil.Process(int(child.read_text())).status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_without_a_device_it_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "needs a CUDA device" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        gpu.main(["--only", "nothing"])


def test_missing_packages_are_named_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "_gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(gpu, "NEEDED", (*gpu.NEEDED, "no_such_package", "nor_this_one"))
    assert gpu.main([]) == 2
    assert capfd.readouterr().err.endswith("pip install no_such_package nor_this_one\n")
    assert not (tmp_path / "results").exists()


def test_only_some_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []
    stems: list[str] = []

    def noted(parts: list[Part], results: Path, stem: str) -> dict[str, int]:
        ran.extend(part.name for part in parts)
        stems.append(stem)
        return {part.name: 0 for part in parts}

    monkeypatch.setattr(gpu, "_gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(gpu, "run_parts", noted)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    assert gpu.main(["--only", "drafts", "--only", "kernels"]) == 0
    assert ran == ["drafts", "kernels"]
    out = capsys.readouterr().out
    assert "nvidia-h200-" in out and out.count("not measured") == len(LIMITS)
    write_json(tmp_path / f"{stems[0]}-drafts.json", {"metrics": {"spec_oracle08_speedup": 1.59}})
    assert gpu.main([]) == 1  # a limit is missed
    assert gpu.main(["--only", "kernels"]) == 0  # of another part, that did not run now


def ours(case: str, median_us: float, gb_per_s: float = 1000.0, share: float = 0.9, name: str = "updraft") -> dict:
    row = Row(case, name, median_us, median_us, median_us, gb_per_s, 1.0, share, "memory")
    return {field: getattr(row, field) for field in Row.__slots__}


def test_figures_of_kernels() -> None:
    written: dict[str, Any] = {
        "rows": [
            ours("attention decode a", 100, 5000, 0.9),
            ours("attention decode a", 90, name="peer"),
            ours("attention decode a", 95, name="other"),
            {**ours("attention decode a", 0, name="absent"), "median_us": None},
            ours("attention decode small", 1, 10, 0.1),
            ours("attention verify a", 115, share=0.2),
            ours("rms_norm a", 10, share=0.8),
            ours("rms_norm b", 10, share=0.95),
            ours("add_rms_norm a", 10, share=0.1),
        ]
    }
    assert worst_share("attention decode", 256e6)(written) == 0.9
    assert worst_share("attention decode")(written) == 0.1
    assert worst_share("rms_norm")(written) == 0.8
    assert worst_share("gated")(written) is None
    assert over_best_peer("attention decode", 256e6)(written) == pytest.approx(100 / 90)
    assert over_best_peer("rms_norm")(written) is None
    assert time_ratio("attention verify", "attention decode")(written) == pytest.approx(1.15)
    assert metric("none")(written) is None


def test_every_limit_is_found_in_what_the_benches_write() -> None:
    """Names of cases are those of the short form, and metrics are those of the engine's bench."""
    names = [f"{make.args[0].name} " for make in attention_cases(short=True)]
    assert names == ["prefill ", "decode ", "verify "]
    functions = {make.func.__name__ for make in row_cases(short=True)}
    assert {"norm_case", "gated_case"} <= functions
    kernels = {
        "rows": [
            ours("attention decode 64x1 over 2048", 150, 3500),
            ours("attention decode 64x1 over 2048", 160, name="peer"),
            ours("attention verify 64x8 over 2048", 160, 3500),
            ours("attention prefill 1x16384 over 16384", 900),
            ours("rms_norm 8192x4096", 50),
            ours("gated silu 8192x14336", 90),
        ]
    }
    names = (
        *("decode_bandwidth_share", "step_gap_share", "spec_oracle08_speedup", "spec_oracle08_speedup_64"),
        *("roofline_share_256", "graphs_over_eager_1", "batch_over_peer_64", "batch_over_peer_256"),
        *("overlap_share_mixed", "escalation_draft_over_without_1"),
    )
    metrics = dict.fromkeys(names, 1.0)
    parts = {part.name: {"metrics": metrics} for part in PARTS} | {"kernels": kernels}
    assert all(limit.find(parts[limit.part]) is not None for limit in LIMITS)


@pytest.mark.parametrize(
    ("at_most", "figure", "verdict"),
    [
        (False, 0.8, "holds"),
        (False, 0.79, "MISSES"),
        (True, 0.8, "holds"),
        (True, 0.81, "MISSES"),
        (True, None, "not measured"),
    ],
)
def test_verdicts(at_most: bool, figure: float | None, verdict: str) -> None:
    limit = Limit("figure", "part", metric("figure"), 0.8, at_most)
    written = {} if figure is None else {"part": {"metrics": {"figure": figure}}}
    ((name, _, wanted, printed),) = rows(written, [limit])
    assert (name, wanted, printed) == ("figure", "<= 0.8" if at_most else ">= 0.8", verdict)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=12))
def test_idle_time_counts_the_moments_in_which_nothing_runs(spans: list[tuple[int, int]]) -> None:
    ran = [Activity(float(start), float(start + length), "kernel") for start, length in spans]
    first, last = min(each.start for each in ran), max(each.end for each in ran)
    moments = [at + 0.5 for at in range(int(first), int(last))]
    expected = sum(not any(each.start < at < each.end for each in ran) for at in moments)
    assert idle_time(ran) == (expected, last - first)


def test_nothing_that_ran_is_an_error() -> None:
    with pytest.raises(ValueError, match="no activity on the device"):
        idle_time([])


def test_gaps_between_steps_are_those_around_copies_to_the_host() -> None:
    """Two steps of two kernels, 2 us apart. After each step, 1 us pass until its copy (3 us), 4 us until the next copy
    (2 us), and 5 us until the kernels of the next step."""
    step = [(0, 10, "one"), (12, 20, "other"), (21, 24, "Memcpy DtoH (Device -> Pinned)")]
    ran = [Activity(offset + start, offset + end, name) for offset in (0, 35) for start, end, name in step]
    ran.append(Activity(28, 30, "Memcpy HtoD (Pinned -> Device)"))
    assert between_steps(ran) == 1 + 4 + 5
    assert between_steps(ran[:3]) == 0  # no later step follows
    assert idle_time(ran)[0] == 2 + 1 + 4 + 5 + 2 + 1


def test_a_step_that_is_launched_before_the_copy_leaves_no_gap() -> None:
    ran = [Activity(0, 10, "a"), Activity(10, 20, "b"), Activity(12, 14, "Memcpy DtoH (Device -> Pinned)")]
    assert between_steps([*ran, Activity(20, 30, "c")]) == 0
