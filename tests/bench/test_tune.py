"""Which launches are tried and which are kept, with a clock that says what they take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner
from updraft.bench.kernels import Case
from updraft.bench.tune import candidates, keep, merged, tune
from updraft.cli.main import app
from updraft.kernels.activation.launch import gated_activation_launch
from updraft.kernels.attention.launch import AttentionShape, attention_launch
from updraft.kernels.linear.launch import Gpu, MatmulShape, matmul_launch
from updraft.kernels.runtime.launch import Launch, launch_for, read_launches
from updraft.kernels.runtime.row_launch import row_launch
from updraft.protocol.errors import ConfigurationError

HEURISTIC = Launch(4, 2, {"BLOCK_N": 64})
PLACE = ("paged_attention", "key")


class Bench:
    """A kernel that takes as long as `seconds` says of its launch, and a clock that knows."""

    def __init__(self, seconds: Callable[[Launch], float], result: Callable[[Launch], torch.Tensor | None]) -> None:
        self.seconds, self.result = seconds, result
        self.launched: list[Launch] = []

    def make(self) -> Case:
        noise = torch.randn(4)
        chosen = launch_for(*PLACE, "gpu", HEURISTIC)

        def run(_set: int) -> object:
            self.launched.append(chosen)
            found = self.result(chosen)
            return None if found is None else found + noise

        return Case("case", run, 1)

    def clock(self, run: Callable[[int], object], sets: int) -> list[float]:
        run(0)
        return [self.seconds(self.launched[-1])] * 3


def same(_launch: Launch) -> torch.Tensor:
    return torch.ones(4)


def of_warps(**seconds: float) -> Callable[[Launch], float]:
    return lambda launch: seconds.get(f"w{launch.num_warps}", 1.0)


@pytest.mark.parametrize(
    ("seconds", "warps"),
    [({}, None), ({"w8": 0.5}, 8), ({"w8": 0.98}, None), ({"w8": 0.9, "w2": 0.8}, 2), ({"w4": 0.1}, None)],
)
def test_the_fastest_is_kept_if_it_is_clearly_faster(seconds: dict[str, float], warps: int | None) -> None:
    bench = Bench(of_warps(**seconds), same)
    (decided,) = tune([bench.make], bench.clock, lambda _: None).values()
    assert (None if decided is None else decided.num_warps) == warps
    assert {launch.num_warps for launch in bench.launched} == {2, 4, 8}


def test_another_result_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    bench = Bench(of_warps(w8=0.1, w2=0.5), lambda launch: torch.ones(4) * (1.1 if launch.num_warps == 8 else 1))
    (decided,) = tune([bench.make], bench.clock, said.append).values()
    assert decided is not None and decided.num_warps == 2
    assert sum("another result" in line for line in said) == 1


def test_what_does_not_run_is_left_out_and_said() -> None:
    def result(launch: Launch) -> torch.Tensor:
        if launch.tiles["BLOCK_N"] == 128:
            raise RuntimeError("out of resource: shared memory\nmore")
        return torch.ones(4)

    said: list[str] = []
    bench = Bench(of_warps(), result)
    assert tune([bench.make], bench.clock, said.append) == {PLACE: None}
    assert [line for line in said if line.endswith("does not run: out of resource: shared memory")]


def test_without_a_result_there_is_nothing_to_compare() -> None:
    bench = Bench(of_warps(w8=0.1), lambda _: None)
    assert tune([bench.make], bench.clock, lambda _: None) == {}


def test_the_first_case_decides() -> None:
    bench = Bench(of_warps(w8=0.5), same)
    first = len(candidates_of(HEURISTIC))
    tune([bench.make, bench.make], bench.clock, lambda _: None)
    assert len(bench.launched) == 2 * (1 + first) + 2  # each is compared, then timed; the second case only once


def candidates_of(launch: Launch, kernel: str = "paged_attention") -> list[Launch]:
    return list(candidates(kernel, launch))


@pytest.mark.parametrize(
    ("kernel", "launch", "free"),
    [
        ("paged_attention", attention_launch(AttentionShape(32, 8, 128, 64), 1, "none"), "BLOCK_N"),
        ("rms_norm", row_launch("rms_norm", 1024, "none"), "ROWS"),
        ("gated", gated_activation_launch(4096, "none"), "BLOCK"),
        ("int8_kernel", matmul_launch("int8_kernel", MatmulShape(1, 64, 2), Gpu("none", 8)), "BLOCK_FEATURES"),
    ],
)
def test_candidates_differ_in_one_thing(kernel: str, launch: Launch, free: str) -> None:
    found = candidates_of(launch, kernel)
    assert len(found) >= 4 and launch not in found
    varied: set[str] = set()
    for other in found:
        changed = {name for name, size in other.tiles.items() if size != launch.tiles[name]}
        changed |= {name for name in ("num_warps", "num_stages") if getattr(other, name) != getattr(launch, name)}
        assert len(changed) == 1
        varied |= changed
    stages = set() if kernel in ("rms_norm", "gated") else {"num_stages"}
    assert varied == {"num_warps", free} | stages


@given(warps=st.sampled_from([1, 2, 4, 8, 16]), stages=st.integers(1, 5), tile=st.sampled_from([16, 32, 64, 128]))
def test_candidates_are_launches_that_can_be_read(warps: int, stages: int, tile: int, tmp_path_factory) -> None:
    path = tmp_path_factory.getbasetemp() / "candidates.json"
    found = {str(at): launch for at, launch in enumerate(candidates_of(Launch(warps, stages, {"BLOCK_N": tile})))}
    keep(path, {("kernel", key): launch for key, launch in found.items()})
    read = read_launches(path)["kernel"]
    assert {key: read[key] for key in found} == found


def test_what_is_known_stays_and_what_was_slower_goes(tmp_path: Path) -> None:
    one, two = Launch(1), Launch(2)
    known = {"a": {"x": one, "y": one}, "b": {"x": one}}
    assert merged(known, {("a", "x"): two, ("b", "x"): None, ("c", "z"): two}) == {
        "a": {"x": two, "y": one},
        "c": {"z": two},
    }
    keep(tmp_path / "gpu.json", {("a", "x"): one, ("a", "y"): two})
    keep(tmp_path / "gpu.json", {("a", "x"): None})
    assert read_launches(tmp_path / "gpu.json") == {"a": {"y": two}}


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_without_a_gpu_it_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "kernels", "--tune"])
    assert isinstance(result.exception, ConfigurationError)
