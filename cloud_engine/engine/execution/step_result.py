"""The result of a finished step: its tokens, and log-probabilities or logits on request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..types.outputs import TokenLogprob
from ..types.request_state import ScheduledRequest
from .host_device_copy import to_device
from .launched_step import LaunchedStep
from .sampler import log_probabilities, sample

if TYPE_CHECKING:
    from ..types.sampling_row import RowOf


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
