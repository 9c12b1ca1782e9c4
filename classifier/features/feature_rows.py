"""Graded rows as the numbers that gates learn from: counts of the wording, and blocks of measures by their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...protocol.errors import InvalidRequestError
from ..arrays import Array
from ..graded_row import GradedRow
from ..optional import load_module
from .blocks import BLOCKS, GATE_BLOCKS, OPENING_TOKENS, BlockName, Mode, ReadRun, blocks_of_all, view_of
from .gate_inputs import RunView

# Of one row: each block's (width,), and the counts of the wording, (COUNTS,).
Features = tuple[dict[BlockName, Array], Array]
# Blocks that experience does not keep: a prompt could be guessed from its hidden state.
_NOT_KEPT: tuple[BlockName, ...] = ("prompt_hidden", "answer_hidden")
_PIECE = 512


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """n rows."""

    # (n, COUNTS) sparse.
    counts: Any
    # (n, width) of each block.
    blocks: Mapping[BlockName, Array]

    @property
    def widths(self) -> dict[BlockName, int]:
        return {name: block.shape[1] for name, block in self.blocks.items()}

    @property
    def measures(self) -> Array:
        """(n, sum of widths): the blocks side by side."""
        return np.hstack(list(self.blocks.values()))

    def take(self, rows: NDArray[Any]) -> FeatureRows:
        return FeatureRows(self.counts[rows], {name: block[rows] for name, block in self.blocks.items()})

    def of_gate(self, mode: Mode) -> FeatureRows:
        """The blocks that the gate reads, of those that there are."""
        return FeatureRows(self.counts, {name: self.blocks[name] for name in GATE_BLOCKS[mode] if name in self.blocks})


def read_rows(rows: Sequence[GradedRow], names: Iterable[BlockName]) -> FeatureRows:
    """These blocks of all rows."""
    names, sparse = list(names), load_module("scipy.sparse", "calibrate")
    counts: list[Any] = []
    found: dict[BlockName, list[Array]] = {name: [] for name in names}
    # In pieces: dense counts of many thousand rows would not fit in memory.
    for start in range(0, len(rows), _PIECE):
        runs = [ReadRun.of(view_of(row)) for row in rows[start : start + _PIECE]]
        counts.append(sparse.csr_matrix(np.stack([run.question.counts for run in runs])))
        for name in names:
            found[name] += [BLOCKS[name].compute(run) for run in runs]
    return FeatureRows(sparse.vstack(counts).tocsr(), {name: np.stack(block) for name, block in found.items()})


def featurise(rows: Sequence[GradedRow], mode: Mode) -> FeatureRows:
    """The features of a gate. Raises InvalidRequestError if they lack what the gate is about, or only some of
    them have a block.
    """
    known = blocks_of_all(rows)
    if mode == "opening" and "opening" not in known:
        raise InvalidRequestError("An answer's opening is judged by token signals: add logprobs, entropies, margins.")
    if mode == "cascade" and "checks" not in known:
        raise InvalidRequestError("A cascade is judged by the weak tier's answer: add a column weak_response.")
    return read_rows(rows, [name for name in GATE_BLOCKS[mode] if name in known])


def remembered(view: RunView) -> Features:
    """The features that experience keeps of a judged answer."""
    run = ReadRun.of(view)
    # Many engines report none of the prompt's log-probabilities (decision 018).
    left_out = _NOT_KEPT if len(view.prompt_logprobs) else (*_NOT_KEPT, "prompt_signals")
    return {name: block.compute(run) for name, block in BLOCKS.items() if name not in left_out}, run.question.counts


def has_opening(row: GradedRow) -> bool:
    """Whether the answer goes on behind its opening: one that has ended is judged as a whole."""
    return row.signals is not None and len(row.signals.logprobs) > OPENING_TOKENS
