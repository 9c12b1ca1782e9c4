"""Steps whose results are unread, and the inputs that the next step takes from such a step on the device.

A draft is accepted if the model samples the same token. So the device can tell from the sampled tokens alone where each
sequence continues: after its accepted drafts, with the token that was sampled there.
"""

# torch leaves `from_numpy` untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.attention.ragged_batch import Ints, starts
from ....kernels.runtime.transfer import HostCopy, to_device
from ..types.outputs import PromptLogprob
from .sampler import UnreadLogprobs
from .slots import SlotState

NO_DRAFT = -1  # stands for no draft token


@dataclass(frozen=True, slots=True)
class UnreadInputs:
    """Inputs of a step that only the device knows."""

    # Sequences of the step whose first token is unread, by index in the batch.
    sequences: list[int]
    # (sequences,) int64: these tokens.
    token_ids: Tensor
    # (sequences,) int64: the numbers by which these sequences begin before their planned positions. None: all are 0.
    rejected: Tensor | None = None

    def shift(self, num_sequences: int) -> Tensor | None:
        """Return `rejected` for all sequences of the batch, or None."""
        if self.rejected is None:
            return None
        index = to_device(torch.tensor(self.sequences), self.rejected.device)
        return self.rejected.new_zeros(num_sequences).index_copy_(0, index, self.rejected)


class UnreadPromptScores:
    """Log-probabilities of prompt tokens that the device may still be computing."""

    def __init__(self, state: SlotState, logits: Tensor) -> None:
        """Look up the next prompt tokens of `state` that have no log-probabilities yet, one per row of `logits`."""
        begin = state.num_scored_tokens + 1  # the first token has no log-probability
        chosen = state.token_ids[begin : begin + len(logits)].astype(np.int64)
        tokens = to_device(torch.from_numpy(chosen), logits.device)
        state.num_scored_tokens += len(logits)
        self._scores = UnreadLogprobs(logits, tokens, state.sequence.params.prompt_logprobs or 0)
        self._ranks = HostCopy((logits > logits.gather(1, tokens[:, None])).sum(dim=-1) + 1)

    def read(self) -> list[PromptLogprob]:
        """Return the log-probabilities. Waits for this lookup only."""
        ranks: list[int] = self._ranks.tolist()
        return [
            PromptLogprob(score.logprob, score.top, rank)
            for score, rank in zip(self._scores.read(), ranks, strict=True)
        ]


def score_prompts(
    scored: Sequence[tuple[int, SlotState]], logits: Tensor, num_scores: Ints, num_samples: Ints
) -> tuple[Tensor, dict[int, UnreadPromptScores]]:
    """Look up the log-probabilities of prompt tokens in `logits` (rows, vocab), without waiting for the device.

    Each sequence of the batch has `num_scores` rows, and then `num_samples` rows. `scored`: sequences with scores, and
    their indices in the batch. Returns the rows to sample from, and the log-probabilities by slot.
    """
    if not scored:
        return logits, {}
    first = starts(num_scores + num_samples)
    scores = {
        state.sequence.slot: UnreadPromptScores(state, logits[first[at] : first[at] + num_scores[at]])
        for at, state in scored
        if num_scores[at]
    }
    ends = first + num_scores
    return torch.cat([logits[end : end + number] for end, number in zip(ends, num_samples, strict=True)]), scores


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step whose result is unread, as arrays with an entry per sequence or row to sample."""

    slots: Ints
    # Draft tokens of each sequence in the forward pass.
    num_drafts: Ints
    # Rows to sample of each sequence: fewer than in the forward pass if a grammar forbids drafts.
    num_samples: Ints
    # (rows,): the draft token after each row of the forward pass to sample; `NO_DRAFT` for a sequence's last row.
    drafts: Ints
    # (rows,): sequence of each row, and the row's number in its sequence.
    sequence: Ints
    number: Ints
    # (rows, vocab) float32, valid until the next launch.
    logits: Tensor
    prompt_scores: Mapping[int, UnreadPromptScores] = field(default_factory=dict[int, UnreadPromptScores])
    embeddings: Mapping[int, HostCopy] = field(default_factory=dict[int, HostCopy])
    logprobs: UnreadLogprobs | None = None
    # Sequences with log-probabilities: their slots and numbers of top tokens, by index in `slots`.
    reported: Mapping[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    # Whether each sequence is still in its slot.
    live: NDArray[np.bool_] = field(init=False)
    # (rows,) int64: the sampled token of each row.
    sampled: Tensor = field(init=False)
    # (rows,) int64: accepted drafts from each row on, if there are any drafts.
    _accepted: Tensor = field(init=False)
    _copy: HostCopy = field(init=False)

    def __post_init__(self) -> None:
        self.live = np.ones(len(self.slots), np.bool_)

    @property
    def first_row(self) -> Ints:
        """First sampled row of each sequence."""
        return starts(self.num_samples)

    def cut(self, allowed: Mapping[int, int]) -> None:
        """Sample only the first rows of some sequences: the number in `allowed`, by index."""
        num_samples = self.num_samples.copy()
        num_samples[list(allowed)] = list(allowed.values())
        kept = np.flatnonzero(self.number < num_samples[self.sequence])
        if len(kept) < len(self.sequence):
            self.logits = self.logits[to_device(torch.from_numpy(kept), self.logits.device)]
            self.sequence, self.number, self.drafts = self.sequence[kept], self.number[kept], self.drafts[kept]
            self.num_samples = num_samples
            self.drafts[self.number == num_samples[self.sequence] - 1] = NO_DRAFT

    def drop(self, slots: Sequence[int]) -> None:
        """Note that the sequences in these slots have ended."""
        self.live &= ~np.isin(self.slots, slots)

    def sampled_by(self, sampled: Tensor) -> None:
        """Set the sampled tokens, and begin to copy them to the host."""
        self.sampled, values = sampled, sampled
        if self.num_drafts.any():
            self._accepted = self._num_accepted()
            values = torch.stack((sampled, self._accepted))
        self._copy = HostCopy(values)

    def read(self) -> tuple[list[int], Ints | None]:
        """Return the token of each row, and the number of accepted drafts of each sequence; None if none has any.

        Waits for this step only."""
        if not self.num_drafts.any():
            return self._copy.tolist(), None
        tokens, accepted_after = self._copy.tolist()
        has_rows, accepted = self.num_samples > 0, np.zeros_like(self.num_samples)
        accepted[has_rows] = np.array(accepted_after, np.int64)[self.first_row[has_rows]]
        return tokens, accepted

    def unread(self, slots: Ints, num_slots: int) -> UnreadInputs | None:
        """Return the inputs of the next step, over `slots`, that depend on this step, which is sampled but not read."""
        has_tokens = (self.num_samples > 0) & self.live
        places = np.full(num_slots, -1)
        places[self.slots[has_tokens]] = np.flatnonzero(has_tokens)
        places = places[slots]
        sequences = np.flatnonzero(places >= 0)
        if not len(sequences):
            return None
        device, places = self.sampled.device, places[sequences]
        rows = to_device(torch.from_numpy(self.first_row[places]), device)
        num_drafts = self.num_drafts[places]
        if not num_drafts.any():
            return UnreadInputs(sequences.tolist(), self.sampled[rows])
        accepted = self._accepted[rows]
        rejected = to_device(torch.from_numpy(num_drafts), device) - accepted
        return UnreadInputs(sequences.tolist(), self.sampled[rows + accepted], rejected)

    def _num_accepted(self) -> Tensor:
        """Return (rows,) int64: how many of the drafts from each row on equal the tokens sampled there."""
        rejects = to_device(torch.from_numpy(self.drafts), self.sampled.device) != self.sampled
        index = torch.arange(len(self.sampled), device=self.sampled.device)
        # The first rejecting row at or after each row: a reversed running minimum.
        first = torch.where(rejects, index, len(self.sampled)).flip(0).cummin(0).values.flip(0)
        return first - index
