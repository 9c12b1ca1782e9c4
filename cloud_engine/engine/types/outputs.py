"""Outputs of the engine: tokens with their log-probabilities, and statistics per request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from ....protocol.responses import StopReason

FinishReason = Literal["stop", "length", "error"]


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probabilities from raw logits, in nats."""

    # Log-probability of the chosen token.
    logprob: float
    # `(token_id, logprob)` of the most likely tokens.
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprob(TokenLogprob, frozen=True):
    """Log-probabilities of a prompt token, from raw logits, in nats."""

    # Rank of the token in the vocabulary at this position; 1 is the most likely.
    rank: int = 1


@dataclass(frozen=True, slots=True)
class RequestStats:
    """The statistics of a finished request."""

    prompt_tokens: int
    # Prompt tokens found in the prefix cache.
    cached_tokens: int
    completion_tokens: int
    # Accepted tokens of the request's `draft_ids`.
    accepted_prediction_tokens: int
    # Tokens of `draft_ids` that were rejected or never reached.
    rejected_prediction_tokens: int
    # Tokens proposed by drafters.
    draft_proposed: int
    # Accepted tokens of drafters.
    draft_accepted: int


class TokenOutput(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """New tokens of one answer after one step."""

    request_id: str
    # New tokens, without the end-of-sequence token.
    token_ids: list[int]
    # One entry per token, if the request asked for log-probabilities.
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    # Set together with `finish_reason`.
    stats: RequestStats | None = None
    # Index among the request's `n` answers.
    index: int = 0
    # One entry per prompt token after the first, if requested; only in the first output of the first answer.
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    error: str | None = None
    """Error message, set if the finish reason is "error"."""
    # Prompt tokens found in the prefix cache; None in all outputs after an answer's first.
    cached_tokens: int | None = None
    # Embedding (hidden_size,), set together with `finish_reason` if the request asked for one.
    embedding: tuple[float, ...] = ()
    # Cause of the finish reason "length"; None if the request's own limit was reached.
    stop_reason: StopReason | None = None


class DecodedTokens(msgspec.Struct, frozen=True, gc=False):
    """One new token for each of many unfinished answers. The lists have equal length."""

    request_ids: list[str]
    indices: list[int]
    token_ids: list[int]


class StepOutputs(msgspec.Struct, frozen=True):
    """All outputs of a step. Iteration expands `decoded` into TokenOutputs, which happens in the server process."""

    decoded: DecodedTokens = DecodedTokens([], [], [])
    token_outputs: list[TokenOutput] = []

    @property
    def is_urgent(self) -> bool:
        """Return whether an answer starts or finishes in this step."""
        return any(out.cached_tokens is not None or out.finish_reason is not None for out in self.token_outputs)

    def __iter__(self) -> Iterator[TokenOutput]:
        decoded = self.decoded
        for request_id, index, token in zip(decoded.request_ids, decoded.indices, decoded.token_ids, strict=True):
            yield TokenOutput(request_id, [token], index=index)
        yield from self.token_outputs
