"""Prometheus' text format, as much of it as counters and gauges need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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


def render(metrics: Iterable[Metric]) -> str:
    return "".join(line + "\n" for metric in metrics for line in metric.lines())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
