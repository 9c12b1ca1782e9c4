"""The state of a request in the engine, and its part of a step. Imports no torch."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from ....text.repetition import INTERVAL, WINDOW, next_check, repeats
from .draft_record import DraftRecord
from .outputs import PromptLogprob, RequestStats
from .prediction import PredictionCursor
from .request import GenerationRequest

if TYPE_CHECKING:
    from ....protocol.sampling import ResolvedParams
    from ....text.grammars.state import GrammarState


_MAX_SCORED_TOKENS = 512  # tokens of a request whose log-probabilities one step computes, each from a row of logits


@dataclass(slots=True, eq=False)
class UnhashedBlocks:
    """Blocks of `token_ids`, except the first, registered in the pool under placeholder `keys` instead of hashes."""

    token_ids: Sequence[int]
    keys: list[int] = field(default_factory=list[int])


@dataclass(slots=True, eq=False)
class PrefixHashes:
    """Lazily computed hashes of a request's full blocks. Each hash covers the previous hash and the block's tokens.

    Equal hashes (BLAKE2b) mean equal prefixes and salts. `unhashed` holds the blocks without hashes while no other
    request shares the first block.
    """

    salt: str
    hashes: list[bytes] = field(default_factory=list[bytes])
    unhashed: UnhashedBlocks | None = None

    def extend(self, token_ids: Sequence[int], num_blocks: int, block_size: int) -> None:
        """Hash the first `num_blocks` blocks of `token_ids`, except blocks that already have a hash."""
        tokens = array("I", token_ids[len(self.hashes) * block_size : num_blocks * block_size])
        parent = self.hashes[-1] if self.hashes else self.salt.encode()
        data, width = tokens.tobytes(), block_size * tokens.itemsize
        for start in range(0, len(data), width):
            parent = hashlib.blake2b(parent + data[start : start + width], digest_size=32).digest()
            self.hashes.append(parent)


@dataclass(slots=True, eq=False)
class RequestState:
    """One answer of a request inside the engine.

    Each planned step advances `num_computed_tokens` towards the number of known tokens; there is no other phase. While
    the result of a step is unread, `num_computed_tokens` assumes that all of the step's drafts are accepted.
    """

    request: GenerationRequest
    max_tokens: int
    params: ResolvedParams
    seed: int
    end_ids: frozenset[int]
    # Known tokens: the prompt and the tokens generated so far.
    token_ids: list[int]
    prediction: PredictionCursor
    # Arrival time, in `time.monotonic` seconds.
    arrived: float = field(default_factory=time.monotonic)
    # Sort key among all requests, lowest first; the scheduler sets it once.
    order: float = 0.0
    # Index among the request's answers.
    index: int = 0
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list[PromptLogprob])
    # Grammar of the request's constraint, advanced by the answer so far.
    grammar: GrammarState | None = None
    # KV blocks that hold the computed tokens.
    block_table: list[int] = field(default_factory=list[int])
    # Leading tokens whose keys and values planned steps compute.
    num_computed_tokens: int = 0
    # Token slots in the block table.
    num_slots: int = 0
    # Leading known tokens whose keys and values are in the draft model's cache.
    num_draft_computed_tokens: int = 0
    # Draft tokens of the last planned step, unless the answer only decodes.
    unread_drafts: list[int] = field(default_factory=list[int])
    num_registered_blocks: int = 0
    num_drafted_blocks: int = 0
    # Slot in the worker; -1 until the first plan, and while preempted.
    slot: int = -1
    # Leading blocks of the block table that earlier plans named.
    num_planned_blocks: int = 0
    # Prompt tokens found in the prefix cache.
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    # Whether the answer has had its first output.
    has_begun: bool = False
    drafts: DraftRecord = field(init=False, default_factory=DraftRecord)
    # This answer's part of the next step, reused while the answer gets one token per step (`plain_decodes`).
    decode: ScheduledRequest | None = field(init=False, default=None)
    prefix: PrefixHashes = field(init=False)
    request_id: str = field(init=False)
    num_prompt_tokens: int = field(init=False)
    # Whether to report the prompt's log-probabilities: only with a request's first answer.
    scores_prompt: bool = field(init=False)
    # Largest possible position of the answer's last token.
    last_position: int = field(init=False)
    # Whether the answer ends when it repeats itself.
    detects_repetition: bool = field(init=False)

    def __post_init__(self) -> None:
        self.prefix = PrefixHashes(self.request.cache_salt)
        self.request_id = self.request.request_id
        self.num_prompt_tokens = len(self.request.prompt_ids)
        self.scores_prompt = self.request.params.prompt_logprobs is not None and self.index == 0
        self.last_position = self.num_prompt_tokens + self.max_tokens - 1
        self.detects_repetition = self.params.detects_repetition and self.request.constraint is None

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose keys and values no planned step computes; 1 while the answer only decodes."""
        return max(1, len(self.token_ids) - self.num_computed_tokens)

    @property
    def num_pending_tokens(self) -> int:
        """Maximum number of tokens that the unread step may add; 0 if it adds none."""
        return max(0, self.num_computed_tokens + 1 - len(self.token_ids))

    @property
    def num_certain_tokens(self) -> int:
        """Leading known tokens whose keys and values planned steps compute, whatever drafts are accepted."""
        return min(self.num_computed_tokens, len(self.token_ids))

    @property
    def ends_next(self) -> bool:
        """Return whether the unread step certainly completes the answer or the embedding, so that no step follows."""
        return self.num_computed_tokens >= len(self.token_ids) >= self.last_position

    @property
    def num_next_tokens(self) -> int:
        """Uncomputed tokens that one step may compute: only some while a prompt is scored, to bound its logits."""
        left = self.num_uncomputed_tokens
        return min(left, _MAX_SCORED_TOKENS) if self.scores_prompt and not self.has_begun else left

    @property
    def num_remaining_tokens(self) -> int:
        """Maximum number of tokens that this answer may still generate, unread ones included."""
        return self.max_tokens - self.num_generated_tokens

    @property
    def num_skippable_tokens(self) -> int:
        """Leading tokens that a cached prefix may replace: not the last, and none whose logits score the prompt."""
        if not self.request.uses_prefix_cache:
            return 0
        scored, to_score = len(self.prompt_logprobs), self.num_prompt_tokens - 1
        return scored if self.scores_prompt and scored < to_score else len(self.token_ids) - 1

    @property
    def next_check(self) -> int:
        """Position of the token after which the answer is next checked for repetition or length."""
        if not self.detects_repetition:
            return self.last_position
        return self.num_prompt_tokens + next_check(self.num_generated_tokens) - 1

    def until_repetition(self, new: Sequence[int]) -> int:
        """Return the number of `new` tokens until the answer ends because it repeats itself; 0 if it does not."""
        if self.detects_repetition:
            generated = self.num_generated_tokens
            for length in range(next_check(generated), generated + len(new) + 1, INTERVAL):
                answer = [*self.token_ids[-WINDOW:], *new[: length - generated]]
                if length >= self.params.min_tokens and repeats(answer, length):
                    return length - generated
        return 0

    def resume(self, token_ids: Sequence[int], cached_tokens: int) -> None:
        """Continue an answer of which the client has `token_ids`, generated before a failure of the engine."""
        self.num_cached_tokens = cached_tokens
        if not token_ids:
            return
        for token in token_ids:
            self.token_ids.append(token)
            self.prediction.advance(self.token_ids, 1, 0)
        if self.grammar is not None:
            self.grammar.advance(token_ids)
        self.has_begun, self.scores_prompt = True, False
        self.num_preemptions = 1

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
    """One answer's part of a step. Its properties are valid until the step's plan is built."""

    state: RequestState
    # Known tokens to compute, beginning at `start`.
    num_tokens: int
    # Draft tokens to verify after the known tokens.
    draft_ids: list[int] = []
    # Name of the drafter of `draft_ids`; None if they come from the request's prediction.
    drafter: str | None = None
    # Tokens that the drafter may propose.
    num_drafts: int = 0
    # Whether the drafter predicts that the answer ends after `draft_ids`.
    draft_ends: bool = False
    # Draft tokens by which the plan advanced the answer.
    num_planned_drafts: int = 0

    @property
    def start(self) -> int:
        """Position of the first known token to compute."""
        return self.state.num_computed_tokens

    @property
    def is_caught_up(self) -> bool:
        """Return whether this step computes the last known token, and therefore yields a new token."""
        return self.start + self.num_tokens >= len(self.state.token_ids)

    @property
    def num_samples(self) -> int:
        """Number of rows to sample: one for the last known token and one for each draft token; 0 for embeddings."""
        return 1 + len(self.draft_ids) if self.is_caught_up and not self.state.request.embed else 0
