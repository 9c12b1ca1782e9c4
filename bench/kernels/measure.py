"""`updraft bench kernels`: each kernel's time compared with the memory and tensor-core limits of this GPU.

Both ceilings are measured first, in the same process. Every repetition starts with a cold L2 cache and another set of
inputs; calls are captured in CUDA graphs, which excludes Python's launch overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from ...protocol.errors import ConfigurationError
from ..shared.report import Report

Run = Callable[[int], object]
Say = Callable[[str], None]

OURS = "updraft"
_COPIED = 2**30
_SQUARE = 8192
#: Number of float32 elements to flush the cache with: several times the largest L2 cache.
_FLUSHED = 2**26


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel on one shape. `run(i)` uses input set `i` of `sets`."""

    name: str
    run: Run
    # Minimum number of bytes read and written.
    bytes_moved: int
    # Minimum number of operations.
    flops: int = 0
    # Functions that create the `run` of each peer. They raise ImportError if the peer's package is not installed.
    peers: Mapping[str, Callable[[], Run]] = field(default_factory=dict[str, Callable[[], Run]])
    sets: int = 4


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits: bytes per second of a copy (read and written), and operations per second of a bf16 product.

    `empty_call`: seconds of an almost empty kernel. All times include it, but it matters only for short kernels.
    """

    copy: float
    matmul: float
    empty_call: float

    def seconds(self, case: Case) -> float:
        """Return the minimum time of a case, which is limited by its bytes or by its operations."""
        return max(case.bytes_moved / self.copy, case.flops / self.matmul)


@dataclass(frozen=True, slots=True)
class Times:
    """Times of the repetitions, in seconds."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        if not seconds:
            raise ValueError("no repetitions to summarise")
        return cls(*np.percentile(seconds, (50, 20, 80)).tolist())


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one implementation. `share`: minimum time over measured time; `note`: why figures are missing."""

    case: str
    implementation: str
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    share: float | None = None
    bound: str | None = None
    note: str | None = None

    @classmethod
    def of(cls, case: Case, implementation: str, times: Times, ceilings: Ceilings) -> Row:
        return cls(
            case.name,
            implementation,
            *(round(seconds * 1e6, 2) for seconds in (times.median, times.p20, times.p80)),
            gb_per_s=round(case.bytes_moved / times.median / 1e9, 1),
            tflop_per_s=round(case.flops / times.median / 1e12, 2),
            share=round(ceilings.seconds(case) / times.median, 4),
            bound="memory" if case.bytes_moved / ceilings.copy >= case.flops / ceilings.matmul else "matmul",
        )


#: Returns the seconds of each repetition of `run` over `sets` sets of inputs.
Clock = Callable[[Run, int], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Measurements:
    ceilings: Ceilings
    rows: list[Row]


@torch.inference_mode()
def measure(
    cases: Iterable[Callable[[], Case]], clock: Clock, say: Say, keep: Callable[[Measurements], None] = lambda _: None
) -> Measurements:
    """Measure the ceilings, then every case with its peers. A case's tensors are freed before the next is made.

    After every case, `keep` is called with all results so far.
    """
    ceilings = measured_ceilings(clock)
    say(
        f"copy {ceilings.copy / 1e9:,.0f} GB/s, bf16 product {ceilings.matmul / 1e12:,.0f} TFLOP/s, "
        f"an empty call {ceilings.empty_call * 1e6:.1f} us"
    )
    rows: list[Row] = []
    for make in cases:
        case = make()
        for row in rows_of(case, ceilings, clock):
            rows.append(row)
            text = row.note or f"{row.median_us:,.1f} us, {row.share:.0%} of the {row.bound} limit"
            say(f"{row.case}: {row.implementation} {text}")
        keep(Measurements(ceilings, rows))
    return Measurements(ceilings, rows)


def rows_of(case: Case, ceilings: Ceilings, clock: Clock) -> Iterator[Row]:
    """Yield our row, then a row per peer. If our kernel fails, the error is raised; a failing peer gets a note."""
    yield Row.of(case, OURS, Times.of(clock(case.run, case.sets)), ceilings)
    for name, make in case.peers.items():
        try:
            yield Row.of(case, name, Times.of(clock(make(), case.sets)), ceilings)
        except ImportError:
            yield Row(case.name, name, note="not installed")
        except Exception as error:  # noqa: BLE001 - peers may fail in any way, which is a result
            yield Row(case.name, name, note=f"the peer does not run: {str(error).strip().partition(chr(10))[0][:160]}")


def measured_ceilings(clock: Clock) -> Ceilings:
    source = torch.zeros(_COPIED // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    copy = Times.of(clock(lambda _set: target.copy_(source), 1))
    left, right = (torch.randn(_SQUARE, _SQUARE, device="cuda").bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    matmul = Times.of(clock(lambda _set: torch.mm(left, right, out=product), 1))
    empty_call = Times.of(clock(lambda _set: target[:1].zero_(), 1))
    return Ceilings(2 * _COPIED / copy.median, 2 * _SQUARE**3 / matmul.median, empty_call.median)


@dataclass(frozen=True, slots=True)
class GpuClock:
    """Clock that times captured calls with CUDA events, each after a flush of the L2 cache."""

    repetitions: int

    def __call__(self, run: Run, sets: int) -> Sequence[float]:
        graphs = [_captured(run, index) for index in range(sets)]
        # Flush by reading: written data would be flushed to memory during the measured call.
        scratch = torch.zeros(_FLUSHED, device="cuda")
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repetitions)]
        for repetition, (start, end) in enumerate(events):
            scratch.sum()
            start.record()
            graphs[repetition % sets].replay()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]


def _captured(run: Run, index: int) -> torch.cuda.CUDAGraph:
    """Capture `run(index)` in a graph, after warm-up calls for compilation and algorithm selection."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(index)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(index)
    return graph


def require_cuda() -> str:
    """Return the device's name. Raises ConfigurationError without a CUDA device."""
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "updraft bench kernels needs a CUDA device, but torch finds none on this machine.", param="device"
        )
    return torch.cuda.get_device_name()


def report_of(device: str, config: Mapping[str, Any], measured: Measurements) -> dict[str, Any]:
    """Return the fields of a `Report` whose metrics are the ceilings, plus all rows."""
    ceilings = measured.ceilings
    report = Report.of(
        {"bench": "kernels", "device": device, **config},
        {
            "copy_gb_per_s": ceilings.copy / 1e9,
            "matmul_tflop_per_s": ceilings.matmul / 1e12,
            "empty_call_us": ceilings.empty_call * 1e6,
        },
    )
    return {**asdict(report), "rows": [asdict(row) for row in measured.rows]}
