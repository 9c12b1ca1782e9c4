"""A request's life in the engine: how far it got, and its share of a step. No torch here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from .acceptance import Acceptance
from .ngram_index import NgramIndex
from .outputs import PromptLogprob, RequestStats
from .prediction import PredictionCursor
from .prefix_hashes import PrefixHashes
from .request import GenerationRequest

if TYPE_CHECKING:
    from ....text.grammars.state import GrammarState
    from ....text.logit_edits import LogitEditor
    from .pooling import MeanPool


@dataclass(slots=True, eq=False)
class DraftRecord:
    """What drafting for one answer has come to."""

    proposed: int = 0
    """Tokens."""
    accepted: int = 0
    """Tokens."""
    acceptance: dict[str, Acceptance] = field(default_factory=dict[str, Acceptance])
    """By drafter name."""
    ngrams: NgramIndex = field(default_factory=NgramIndex)
    """Where the n-grams of the answer's text are, for the n-gram drafter."""


@dataclass(slots=True, eq=False)
class RequestState:
    """One answer of a request inside the engine.

    Every step brings `num_computed_tokens` closer to the number of known tokens: that is all there is to scheduling.
    """

    request: GenerationRequest
    max_tokens: int
    """Tokens this answer may have."""
    temperature: float
    seed: int
    end_ids: frozenset[int]
    """Tokens that end the answer."""
    token_ids: list[int]
    """Known tokens: the prompt, then what was generated."""
    prediction: PredictionCursor
    """Where the answer stands in the request's prediction."""
    pool: MeanPool | None = None
    """Gathers the embedding, where one is wanted."""
    arrived: float = field(default_factory=time.monotonic)
    """`time.monotonic` seconds."""
    order: float = 0.0
    """Place among all requests, lowest first; the scheduler sets it once."""
    index: int = 0
    """Which of the request's answers."""
    unforked: int = 0
    """Answers that are still to branch off behind the prompt."""
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list[PromptLogprob])
    grammar: GrammarState | None = None
    """Where the answer stands in the request's constraint."""
    block_table: list[int] = field(default_factory=list[int])
    """KV blocks that hold the computed tokens."""
    num_computed_tokens: int = 0
    """Leading known tokens whose keys and values are in the cache."""
    num_own_slots: int = 0
    """Tokens that fit into the blocks before one that is shared would be written to."""
    num_draft_computed_tokens: int = 0
    """The same as `num_computed_tokens`, of the draft model."""
    num_registered_blocks: int = 0
    """Full blocks that the prefix cache knows."""
    num_drafted_blocks: int = 0
    num_cached_tokens: int = 0
    """Of the prompt, found in the prefix cache."""
    num_preemptions: int = 0
    first_token_at: float | None = None
    """`time.monotonic` seconds."""
    drafts: DraftRecord = field(init=False, default_factory=DraftRecord)
    decode: ScheduledRequest | None = field(init=False, default=None)
    """Its share of the next step, where that is sure to be a plain decode (`plain_decodes`)."""
    prefix: PrefixHashes = field(init=False)
    request_id: str = field(init=False)
    editor: LogitEditor | None = field(init=False, default=None)
    """Changes its logits; made with the first row that is sampled. Every fork makes its own."""
    edits: bool = field(init=False)
    """Its logits may be changed."""
    edits_follow: bool = field(init=False)
    """The changes depend on the answer so far."""
    last_position: int = field(init=False)
    """Of the last token that it may generate."""

    def __post_init__(self) -> None:
        self.prefix = PrefixHashes(self.request.cache_salt)
        self.request_id = self.request.request_id
        self.edits, self.edits_follow = self.request.params.edits, self.request.params.edits_follow
        self.last_position = len(self.request.prompt_ids) + self.max_tokens - 1

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
            ttft_s=(self.first_token_at or time.monotonic()) - self.arrived,
        )


class ScheduledRequest(msgspec.Struct, eq=False):
    """One request's share of a step. What it says of the tokens holds until the request has got the step's result."""

    state: RequestState
    num_tokens: int
    """Known tokens to compute, from `start` on."""
    draft_ids: list[int] = []
    """Tokens to verify behind these."""
    drafter: str | None = None
    """Name of the drafter that proposes `draft_ids`; None where they are the request's prediction."""
    num_drafts: int = 0
    """Tokens granted to the drafter."""
    draft_ends: bool = False
    """The drafter holds that the answer ends behind `draft_ids`."""

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
