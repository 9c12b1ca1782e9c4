"""One request's life in the engine: what was asked, how far it got, what it produced."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from ....protocol.sampling import SamplingParams
from ....protocol.structured import Constraint
from ..kv.prefix_cache import PrefixHashes
from ..speculation.draft_length import Acceptance
from .ngram_index import NgramIndex
from .prediction import PredictionCursor

if TYPE_CHECKING:
    from ....text.grammar_state import GrammarState
    from ....text.logit_edits import LogitEditor
    from .pooling import MeanPool
    from .scheduled_request import ScheduledRequest

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search instead of sampling, with `width` beams: see `beam_search` for the rest."""

    width: int
    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Tokens in, tokens out.

    `draft_ids` are the tokens of the request's `prediction`, to be verified as a draft. `n`: answers wanted; the prompt
    is computed once, and the answers share its blocks until they write to them. With a `beam` they are the `n` best of
    its search, which goes without drafts, and come out at its end. `priority`: lower goes first
    (policy "priority"). `cache_salt`: only requests with the same one share cached prefixes, so that nobody can learn
    from timings what others have asked. `constraint`: what every answer must look like. `embed`: generate nothing, the
    prompt's embedding is wanted. `streamed`: somebody reads along; without, an `EngineClient` may bring tokens some at
    a time, and the last of what an aborted request has generated not at all.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    draft_ids: list[int] = field(default_factory=list[int])
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    beam: BeamParams | None = None
    constraint: Constraint | None = None
    embed: bool = False
    streamed: bool = True

    @property
    def num_branches(self) -> int:
        """Answers in the making at the same time."""
        return self.n if self.beam is None else self.beam.width

    @property
    def uses_prefix_cache(self) -> bool:
        """An embedding needs the hidden states of every token, and the cache has none: it neither looks nor adds."""
        return not self.embed


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (nats) of the chosen token and `(token_id, logprob)` of the most likely ones, from raw logits."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprob(TokenLogprob):
    """The same of a token of the prompt. `rank`: 1 for the most likely of the vocabulary at its place."""

    rank: int = 1


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What a finished request cost. Prediction counts are about `draft_ids`, draft counts about the drafters.

    `rejected_prediction_tokens` holds those that were refuted and those that were never reached. `ttft_s`: seconds from
    arrival to the first token.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    draft_proposed: int
    draft_accepted: int
    ttft_s: float


class TokenOutput(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """New tokens of one answer after one step. The end-of-sequence token is not among them.

    `index`: which of the request's `n` answers. `logprobs` has one entry per token if the request asked for any.
    `stats` comes with `finish_reason`, and `error`, saying why this answer could not go on, with the reason "error".
    `prompt_logprobs`, if asked for, come with the first output of the first answer: one entry per prompt token but the
    first, of which there is nothing to say. `cached_tokens`: of the prompt, found in the cache; None where that has
    been said before. `embedding`
    (hidden_size,) comes with `finish_reason`, if one was asked for.
    """

    request_id: str
    token_ids: list[int]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    index: int = 0
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    error: str | None = None
    cached_tokens: int | None = None
    embedding: tuple[float, ...] = ()


@dataclass(slots=True, eq=False)
class DraftRecord:
    """What drafting for one answer has come to: tokens proposed and accepted, and by drafter how likely they are."""

    proposed: int = 0
    accepted: int = 0
    acceptance: dict[str, Acceptance] = field(default_factory=dict[str, Acceptance])
    ngrams: NgramIndex = field(default_factory=NgramIndex)


@dataclass(slots=True, eq=False)
class RequestState:
    """A request inside the engine.

    `token_ids` are the known tokens (prompt, then generated). The first `num_computed_tokens` of them have their keys
    and values in the blocks of `block_table`; the draft model's are there for the first `num_draft_computed_tokens`.
    Up to `num_own_slots` tokens fit into these blocks without any of them being shared where it is to be written next.
    Every step brings these counts closer to the number of known tokens, and that is all there is to scheduling.
    `order` is the request's place among all others, lowest first; the scheduler sets it once. `index` says which of the
    request's answers this is, and `unforked` how many more are to branch off behind the prompt; each of these has its
    own `drafts`. `grammar`: where the answer stands in the request's constraint, if it has one. `pool` gathers the
    embedding, where one is wanted. `decode`: the request's share of the next step, where that is sure to be a plain
    decode (see the module of this name). `edits`: whether its logits may be changed; `editor` knows how, from the first
    row that is sampled on, and every fork makes its own. `edits_follow`: whether the changes depend on the answer so
    far. `last_position`: of the last token that it may generate.
    """

    request: GenerationRequest
    max_tokens: int
    temperature: float
    seed: int
    end_ids: frozenset[int]
    token_ids: list[int]
    prediction: PredictionCursor
    pool: MeanPool | None = None
    arrived: float = field(default_factory=time.monotonic)
    order: float = 0.0
    index: int = 0
    unforked: int = 0
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list[PromptLogprob])
    grammar: GrammarState | None = None
    block_table: list[int] = field(default_factory=list[int])
    num_computed_tokens: int = 0
    num_own_slots: int = 0
    num_draft_computed_tokens: int = 0
    num_registered_blocks: int = 0
    num_drafted_blocks: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_token_at: float | None = None
    drafts: DraftRecord = field(init=False, default_factory=DraftRecord)
    decode: ScheduledRequest | None = field(init=False, default=None)
    prefix: PrefixHashes = field(init=False)
    request_id: str = field(init=False)
    editor: LogitEditor | None = field(init=False, default=None)
    edits: bool = field(init=False)
    edits_follow: bool = field(init=False)
    last_position: int = field(init=False)

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
