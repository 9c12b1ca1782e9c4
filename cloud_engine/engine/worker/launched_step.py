"""Steps whose results are unread, and the inputs that the next step takes from such a step on the device.

A draft is accepted if the model samples the same token. So the device can tell from the sampled tokens alone where each
sequence continues: after its accepted drafts, with the token that was sampled there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..types.slot_state import SlotState
from .host_device_copy import HostCopy, to_device
from .prompt_logprobs import UnreadPromptScores
from .sampler import UnreadLogprobs


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


@dataclass(slots=True, eq=False)
class LaunchedPart:
    """The part of one sequence in a launched step, unless the sequence only decodes."""

    state: SlotState
    # Draft tokens in the forward pass.
    draft_ids: list[int]
    # Rows to sample: fewer than in the forward pass if a grammar forbids drafts.
    num_samples: int
    # Index of the first sampled row.
    first_row: int = 0


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step whose result is unread."""

    # Leading sequences, which only decode: one row each.
    decodes: Sequence[SlotState]
    # All other sequences.
    parts: list[LaunchedPart]
    # (rows, vocab) float32, valid until the next launch.
    logits: Tensor
    prompt_scores: dict[int, UnreadPromptScores] = field(default_factory=dict[int, UnreadPromptScores])
    embeddings: dict[int, HostCopy] = field(default_factory=dict[int, HostCopy])
    logprobs: UnreadLogprobs | None = None
    # (rows,) int64: the sampled token of each row.
    sampled: Tensor = field(init=False)
    _copy: HostCopy = field(init=False)

    def sampled_by(self, sampled: Tensor) -> None:
        """Set the sampled tokens, and begin to copy them to the host."""
        self.sampled, self._copy = sampled, HostCopy(sampled)

    def read(self) -> list[int]:
        """Return the token of each row. Waits for this step only."""
        return self._copy.tolist()

    def unread(self, batch: Sequence[SlotState]) -> UnreadInputs | None:
        """Return the inputs of the next step's `batch` that depend on this step, which is sampled but not read."""
        places = {state: (row, 0) for row, state in enumerate(self.decodes)}
        places |= {part.state: (part.first_row, len(part.draft_ids)) for part in self.parts if part.num_samples}
        sequences = [index for index, state in enumerate(batch) if state in places]
        if not sequences:
            return None
        device = self.sampled.device
        first_rows, num_drafts = zip(*(places[batch[index]] for index in sequences), strict=True)
        rows = to_device(torch.tensor(first_rows), device)
        if not any(num_drafts):
            return UnreadInputs(sequences, self.sampled[rows])
        accepted = self._num_accepted()[rows]
        return UnreadInputs(
            sequences, self.sampled[rows + accepted], to_device(torch.tensor(num_drafts), device) - accepted
        )

    def _num_accepted(self) -> Tensor:
        """Return (rows,) int64: how many of the drafts from each row on equal the tokens sampled there."""
        expected = torch.full((len(self.sampled),), -1, dtype=torch.int64)  # a row without a draft accepts nothing
        for part in self.parts:
            if part.num_samples > 1:
                last = part.first_row + part.num_samples - 1
                expected[part.first_row : last] = torch.tensor(part.draft_ids[: part.num_samples - 1])
        rejects = to_device(expected, self.sampled.device) != self.sampled
        index = torch.arange(len(self.sampled), device=self.sampled.device)
        # The first rejecting row at or after each row: a reversed running minimum.
        first = torch.where(rejects, index, len(self.sampled)).flip(0).cummin(0).values.flip(0)
        return first - index
