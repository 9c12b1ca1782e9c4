"""The worker's state of one sequence, and the sequence's part of the current step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ....text.logit_edits import LogitEditor, LogitEdits
from ..step import NewSequence
from .draft_record import NgramIndex

if TYPE_CHECKING:
    from .pooling import MeanPool


@dataclass(slots=True, eq=False)
class SlotState:
    """A sequence in a slot of the worker. Each launched step advances `num_computed_tokens` towards the known tokens.

    Until the step is read, `num_computed_tokens` assumes that all of its drafts are accepted.
    """

    sequence: NewSequence
    token_ids: list[int] = field(init=False)
    block_table: array[int] = field(init=False)
    num_computed_tokens: int = field(init=False)
    num_draft_computed_tokens: int = field(init=False)
    # Prompt tokens after the first that have log-probabilities.
    num_scored_tokens: int = field(init=False)
    # Sum of the hidden states, if the sequence is embedded.
    pool: MeanPool | None = None
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
    # Draft tokens of the last launched step.
    unread_drafts: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        new = self.sequence
        self.token_ids, self.block_table = list(new.token_ids), array("q", new.block_table)
        self.num_computed_tokens = new.num_computed_tokens
        self.num_draft_computed_tokens = new.num_draft_computed_tokens
        self.num_scored_tokens = new.num_scored_tokens or 0
        prompt = new.token_ids[: new.num_prompt_tokens]
        self.editor = LogitEditor(new.params, prompt, new.end_ids) if new.params.edits else None

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.sequence.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Maximum number of tokens that the unread step may add; 0 if it adds none."""
        return max(0, self.num_computed_tokens + 1 - len(self.token_ids))

    @property
    def is_caught_up(self) -> bool:
        """Return whether the step to launch computes the last known token."""
        return self.num_computed_tokens + self.num_tokens >= len(self.token_ids)

    @property
    def num_samples(self) -> int:
        """Number of rows to sample: one for the last known token and one for each draft token; 0 for embeddings."""
        return 1 + len(self.draft_ids) if self.is_caught_up and not self.sequence.embed else 0

    @property
    def num_prompt_scores(self) -> int:
        """Number of rows, before the sampled rows, that give log-probabilities of prompt tokens."""
        if self.sequence.num_scored_tokens is None:
            return 0
        first, end = max(self.num_computed_tokens, self.num_scored_tokens), self.num_computed_tokens + self.num_tokens
        return max(0, min(end, self.sequence.num_prompt_tokens - 1) - first)

    def edits(self, draft_ids: Sequence[int]) -> LogitEdits | None:
        """Return the logit edits for the token after `draft_ids`."""
        if self.editor is None:
            return None
        new = self.token_ids[self.sequence.num_prompt_tokens + self.editor.num_tokens :]
        if new:
            self.editor.extend(new)
        return self.editor.edits(draft_ids)
