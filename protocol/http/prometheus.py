"""Counters, gauges and histograms as plain values, rendered by `prometheus_client`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LabelSet = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """Counter or gauge: a plain `value`, or one value per label set in `samples` (`(("node", "a"),)` -> 3)."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    value: float | None = None
    samples: Mapping[LabelSet, float] = field(default_factory=dict[LabelSet, float])

    def family(self) -> Family:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        family = (CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily)(self.name, self.help)
        plain = {} if self.value is None else {(): self.value}
        for labels, value in (plain | dict(self.samples)).items():
            family.add_sample(self.name, dict(labels), value)
        return family


@dataclass(slots=True)
class Distribution:
    """Counts of observed values per bucket, and their sum."""

    # Upper bounds of the buckets, ascending and inclusive.
    bounds: tuple[float, ...]
    # Number of values per bucket; the last count is for values above all bounds.
    counts: list[int] = field(default_factory=list[int])
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> Distribution:
        """Return a snapshot that later observations do not change."""
        return Distribution(self.bounds, list(self.counts), self.sum)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Histogram metric: one distribution, or one per label set in `samples`."""

    name: str
    help: str
    values: Distribution | None = None
    # Distributions by label set; all sets have the same labels.
    samples: Mapping[LabelSet, Distribution] = field(default_factory=dict[LabelSet, Distribution])

    def family(self) -> Family:
        from prometheus_client.core import HistogramMetricFamily

        samples = dict(self.samples) if self.values is None else {(): self.values}
        family = HistogramMetricFamily(self.name, self.help, labels=[name for name, _ in next(iter(samples), ())])
        for labels, values in samples.items():
            bounds = [*(f"{bound:.15g}" for bound in values.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(values.counts), strict=True))
            family.add_metric([value for _, value in labels], buckets, values.sum)
        return family


def render(metrics: Iterable[Metric | Histogram]) -> str:
    """Render metrics in Prometheus' text format, version 0.0.4."""
    from prometheus_client import generate_latest  # imported at the first scrape, to keep startup fast
    from prometheus_client.registry import CollectorRegistry

    class Families:
        def collect(self) -> Iterable[Family]:
            return [metric.family() for metric in metrics]

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families())  # type: ignore[arg-type]
    return generate_latest(registry).decode()
