"""Features of graded rows as training input: n-gram counts, and named blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...protocol.errors import InvalidRequestError
from ..arrays import Array
from ..graded_row import GradedRow
from ..optional_imports import load_module
from .blocks import BLOCKS, GATE_BLOCKS, OPENING_TOKENS, BlockName, Mode, ParsedRun, blocks_of_all, view_of
from .gate_inputs import RunView

# Features of one row: the blocks, (width,) each, and the n-gram counts, (COUNTS,).
Features = tuple[dict[BlockName, Array], Array]
# Blocks that stored experience omits, because a prompt could be guessed from its hidden state.
_NOT_KEPT: tuple[BlockName, ...] = ("prompt_hidden", "answer_hidden")
_PIECE = 512


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Training features of n rows: n-gram counts and blocks."""

    # (n, COUNTS) sparse n-gram counts.
    counts: Any
    # (n, width) features of each block.
    blocks: Mapping[BlockName, Array]

    @property
    def widths(self) -> dict[BlockName, int]:
        return {name: block.shape[1] for name, block in self.blocks.items()}

    @property
    def measures(self) -> Array:
        """All blocks side by side, (n, sum of widths)."""
        return np.hstack(list(self.blocks.values()))

    def take(self, rows: NDArray[Any]) -> FeatureRows:
        return FeatureRows(self.counts[rows], {name: block[rows] for name, block in self.blocks.items()})

    def of_gate(self, mode: Mode) -> FeatureRows:
        """Select the blocks of one gate. Blocks that the rows do not have are omitted."""
        return FeatureRows(self.counts, {name: self.blocks[name] for name in GATE_BLOCKS[mode] if name in self.blocks})


def read_rows(rows: Sequence[GradedRow], names: Iterable[BlockName]) -> FeatureRows:
    """Compute the named blocks for all rows."""
    names, sparse = list(names), load_module("scipy.sparse", "calibrate")
    counts: list[Any] = []
    columns: dict[BlockName, list[Array]] = {name: [] for name in names}
    # Convert in pieces, because dense counts of many thousand rows would not fit in memory.
    for start in range(0, len(rows), _PIECE):
        runs = [ParsedRun.of(view_of(row)) for row in rows[start : start + _PIECE]]
        counts.append(sparse.csr_matrix(np.stack([run.question.counts for run in runs])))
        for name in names:
            columns[name] += [BLOCKS[name].compute(run) for run in runs]
    return FeatureRows(sparse.vstack(counts).tocsr(), {name: np.stack(block) for name, block in columns.items()})


def featurise(rows: Sequence[GradedRow], mode: Mode) -> FeatureRows:
    """Compute the features of one gate. Raises InvalidRequestError if a row lacks a block that the gate needs."""
    blocks = blocks_of_all(rows)
    if mode == "opening" and "opening" not in blocks:
        raise InvalidRequestError("Gate 2 needs token signals: add the columns logprobs, entropies and margins.")
    if mode == "cascade" and "checks" not in blocks:
        raise InvalidRequestError("Gate 3 needs the weak tier's answers: add the column weak_response.")
    return read_rows(rows, [name for name in GATE_BLOCKS[mode] if name in blocks])


def remembered(view: RunView) -> Features:
    """Return the features of an answer that gate 3 judged, to store as experience for a later refit."""
    run = ParsedRun.of(view)
    # Many engines report no log-probabilities of the prompt, so the block that needs them is omitted (decision 018).
    left_out = _NOT_KEPT if len(view.prompt_logprobs) else (*_NOT_KEPT, "prompt_signals")
    return {name: block.compute(run) for name, block in BLOCKS.items() if name not in left_out}, run.question.counts


def has_opening(row: GradedRow) -> bool:
    """Return whether the answer is longer than the opening that gate 2 reads. Shorter answers are left to gate 3."""
    return row.signals is not None and len(row.signals.logprobs) > OPENING_TOKENS
