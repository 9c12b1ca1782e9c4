"""A request's life in the engine: how far it got, and its share of a step. No torch here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from ....text.repetition import INTERVAL, WINDOW, next_check, repeats
from .acceptance import Acceptance
from .ngram_index import NgramIndex
from .outputs import PromptLogprob, RequestStats
from .prediction import PredictionCursor
from .prefix_hashes import PrefixHashes
from .request import GenerationRequest

if TYPE_CHECKING:
    from ....protocol.sampling import ResolvedParams
    from ....text.grammars.state import GrammarState
    from ....text.logit_edits import LogitEditor
    from .pooling import MeanPool


@dataclass(slots=True, eq=False)
class DraftRecord:
    """The record of drafting for one answer."""

    # Tokens.
    proposed: int = 0
    # Tokens.
    accepted: int = 0
    # By drafter name.
    acceptance: dict[str, Acceptance] = field(default_factory=dict[str, Acceptance])
    # Where the n-grams of the answer's text are, for the n-gram drafter.
    ngrams: NgramIndex = field(default_factory=NgramIndex)


@dataclass(slots=True, eq=False)
class RequestState:
    """One answer of a request inside the engine.

    Every step brings `num_computed_tokens` closer to the number of known tokens: that is all there is to scheduling.
    """

    request: GenerationRequest
    # Tokens this answer may have.
    max_tokens: int
    # How its tokens are sampled.
    params: ResolvedParams
    seed: int
    # Tokens that end the answer.
    end_ids: frozenset[int]
    # Known tokens: the prompt, then what was generated.
    token_ids: list[int]
    # Where the answer stands in the request's prediction.
    prediction: PredictionCursor
    # Gathers the embedding, where one is wanted.
    pool: MeanPool | None = None
    # `time.monotonic` seconds.
    arrived: float = field(default_factory=time.monotonic)
    # Place among all requests, lowest first; the scheduler sets it once.
    order: float = 0.0
    # Which of the request's answers.
    index: int = 0
    # Answers that are still to branch off behind the prompt.
    unforked: int = 0
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list[PromptLogprob])
    # Where the answer stands in the request's constraint.
    grammar: GrammarState | None = None
    # KV blocks that hold the computed tokens.
    block_table: list[int] = field(default_factory=list[int])
    # Leading known tokens whose keys and values are in the cache.
    num_computed_tokens: int = 0
    # Tokens that fit into the blocks before one that is shared would be written to.
    num_own_slots: int = 0
    # The same as `num_computed_tokens`, of the draft model.
    num_draft_computed_tokens: int = 0
    # Full blocks that the prefix cache knows.
    num_registered_blocks: int = 0
    num_drafted_blocks: int = 0
    # Of the prompt, found in the prefix cache.
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    # Some of its tokens have come.
    has_begun: bool = False
    drafts: DraftRecord = field(init=False, default_factory=DraftRecord)
    # Its share of the next step, where that is sure to be a plain decode (`plain_decodes`).
    decode: ScheduledRequest | None = field(init=False, default=None)
    prefix: PrefixHashes = field(init=False)
    request_id: str = field(init=False)
    # Changes its logits; made with the first row that is sampled. Every fork makes its own.
    editor: LogitEditor | None = field(init=False, default=None)
    # Its logits may be changed.
    edits: bool = field(init=False)
    # The changes depend on the answer so far.
    edits_follow: bool = field(init=False)
    # Of the last token that it may generate.
    last_position: int = field(init=False)
    # It ends where it repeats itself.
    detects_repetition: bool = field(init=False)

    def __post_init__(self) -> None:
        self.prefix = PrefixHashes(self.request.cache_salt)
        self.request_id = self.request.request_id
        self.edits, self.edits_follow = self.params.edits, self.params.edits_follow
        self.last_position = len(self.request.prompt_ids) + self.max_tokens - 1
        self.detects_repetition = self.params.detects_repetition and self.request.constraint is None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose keys and values are not in the cache: one of an answer that is only decoded."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens this request may still generate."""
        return self.max_tokens - self.num_generated_tokens

    @property
    def num_skippable_tokens(self) -> int:
        """Known tokens that a cached prefix may spare: not the last, nor one whose logits tell of the prompt."""
        if not self.request.uses_prefix_cache:
            return 0
        scored, to_score = len(self.prompt_logprobs), self.num_prompt_tokens - 1
        wanted = self.request.params.prompt_logprobs is not None
        return scored if wanted and scored < to_score else len(self.token_ids) - 1

    @property
    def next_check(self) -> int:
        """Position of the token behind which the answer is next looked at for repetition."""
        if not self.detects_repetition:
            return self.last_position
        return self.num_prompt_tokens + next_check(self.num_generated_tokens) - 1

    def until_repetition(self, new: Sequence[int]) -> int:
        """The number of these tokens before the answer ends because it repeats itself; 0 if it does not."""
        known = self.num_generated_tokens
        if self.detects_repetition:
            for length in range(next_check(known), known + len(new) + 1, INTERVAL):
                answer = [*self.token_ids[-WINDOW:], *new[: length - known]]
                if length >= self.params.min_tokens and repeats(answer, length):
                    return length - known
        return 0

    def stats(self) -> RequestStats:
        accepted = self.prediction.num_accepted
        return RequestStats(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            completion_tokens=self.num_generated_tokens,
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=len(self.request.draft_ids) - accepted,
            draft_proposed=self.drafts.proposed,
            draft_accepted=self.drafts.accepted,
        )


class ScheduledRequest(msgspec.Struct, eq=False):
    """One request's share of a step. What it says of the tokens holds until the request has got the step's result."""

    state: RequestState
    # Known tokens to compute, from `start` on.
    num_tokens: int
    # Tokens to verify behind these.
    draft_ids: list[int] = []
    # Name of the drafter that proposes `draft_ids`; None where they are the request's prediction.
    drafter: str | None = None
    # Tokens granted to the drafter.
    num_drafts: int = 0
    # The drafter holds that the answer ends behind `draft_ids`.
    draft_ends: bool = False

    @property
    def start(self) -> int:
        """Position of the first of the known tokens."""
        return self.state.num_computed_tokens

    @property
    def is_caught_up(self) -> bool:
        """Whether this step reaches the last known token, and therefore yields a new one."""
        return self.start + self.num_tokens == len(self.state.token_ids)

    @property
    def num_samples(self) -> int:
        """Rows to sample: one behind the last known token and one behind each draft token; none for an embedding."""
        return 1 + len(self.draft_ids) if self.is_caught_up and not self.state.request.embed else 0

    @property
    def num_prompt_scores(self) -> int:
        """Rows before those to sample whose logits tell how likely the next token of the prompt was."""
        state = self.state
        if state.request.params.prompt_logprobs is None:
            return 0
        first = max(self.start, len(state.prompt_logprobs))
        return max(0, min(self.start + self.num_tokens, state.num_prompt_tokens - 1) - first)
