"""Prometheus' text format, as much of it as counters, gauges and histograms need."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
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


class Histogram:
    """How often an observed value was at most each of `bounds` (ascending), with the sum and count of all."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:  # noqa: A002 - the format's word
        self._name, self._help, self._bounds = name, help, tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> list[str]:
        lines = [f"# HELP {self._name} {self._help}", f"# TYPE {self._name} histogram"]
        for bound, below in zip((*self._bounds, inf), accumulate(self._counts), strict=True):
            label = "+Inf" if bound == inf else f"{bound:.15g}"
            lines.append(f'{self._name}_bucket{{le="{label}"}} {below}')
        return [*lines, f"{self._name}_sum {self._sum:.15g}", f"{self._name}_count {sum(self._counts)}"]


def render(metrics: Iterable[Metric | Histogram]) -> str:
    return "".join(line + "\n" for metric in metrics for line in metric.lines())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
