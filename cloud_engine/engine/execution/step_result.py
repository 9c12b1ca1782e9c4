"""A launched step and its result.

To keep the GPU busy while the host processes a step's tokens, the next step can be launched ahead of time on tokens
that are still on the device, if its batch is known (`Scheduler.plan_ahead`). Once the tokens are read, some requests
may turn out to have ended. `LaunchedStep.of` then selects the rows of the remaining requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..types.outputs import TokenLogprob
from ..types.request_state import ScheduledRequest
from ..types.sampling_row import SamplingRow
from .host_device_copy import HostCopy, to_device
from .sampler import log_probabilities


@dataclass(slots=True)  # not frozen: every step creates one, and creating frozen instances is slower
class LaunchedStep:
    """A step whose results may still be pending on the device."""

    batch: Sequence[ScheduledRequest]
    # (rows,) int64: the sampled token of each row of `batch`.
    sampled: Tensor
    # Sampling parameters of the rows.
    rows: Sequence[SamplingRow]
    # (rows, vocab) float32, valid until the next launch; None for a step launched ahead.
    logits: Tensor | None
    _copy: HostCopy = field(init=False)

    def __post_init__(self) -> None:
        self._copy = HostCopy(self.sampled)

    def read(self) -> list[int]:
        """Return the token of each row. Waits for this step only."""
        return self._copy.tolist()

    @property
    def is_reliable(self) -> bool:
        """Return whether every row decodes one token, and no logit edit depends on tokens that are still unread."""
        return all(item.state.decode is item and not item.state.edits_follow for item in self.batch)

    def of(self, batch: Sequence[ScheduledRequest]) -> LaunchedStep | None:
        """Return this step restricted to a newly scheduled `batch`; None if `batch` needs work that this step lacks.

        Rows of requests that are not in `batch` are discarded."""
        if batch == self.batch and self.is_reliable:
            return self
        places = {item: row for row, item in enumerate(self.batch) if item.state.decode is item}
        rows = [places.get(item) for item in batch]
        present = [row for row in rows if row is not None]
        if not present or len(present) < len(rows):
            return None
        sampled = self.sampled[to_device(torch.tensor(present), self.sampled.device)]
        return LaunchedStep(batch, sampled, [self.rows[row] for row in present], None)


class StepResult:
    """The results of a launched step. The constructor waits for its tokens; log-probabilities are computed lazily."""

    def __init__(self, launched: LaunchedStep) -> None:
        self.tokens = launched.read()
        self._launched = launched
        self._scores: dict[int, TokenLogprob] | None = None

    def logprobs(self, rows: range, num_top: int) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of the tokens of `rows`, each with `num_top` top tokens."""
        if self._scores is None:
            self._scores = self._look_up()
        scores = (self._scores[row] for row in rows)
        return tuple(TokenLogprob(score.logprob, score.top[:num_top]) for score in scores)

    def _look_up(self) -> dict[int, TokenLogprob]:
        rows = self._launched.rows
        counts = {at: row.params.logprobs for at, row in enumerate(rows) if row.params.logprobs is not None}
        logits = self._launched.logits
        assert logits is not None, "a step launched ahead keeps no logits"
        if len(counts) < len(logits):
            logits = logits[to_device(torch.tensor(list(counts)), logits.device)]
        scores = log_probabilities(logits, [self.tokens[at] for at in counts], max(counts.values()))
        return dict(zip(counts, scores, strict=True))
