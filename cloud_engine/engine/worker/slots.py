"""The sequences of a worker, one per slot, in arrays with a row per slot: a step handles all of them at once."""

# torch leaves `from_numpy` untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.attention.block_tables import BlockTables
from ....kernels.attention.ragged_batch import Ints, RaggedBatch
from ....text.logit_edits import LogitEditor, LogitEdits
from ..step import NewSequence
from ..types.draft_record import NgramIndex
from .sampler import OPTIONS, SamplingRows, packed_options

#: Needs of a sequence beyond plain sampling: an embedding, grammar masks, logit edits, log-probabilities of the prompt,
#: and those of new tokens.
EMBEDDED, CONSTRAINED, EDITED, SCORED, REPORTED = (1 << bit for bit in range(5))


class Slots:
    """The sequences of all slots."""

    def __init__(self, tables: BlockTables, block_size: int) -> None:
        num_slots = len(tables.host)
        self.tables, self.block_size = tables, block_size
        self.states: dict[int, SlotState] = {}
        # Known tokens of each slot, followed by the draft tokens of the last launched step.
        self.tokens = np.zeros((num_slots, tables.width * block_size), np.int32)
        self.num_known = np.zeros(num_slots, np.int64)
        # Leading tokens whose keys and values launched steps compute, as if all drafts were accepted.
        self.num_computed = np.zeros(num_slots, np.int64)
        self.options = np.zeros((OPTIONS, num_slots), np.int64)
        # Sums of the `EMBEDDED` ... `REPORTED` that apply to each sequence.
        self.needs = np.zeros(num_slots, np.uint8)
        self.all_needs = 0
        # Draft tokens of the last launched step, by slot.
        self.drafts: Mapping[int, list[int]] = {}

    def begin(self, sequence: NewSequence) -> None:
        """Put a new sequence into its slot, except its block table."""
        slot, number = sequence.slot, len(sequence.token_ids)
        self.tokens[slot, :number], self.num_known[slot] = sequence.token_ids, number
        self.num_computed[slot] = sequence.num_computed_tokens
        self.options[:, slot] = packed_options([sequence.params], [sequence.seed])[:, 0]
        self.states[slot] = state = SlotState(self, sequence)
        self.needs[slot] = (
            EMBEDDED * sequence.embed
            + CONSTRAINED * sequence.is_constrained
            + EDITED * (state.editor is not None)
            + SCORED * (sequence.num_scored_tokens is not None)
            + REPORTED * (sequence.params.logprobs is not None)
        )
        self.all_needs |= int(self.needs[slot])

    def end(self, slots: Sequence[int]) -> None:
        """Remove the sequences in these slots."""
        for slot in slots:
            del self.states[slot]
        self.needs[slots] = 0
        self.all_needs = int(np.bitwise_or.reduce(self.needs))

    def batch(self, slots: Ints, start: Ints, rows: Ints) -> RaggedBatch:
        """Return the batch that computes `rows` tokens of each slot, from position `start` on."""
        return RaggedBatch.in_tables(start, rows, slots * self.tables.width, self.tables, self.block_size)

    def with_need(self, need: int, slots: Ints) -> list[tuple[int, SlotState]]:
        """Return the sequences of `slots` that have a need, with their indices in `slots`."""
        if not self.all_needs & need:
            return []
        return [(at, self.states[int(slots[at])]) for at in np.flatnonzero(self.needs[slots] & need).tolist()]


@dataclass(slots=True, eq=False)
class SlotState:
    """One sequence of `Slots`, with its state that no array holds."""

    slots: Slots
    sequence: NewSequence
    num_draft_computed_tokens: int = field(init=False)
    # Prompt tokens after the first that have log-probabilities.
    num_scored_tokens: int = field(init=False)
    # Sum of the hidden states (hidden_size,) float32, if the sequence is embedded.
    hidden_sum: Tensor | None = None
    # Logit edits of the sampling parameters; None if they edit nothing.
    editor: LogitEditor | None = field(init=False)
    # N-grams of `token_ids`, for prompt lookup.
    ngrams: NgramIndex = field(default_factory=NgramIndex)
    # Known tokens to compute in the step to launch.
    num_tokens: int = 1
    # Drafter to run in the step to launch, and the number of tokens that it may propose.
    drafter: str | None = None
    num_drafts: int = 0
    # Draft tokens to verify, and whether the drafter predicts that the answer ends after them.
    draft_ids: list[int] = field(default_factory=list[int])
    draft_ends: bool = False

    def __post_init__(self) -> None:
        new = self.sequence
        self.num_draft_computed_tokens = new.num_draft_computed_tokens
        self.num_scored_tokens = new.num_scored_tokens or 0
        prompt = new.token_ids[: new.num_prompt_tokens]
        self.editor = LogitEditor(new.params, prompt, new.end_ids) if new.params.edits else None

    @property
    def num_known_tokens(self) -> int:
        return int(self.slots.num_known[self.sequence.slot])

    @property
    def num_computed_tokens(self) -> int:
        return int(self.slots.num_computed[self.sequence.slot])

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The known tokens, as a view."""
        return self.slots.tokens[self.sequence.slot, : self.num_known_tokens]

    @property
    def unread_drafts(self) -> list[int]:
        """Draft tokens of the last launched step."""
        return self.slots.drafts.get(self.sequence.slot, [])

    @property
    def num_generated_tokens(self) -> int:
        return self.num_known_tokens - self.sequence.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Maximum number of tokens that the unread step may add; 0 if it adds none."""
        return max(0, self.num_computed_tokens + 1 - self.num_known_tokens)

    @property
    def is_caught_up(self) -> bool:
        """Return whether the step to launch computes the last known token."""
        return self.num_computed_tokens + self.num_tokens >= self.num_known_tokens

    def num_prompt_scores(self, start: int, end: int) -> int:
        """Number of rows of a step over the positions from `start` to `end` that score prompt tokens."""
        return max(0, min(end, self.sequence.num_prompt_tokens - 1) - max(start, self.num_scored_tokens))

    def add_hidden(self, hidden: Tensor, start: int) -> None:
        """Add the hidden states (tokens, hidden_size) from position `start` on. Position 0 resets the sum."""
        total = hidden.to(torch.float32).sum(dim=0)
        self.hidden_sum = total if self.hidden_sum is None or start == 0 else self.hidden_sum + total

    def embedding(self) -> Tensor:
        """Return the mean hidden state, scaled to length 1, which makes the number of tokens irrelevant."""
        assert self.hidden_sum is not None, "no hidden states were added"
        return torch.nn.functional.normalize(self.hidden_sum, dim=0)

    def edits(self, draft_ids: Sequence[int]) -> LogitEdits | None:
        """Return the logit edits for the token after `draft_ids`."""
        if self.editor is None:
            return None
        new = self.token_ids[self.sequence.num_prompt_tokens + self.editor.num_tokens :]
        if len(new):
            self.editor.extend(new.tolist())
        return self.editor.edits(draft_ids)


#: Returns the sampling parameters of the token after the `draft_ids` of each sequence (`Worker.launch`).
RowsOf = Callable[[Sequence[SlotState]], SamplingRows]
