"""Prometheus' text format, as much of it as counters, gauges and histograms need."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Metric:
    """One family: a plain `value`, or a value per label set in `samples` (`(("node", "a"),)` -> 3)."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    value: float | None = None
    samples: Mapping[tuple[tuple[str, str], ...], float] = field(
        default_factory=dict[tuple[tuple[str, str], ...], float]
    )

    def lines(self) -> list[str]:
        lines = [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} {self.kind}"]
        if self.value is not None:
            lines.append(f"{self.name} {self.value:.15g}")
        for labels, value in self.samples.items():
            inside = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels)
            lines.append(f"{self.name}{{{inside}}} {value:.15g}")
        return lines


@dataclass(slots=True)
class Distribution:
    """How many observed values were above the bound before and at most each of `bounds` (ascending), and their sum.

    `counts` has one entry more than `bounds`, for what was above them all.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list[int])
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> Distribution:
        """One that stays as it is while this one goes on."""
        return Distribution(self.bounds, list(self.counts), self.sum)


@dataclass(frozen=True, slots=True)
class Histogram:
    """A distribution as a metric: buckets count what is at most their bound."""

    name: str
    help: str
    values: Distribution

    def lines(self) -> list[str]:
        lines = [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} histogram"]
        for bound, below in zip((*self.values.bounds, inf), accumulate(self.values.counts), strict=True):
            label = "+Inf" if bound == inf else f"{bound:.15g}"
            lines.append(f'{self.name}_bucket{{le="{label}"}} {below}')
        return [*lines, f"{self.name}_sum {self.values.sum:.15g}", f"{self.name}_count {sum(self.values.counts)}"]


def render(metrics: Iterable[Metric | Histogram]) -> str:
    return "".join(line + "\n" for metric in metrics for line in metric.lines())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
