"""The measurement of kernels: its arithmetic, its rows, and its cases on a CPU in small. No GPU is needed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner
from updraft.bench.kernels import measure as kernels
from updraft.bench.kernels.cases import cases, linear_case, lora_case
from updraft.bench.kernels.measure import (
    Case,
    Ceilings,
    Measurements,
    Row,
    Times,
    measure,
    report_of,
    require_cuda,
    rows_of,
)
from updraft.cli.main import app
from updraft.cli.shared.tables import kernels_table
from updraft.protocol.errors import ConfigurationError

CEILINGS = Ceilings(copy=4e12, matmul=800e12, empty_call=2e-6)


def constant(seconds: float):
    """A clock by which everything takes as long, and which does call what it times."""

    def clock(run, sets: int) -> Sequence[float]:
        for index in range(sets):
            run(index)
        return [seconds] * 3

    return clock


def nothing(_set: int) -> None: ...


def test_times_are_percentiles() -> None:
    assert Times.of([5.0, 1.0, 2.0, 4.0, 3.0, 100.0]) == Times(median=3.5, p20=2.0, p80=5.0)
    with pytest.raises(ValueError, match="no repetitions"):
        Times.of([])


@pytest.mark.parametrize(
    ("bytes_moved", "flops", "share", "bound"),
    [
        (4_000_000, 0, 0.5, "memory"),  # 1 us of 2
        (4_000_000, 400_000_000, 0.5, "memory"),  # the products take half of that
        (4_000_000, 1_600_000_000, 1.0, "matmul"),
    ],
)
def test_share_is_the_slower_limits_time_over_the_kernels(
    bytes_moved: int, flops: int, share: float, bound: str
) -> None:
    case = Case("case", nothing, bytes_moved, flops)
    row = Row.of(case, "ours", Times(median=2e-6, p20=1e-6, p80=3e-6), CEILINGS)
    assert (row.share, row.bound) == (share, bound)
    assert (row.median_us, row.p20_us, row.p80_us) == (2.0, 1.0, 3.0)
    assert row.gb_per_s == bytes_moved / 2e-6 / 1e9
    assert row.tflop_per_s == flops / 2e-6 / 1e12


def failing(error: Exception):
    def make():
        raise error

    return make


def test_a_peer_that_cannot_run_leaves_a_note() -> None:
    questions: list[int] = []
    peers = {
        "present": lambda: questions.append,
        "absent": failing(ImportError("no module")),
        "refuses": failing(RuntimeError("only on sm_100\nand more")),
    }
    rows = list(rows_of(Case("case", nothing, 4000, peers=peers, sets=3), CEILINGS, constant(1e-6)))
    assert [row.implementation for row in rows] == ["updraft", "present", "absent", "refuses"]
    assert [row.note for row in rows] == [None, None, "not installed", "the peer does not run: only on sm_100"]
    assert questions == [0, 1, 2]
    assert rows[1].median_us == 1.0
    assert rows[2].median_us is None


def test_our_own_failure_is_no_note() -> None:
    def broken(_set: int) -> None:
        raise RuntimeError("illegal access")

    with pytest.raises(RuntimeError, match="illegal access"):
        list(rows_of(Case("case", broken, 1), CEILINGS, constant(1e-6)))


def measured_rows() -> list[Row]:
    case = Case("norm", nothing, 4_000_000, peers={"peer": failing(ImportError())})
    return list(rows_of(case, CEILINGS, constant(2e-6)))


def test_rows_are_reported_with_their_device() -> None:
    written = json.loads(json.dumps(report_of("NVIDIA H200", {"short": True}, Measurements(CEILINGS, measured_rows()))))
    assert written["config"] == {"bench": "kernels", "device": "NVIDIA H200", "short": True}
    assert written["commit"] and re.fullmatch(r"\d{4}-\d\d-\d\d", written["date"])
    assert {"torch", "numpy"} <= set(written["versions"])
    assert written["metrics"] == {"copy_gb_per_s": 4000, "matmul_tflop_per_s": 800, "empty_call_us": 2}
    assert [row["implementation"] for row in written["rows"]] == ["updraft", "peer"]
    assert written["rows"][0]["share"] == 0.5


def test_failed_case_keeps_earlier_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Case:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(kernels, "measured_ceilings", lambda clock: CEILINGS)
    kept: list[list[str]] = []
    makers = [lambda: Case("one", nothing, 4000), lambda: Case("two", nothing, 4000), broken]
    with pytest.raises(RuntimeError, match="out of memory"):
        measure(makers, constant(1e-6), lambda _: None, lambda figures: kept.append([row.case for row in figures.rows]))
    assert kept == [["one"], ["one", "two"]]


def test_table_names_each_case_once_and_missing_peers() -> None:
    console = Console(width=140, record=True, file=None)
    with console.capture() as captured:
        console.print(kernels_table(measured_rows(), "NVIDIA H200"))
    text = captured.get()
    assert text.count("norm") == 1
    assert "50%" in text
    assert "not installed" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs a CUDA device"):
        require_cuda()
    result = CliRunner().invoke(app, ["bench", "kernels", "--short"])
    assert isinstance(result.exception, ConfigurationError)


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_linear_cases_and_the_plain_product_agree(name: str) -> None:
    case = linear_case(name, 3, 32, 128, device="cpu")
    plain = case.peers["torch bf16"]()
    for index in range(case.sets):
        ours, theirs = case.run(index), plain(index)
        assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
        assert torch.allclose(ours, theirs)
    assert case.flops == 2 * 3 * 32 * 128
    weight_bytes = {"fp8": 32 * 128 + 32 * 4, "int8": 32 * 128 + 32 * 4, "int4": 32 * 64 + 32 * 4}[name]
    assert case.bytes_moved == weight_bytes + 2 * 3 * (128 + 32)


def test_lora_cases_add_to_their_rows() -> None:
    case = lora_case(10, 3, 16, size=64, device="cpu")
    one_by_one = case.peers["torch"]()
    for index in range(case.sets):
        out = one_by_one(index)
        assert isinstance(out, torch.Tensor)
        once = out.clone()
        case.run(index)
        assert once.any()
        assert torch.allclose(out, 2 * once, rtol=0.02, atol=1e-3)
    assert case.bytes_moved == 2 * (2 * 3 * 16 * 64 + 3 * 10 * 64)


def test_the_short_form_is_part_of_the_long_one() -> None:
    def questions(short: bool) -> set[tuple]:
        return {make.args for make in cases(short=short)}

    assert questions(True) < questions(False)
