"""The outputs of the engine: tokens with their log-probabilities, and the statistics of a request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from ....protocol.responses import StopReason

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities from raw logits, in nats."""

    # Of the chosen token.
    logprob: float
    # `(token_id, logprob)` of the most likely tokens.
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprob(TokenLogprob):
    """The same of a token of the prompt."""

    # 1 for the most likely token of the vocabulary at its place.
    rank: int = 1


@dataclass(frozen=True, slots=True)
class RequestStats:
    """The statistics of a finished request."""

    prompt_tokens: int
    # Of the prompt, found in the prefix cache.
    cached_tokens: int
    completion_tokens: int
    # Of the request's `draft_ids`.
    accepted_prediction_tokens: int
    # Of its `draft_ids`: refuted, or never reached.
    rejected_prediction_tokens: int
    # By drafters.
    draft_proposed: int
    # Of what drafters proposed.
    draft_accepted: int


class TokenOutput(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """New tokens of one answer after one step."""

    request_id: str
    # Without the end-of-sequence token.
    token_ids: list[int]
    # One entry per token, if the request asked for any.
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    # Comes with `finish_reason`.
    stats: RequestStats | None = None
    # Which of the request's `n` answers.
    index: int = 0
    # With the first output of the first answer, if asked for: one entry per prompt token but the first.
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    error: str | None = None
    """Why this answer could not go on; comes with the reason "error"."""
    # Of the prompt, found in the prefix cache; None after an answer's first output.
    cached_tokens: int | None = None
    # (hidden_size,) with `finish_reason`, if one was asked for.
    embedding: tuple[float, ...] = ()
    # Why the finish reason is "length", where not by the request's own limit.
    stop_reason: StopReason | None = None


class DecodedTokens(msgspec.Struct, frozen=True, gc=False):
    """One new token for each of many answers that go on. All lists are as long."""

    request_ids: list[str]
    indices: list[int]
    token_ids: list[int]


class StepOutputs(msgspec.Struct, frozen=True):
    """All outputs of a step, by iteration. Those of `decoded` are made only then, in the server's process."""

    decoded: DecodedTokens = DecodedTokens([], [], [])
    others: list[TokenOutput] = []

    @property
    def is_urgent(self) -> bool:
        """Whether an answer begins or ends with them."""
        return any(output.cached_tokens is not None or output.finish_reason is not None for output in self.others)

    def __iter__(self) -> Iterator[TokenOutput]:
        decoded = self.decoded
        for request_id, index, token in zip(decoded.request_ids, decoded.indices, decoded.token_ids, strict=True):
            yield TokenOutput(request_id, [token], index=index)
        yield from self.others
