"""`updraft bench kernels`: each kernel's time beside what the memory and the tensor cores of this GPU allow.

Both ceilings are measured first, in the same process. Every repetition starts with a cold L2 cache and the next one of
several sets of inputs; calls are captured in CUDA graphs, so that launches from Python are nobody's cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ...protocol.errors import ConfigurationError
from ..shared.report import Report
from ..shared.statistics import percentile

Run = Callable[[int], object]
Say = Callable[[str], None]

OURS = "updraft"
_COPIED = 2**30
_SQUARE = 8192
#: Elements of float32: several times the largest L2 cache there is.
_FLUSHED = 2**26


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel on one shape. `run(i)` computes on the `i`-th of `sets` sets of inputs."""

    name: str
    run: Run
    # Bytes that have to be read and written at least once.
    bytes_moved: int
    # Operations that have to be computed at least.
    flops: int = 0
    # Make another implementation's `run`. One that is not installed raises ImportError.
    peers: Mapping[str, Callable[[], Run]] = field(default_factory=dict[str, Callable[[], Run]])
    sets: int = 4


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes per second of a copy (read and written), floating-point operations per second of a bf16 product.

    `floor`: seconds measured for a kernel that does next to nothing. It is in all times, and matters in short ones.
    """

    copy: float
    matmul: float
    floor: float

    def seconds(self, case: Case) -> float:
        """The least time for a case: that of its bytes or of its operations, whichever takes longer."""
        return max(case.bytes_moved / self.copy, case.flops / self.matmul)


@dataclass(frozen=True, slots=True)
class Times:
    """Of the repetitions, in seconds."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        median, p20, p80 = (percentile(seconds, q) for q in (50, 20, 80))
        if median is None or p20 is None or p80 is None:
            raise ValueError("there are no repetitions")
        return cls(median, p20, p80)


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation of one case. `share`: the ceilings' time over its own; `note`: why there are no figures."""

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


#: Seconds of each repetition of `run` over `sets` sets of inputs.
Clock = Callable[[Run, int], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Measured:
    ceilings: Ceilings
    rows: list[Row]


@torch.inference_mode()
def measure(
    cases: Iterable[Callable[[], Case]], clock: Clock, say: Say, keep: Callable[[Measured], None] = lambda _: None
) -> Measured:
    """Ceilings, then every case with its peers. A case's tensors are freed before the next one is made.

    `keep` gets what there is so far, after every case.
    """
    ceilings = measured_ceilings(clock)
    say(
        f"copy {ceilings.copy / 1e9:,.0f} GB/s, bf16 product {ceilings.matmul / 1e12:,.0f} TFLOP/s, "
        f"an empty call {ceilings.floor * 1e6:.1f} us"
    )
    rows: list[Row] = []
    for make in cases:
        case = make()
        for row in rows_of(case, ceilings, clock):
            rows.append(row)
            text = row.note or f"{row.median_us:,.1f} us, {row.share:.0%} of what {row.bound} allows"
            say(f"{row.case}: {row.implementation} {text}")
        keep(Measured(ceilings, rows))
    return Measured(ceilings, rows)


def rows_of(case: Case, ceilings: Ceilings, clock: Clock) -> Iterator[Row]:
    """Ours, whose failure is a failure, and each peer, of which one that cannot run leaves a note."""
    yield Row.of(case, OURS, Times.of(clock(case.run, case.sets)), ceilings)
    for name, make in case.peers.items():
        try:
            yield Row.of(case, name, Times.of(clock(make(), case.sets)), ceilings)
        except ImportError:
            yield Row(case.name, name, note="not installed")
        except Exception as error:  # noqa: BLE001 - a peer may fail in any way; that is a finding, not the end
            yield Row(case.name, name, note=f"does not run: {str(error).strip().partition(chr(10))[0][:160]}")


def measured_ceilings(clock: Clock) -> Ceilings:
    source = torch.zeros(_COPIED // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    copy = Times.of(clock(lambda _set: target.copy_(source), 1))
    left, right = (torch.randn(_SQUARE, _SQUARE, device="cuda").bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    matmul = Times.of(clock(lambda _set: torch.mm(left, right, out=product), 1))
    floor = Times.of(clock(lambda _set: target[:1].zero_(), 1))
    return Ceilings(2 * _COPIED / copy.median, 2 * _SQUARE**3 / matmul.median, floor.median)


@dataclass(frozen=True, slots=True)
class GpuClock:
    """Times with events between the flush of the L2 cache and the end of a captured call."""

    repetitions: int

    def __call__(self, run: Run, sets: int) -> Sequence[float]:
        graphs = [_captured(run, index) for index in range(sets)]
        # Read, not written: what is changed in the cache would be written back on the measured call's time.
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
    """A graph of `run(index)`, after it has been called for compilation and choice of algorithms."""
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
    """The device's name. Raises ConfigurationError where there is none."""
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "updraft bench kernels needs a CUDA device, and torch sees none on this machine.", param="device"
        )
    return torch.cuda.get_device_name()


def report_of(device: str, config: Mapping[str, Any], measured: Measured) -> dict[str, Any]:
    """The fields of a `Report` about the ceilings, and every row."""
    ceilings = measured.ceilings
    report = Report.of(
        {"bench": "kernels", "device": device, **config},
        {
            "copy_gb_per_s": ceilings.copy / 1e9,
            "matmul_tflop_per_s": ceilings.matmul / 1e12,
            "floor_us": ceilings.floor * 1e6,
        },
    )
    return {**asdict(report), "rows": [asdict(row) for row in measured.rows]}
