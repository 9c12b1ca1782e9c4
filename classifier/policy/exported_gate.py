"""Exported gates as they run: one graph reads the question's topics, and one for each gate decides by them.

All gates share the topics. They are read once, while the local model writes, so that gate 3 waits for little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import Array

__all__ = ["BUCKETS", "BUCKET_COUNTS", "MEASURES", "P_GAIN", "TOPICS", "ExportedGate", "ExportedTopics"]

# Names of inputs and outputs of the graphs.
BUCKETS, BUCKET_COUNTS, TOPICS, MEASURES, P_GAIN = "buckets", "counts", "topics", "measures", "p_gain"


@dataclass(frozen=True, slots=True)
class ExportedTopics:
    """`session`: of onnxruntime, over the graph of `topics_to_onnx`. Thread-safe."""

    session: Any

    def read(self, counts: Array) -> Array:
        """(1, topics) float32 of a question's counts, (COUNTS,)."""
        buckets = np.flatnonzero(counts > 0)  # none is negative, and most hold nothing
        return self.session.run([TOPICS], {BUCKETS: buckets, BUCKET_COUNTS: counts[buckets]})[0]


@dataclass(frozen=True, slots=True)
class ExportedGate:
    """`session`: of onnxruntime, over a graph of `gate_to_onnx`. Thread-safe."""

    session: Any

    @property
    def width(self) -> int:
        """How many measures it takes."""
        return next(each.shape[-1] for each in self.session.get_inputs() if each.name == MEASURES)

    def decide(self, topics: Array, measures: Array) -> float:
        """P(gain) from the question's topics, (1, topics), and the row's measures, (width,)."""
        return float(self.session.run([P_GAIN], {TOPICS: topics, MEASURES: measures[None]})[0][0])
