"""A launched step and its result.

On a GPU the host would have nothing to do until a step's tokens are there, and the device nothing until the host has
dealt with them. So a step that is sure (`Scheduler.ahead`) is launched on the tokens of the one before it while these
are still on the device; who is scheduled when they have been read finds its row there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..types.outputs import TokenLogprob
from ..types.request_state import ScheduledRequest
from ..types.sampling_row import RowOf, SamplingRow
from .host_device_copy import HostCopy, to_device
from .sampler import log_probabilities, sample


@dataclass(slots=True)  # one is made in every step, and frozen ones take longer
class LaunchedStep:
    """A step whose results may not be computed yet."""

    batch: Sequence[ScheduledRequest]
    # (rows,) int64: a token for each row of `batch`.
    sampled: Tensor
    # How the rows are sampled.
    rows: Sequence[SamplingRow]
    # (rows, vocab) float32, until the next launch; None of a step that was launched ahead.
    logits: Tensor | None
    _copy: HostCopy = field(init=False)

    def __post_init__(self) -> None:
        self._copy = HostCopy(self.sampled)

    def read(self) -> list[int]:
        """The token of each row. Waits for this step only."""
        return self._copy.tolist()

    @property
    def is_reliable(self) -> bool:
        """Whether all are plain decodes, and the next token of none depends on what this one is but by its logits."""
        return all(item.state.decode is item and not item.state.edits_follow for item in self.batch)

    def of(self, batch: Sequence[ScheduledRequest]) -> LaunchedStep | None:
        """The same step for a `batch` that was scheduled meanwhile; None if that has others in it, or other work.

        Whoever has left since was computed in vain.
        """
        if batch == self.batch and self.is_reliable:
            return self
        places = {item: row for row, item in enumerate(self.batch) if item.state.decode is item}
        rows = [places.get(item) for item in batch]
        kept = [row for row in rows if row is not None]
        if not kept or len(kept) < len(rows):
            return None
        sampled = self.sampled[to_device(torch.tensor(kept), self.sampled.device)]
        return LaunchedStep(batch, sampled, [self.rows[row] for row in found], None)


class StepResult:
    """The tokens of `launched`, which this waits for. Log-probabilities are computed lazily, for all rows at once."""

    def __init__(self, launched: LaunchedStep, row_of: RowOf) -> None:
        self.tokens = launched.read()
        self._launched, self._row_of = launched, row_of
        self._scores: dict[int, TokenLogprob] | None = None

    def another(self, item: ScheduledRequest, row: int) -> int:
        return sample(self.logits(row, 1), [self._row_of(item, 0)])[0]

    def logprobs(self, row: int, tokens: Sequence[int], num_top: int) -> tuple[TokenLogprob, ...]:
        rows = range(row, row + len(tokens))
        if any(self.tokens[at] != token for at, token in zip(rows, tokens, strict=True)):  # a fork's own token
            return tuple(log_probabilities(self.logits(row, len(tokens)), tokens, num_top))
        if self._scores is None:
            self._scores = self._look_up()
        scores = (self._scores[at] for at in rows)
        return tuple(TokenLogprob(score.logprob, score.top[:num_top]) for score in scores)

    def logits(self, row: int, num_rows: int) -> Tensor:
        return self._all_logits[row : row + num_rows]

    @property
    def _all_logits(self) -> Tensor:
        logits = self._launched.logits
        assert logits is not None, "a step launched ahead keeps no logits"
        return logits

    def _look_up(self) -> dict[int, TokenLogprob]:
        rows = self._launched.rows
        wanted = {at: row.params.logprobs for at, row in enumerate(rows) if row.params.logprobs is not None}
        logits = self._all_logits
        if len(wanted) < len(logits):
            logits = logits[to_device(torch.tensor(list(wanted)), logits.device)]
        scores = log_probabilities(logits, [self.tokens[at] for at in wanted], max(wanted.values()))
        return dict(zip(wanted, scores, strict=True))
