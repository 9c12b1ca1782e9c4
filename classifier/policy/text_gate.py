"""An exported gate of graded text as it runs: first the question is read, then it decides.

Gate 3 reads the question while the answer is being written, so that only what depends on the answer is left for later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array

__all__ = ["BUCKETS", "BUCKET_COUNTS", "MEASURES", "P_GAIN", "READ", "TOPICS", "Read", "TextGate"]

BUCKETS, BUCKET_COUNTS, MEASURES = "buckets", "counts", "measures"
# What a gate 3 makes of a question, and where it takes it back.
READ, TOPICS = "read", "topics"
P_GAIN = "p_gain"

# What a gate takes of a question: by input name.
Read = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TextGate:
    """`session`: of onnxruntime, over a graph of `text_export.py`. Thread-safe."""

    session: Any

    def read(self, counts: Array) -> Read:
        """The question's counts, (COUNTS,), as `decide` wants them: gate 1 all that it needs, gate 3 its topics."""
        buckets = np.flatnonzero(counts > 0)  # none is negative, and most hold nothing
        question: Read = {BUCKETS: buckets, BUCKET_COUNTS: counts[buckets]}
        inputs = {each.name: each for each in self.session.get_inputs()}
        if TOPICS not in inputs:
            return question
        nothing: Read = {BUCKETS: buckets[:0], BUCKET_COUNTS: counts[:0]}
        unasked: Read = {MEASURES: np.zeros(inputs[MEASURES].shape, np.float32), TOPICS: np.zeros((1, 0), np.float32)}
        return nothing | {TOPICS: self.session.run([READ], question | unasked)[0]}

    def decide(self, read: Read, measures: Array) -> float:
        """P(gain) from what was read and the row's measures, (k,)."""
        return float(self.session.run([P_GAIN], {**read, MEASURES: measures[None]})[0][0])
