"""Summary table of `make gpu`: every figure that has a limit, with the limit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Output of a part, read from its file: the fields of a `Report`, plus `rows` for kernels.
Written = Mapping[str, Any]
_MANY_BYTES = 256e6
_MISSES = "MISSES"


@dataclass(frozen=True, slots=True)
class Limit:
    """A lower or upper limit on a figure of `part`. `find` extracts the figure from the part's output."""

    name: str
    part: str
    find: Callable[[Written], float | None]
    limit: float
    at_most: bool = False

    def holds(self, figure: float) -> bool:
        return figure <= self.limit if self.at_most else figure >= self.limit


def metric(name: str) -> Callable[[Written], float | None]:
    return lambda written: written.get("metrics", {}).get(name)


def worst_share(prefix: str, min_bytes: float = 0.0) -> Callable[[Written], float | None]:
    """Return a function that finds the lowest share of the hardware limit that Updraft's kernels reach, among cases
    whose name starts with `prefix` and that move at least `min_bytes`."""

    def find(written: Written) -> float | None:
        rows = [row for row in _own_rows(written) if row["case"].startswith(prefix) and _bytes(row) >= min_bytes]
        return min((row["share"] for row in rows), default=None)

    return find


def least_tflops(prefix: str) -> Callable[[Written], float | None]:
    return lambda written: min(
        (row["tflop_per_s"] for row in _own_rows(written) if row["case"].startswith(prefix)), default=None
    )


def over_best_peer(prefix: str, min_bytes: float = 0.0) -> Callable[[Written], float | None]:
    """Return a function that finds the highest ratio of our time to the fastest peer's, over the cases with a peer."""

    def find(written: Written) -> float | None:
        ratios: list[float] = []
        for own in _own_rows(written):
            if not own["case"].startswith(prefix) or _bytes(own) < min_bytes:
                continue
            peers = [row["median_us"] for row in written["rows"] if row["case"] == own["case"] and row is not own]
            ratios += [own["median_us"] / best for best in [min(filter(None, peers), default=None)] if best]
        return max(ratios, default=None)

    return find


def time_ratio(case: str, other: str) -> Callable[[Written], float | None]:
    """Return a function that finds the highest ratio of two of our median times.

    The n-th case whose name starts with `case` is divided by the n-th case whose name starts with `other`.
    """

    def find(written: Written) -> float | None:
        rows = _own_rows(written)
        times = [[row["median_us"] for row in rows if row["case"].startswith(name)] for name in (case, other)]
        ratios = [one_us / other_us for one_us, other_us in zip(*times, strict=False)]
        return max(ratios, default=None)

    return find


_DECODE, _VERIFY, _PREFILL = "attention decode", "attention verify", "attention prefill 1x16384"
LIMITS: Sequence[Limit] = (
    Limit("decode attention, share of copy", "kernels", worst_share(_DECODE, _MANY_BYTES), 0.85),
    Limit("decode attention over the best peer's time", "kernels", over_best_peer(_DECODE, _MANY_BYTES), 1.0, True),
    Limit("8 queries over one, time", "kernels", time_ratio(_VERIFY, _DECODE), 1.2, True),
    Limit("prefill of 16k, TFLOP/s", "kernels", least_tflops(_PREFILL), 400),
    Limit("RMSNorm, share of copy", "kernels", worst_share("rms_norm"), 0.85),
    Limit("SwiGLU, share of copy", "kernels", worst_share("gated silu"), 0.85),
    Limit("8B decoding alone, share of bandwidth", "llama-3.1-8b", metric("decode_bandwidth_share"), 0.75),
    Limit("0.6B decoding alone, share of bandwidth", "qwen3-0.6b", metric("decode_bandwidth_share"), 0.35),
    Limit("8B, 256 sequences, share of the predicted speed", "llama-3.1-8b", metric("roofline_share_256"), 0.5),
    Limit("8B decoding alone, CUDA graphs over eager", "llama-3.1-8b", metric("graphs_over_eager_1"), 1.0),
    Limit("8B, 64 sequences, over continuous batching", "llama-3.1-8b", metric("batch_over_peer_64"), 1.0),
    Limit("8B, 256 sequences, over continuous batching", "llama-3.1-8b", metric("batch_over_peer_256"), 1.0),
    Limit("8B, mixed batch of 64, steps that overlap", "llama-3.1-8b", metric("overlap_share_mixed"), 0.95),
    Limit("8B escalation, draft over none", "llama-3.1-8b", metric("escalation_draft_over_without_1"), 0.7, True),
    Limit("0.6B, 256 sequences, over continuous batching", "qwen3-0.6b", metric("batch_over_peer_256"), 2.0),
    Limit("gaps between steps at 256 sequences", "qwen3-0.6b", metric("step_gap_share"), 0.01, True),
    Limit("0.6B drafts for 8B, one request", "drafts", metric("spec_oracle08_speedup"), 1.6),
    Limit("0.6B drafts for 8B, 64 requests", "drafts", metric("spec_oracle08_speedup_64"), 0.98),
)


def show_summary(results: Path, stem: str, codes: Mapping[str, int]) -> bool:
    """Print a line for every part that ran and for every limit. Return whether every measured limit holds. Limits
    without a new measurement are shown as not measured."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"make gpu: {stem}")
    for column in ("figure", "measured", "limit", ""):
        table.add_column(column)
    for name, code in codes.items():
        table.add_row(f"part {name}", "", "", "ran" if code == 0 else f"exit status {code}")
    limits = rows({name: values for name, values in read(results, stem).items() if name in codes}, LIMITS)
    for row in limits:
        table.add_row(*row)
    Console().print(table)
    return all(verdict != _MISSES for *_, verdict in limits)


def read(results: Path, stem: str) -> dict[str, Written]:
    """Return the output of each part by the part's name."""
    paths = sorted(results.glob(f"{stem}-*.json"))
    return {path.stem.removeprefix(f"{stem}-"): json.loads(path.read_text(encoding="utf-8")) for path in paths}


def rows(written: Mapping[str, Written], limits: Iterable[Limit]) -> list[tuple[str, str, str, str]]:
    """Return name, figure, limit, and `holds`, `MISSES` or `not measured` for each of `limits`."""
    table: list[tuple[str, str, str, str]] = []
    for limit in limits:
        figure = limit.find(written[limit.part]) if limit.part in written else None
        target = f"{'<=' if limit.at_most else '>='} {limit.limit:g}"
        if figure is None:
            table.append((limit.name, "", target, "not measured"))
        else:
            table.append((limit.name, f"{figure:.3g}", target, "holds" if limit.holds(figure) else _MISSES))
    return table


def _own_rows(written: Written) -> list[Mapping[str, Any]]:
    measured = written.get("rows", ())
    return [row for row in measured if row["implementation"] == "updraft" and row["median_us"] is not None]


def _bytes(row: Mapping[str, Any]) -> float:
    return row["gb_per_s"] * row["median_us"] * 1e3
