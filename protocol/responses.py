"""The answers of a server: OpenAI's completion objects, chunks and usage, plus our `updraft` object.

Fields left at `UNSET` do not appear on the wire.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal
from zlib import crc32

import msgspec
from msgspec import UNSET, UnsetType

from .decoding import prepare_types
from .sampling import SamplingDefaults
from .structured import ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]
#: Of an answer of finish reason "length" that its request did not limit: `default_max_tokens` (it came to the server's
#: own bound, or the end of the context) or `repetition_detected`. Else the stop string that ended it, as vLLM tells it.
StopReason = str
MAX_TOKENS = 2**32  # of one request: no model reads a thousandth of it, so a server that counts more counts nothing


def fingerprint(model: str) -> str:
    """OpenAI's `system_fingerprint`: the same for all answers of one model."""
    return f"fp_{crc32(model.encode()):08x}"


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    """OpenAI's details, and two of ours."""

    # Tokens of the request's draft that the model confirmed.
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0
    # Tokens of a draft model; left out where there is none.
    draft_proposed: int | UnsetType = UNSET
    draft_accepted: int | UnsetType = UNSET


class TokenCounts(msgspec.Struct, kw_only=True):
    """vLLM's usage on each chunk of a stream with `continuous_usage_stats`: the tokens so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class Usage(TokenCounts, kw_only=True):
    prompt_tokens_details: PromptTokensDetails = msgspec.field(default_factory=PromptTokensDetails)
    completion_tokens_details: CompletionTokensDetails = msgspec.field(default_factory=CompletionTokensDetails)

    @staticmethod
    def of(prompt: int, completion: int, *, cached: int = 0, accepted: int = 0, rejected: int = 0) -> Usage:
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected
            ),
        )


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = msgspec.field(default_factory=list[TopLogprob])

    @staticmethod
    def of(
        token: int, logprob: float, top: Iterable[tuple[int, float]], token_bytes: Callable[[int], bytes]
    ) -> ChatTokenLogprob:
        """A token may be a part of a character: its bytes are exact, its text is not."""

        def shown(token: int, logprob: float) -> tuple[str, float, list[int]]:
            raw = token_bytes(token)
            return raw.decode("utf-8", "replace"), logprob, list(raw)

        return ChatTokenLogprob(*shown(token, logprob), [TopLogprob(*shown(*other)) for other in top])


class ChoiceLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class AnswerNotes(msgspec.Struct, kw_only=True):
    """An engine's notes on its own answer, where a router has more to say."""

    # The parts of the request's schema that the answer was not held to.
    notes: list[str]


class UpdraftInfo(msgspec.Struct, kw_only=True, omit_defaults=False):
    """The origin of this answer, and its reason. They also travel as `x-updraft-*` headers and go to the ledger."""

    request_id: str
    tier: Literal["local", "cloud"]
    # `local`; `cloud` (never tried locally, or nothing local was used); `escalated` (with the local answer as a draft);
    # `fallback` (the cloud failed, this is the local answer); `cache` (an earlier answer of `tier` to the same
    # request).
    route: Literal["local", "cloud", "escalated", "fallback", "cache"]
    reason: str
    # 0 rules, 1 before, 2 during, 3 after generation. `confidence` is 1 - `p_gain`; both are None where no gate
    # computed them. Money in US dollars, None where a model has no price.
    gate: int
    p_gain: float | None = None
    confidence: float | None = None
    threshold: float | None = None
    cost_usd: float | None = None
    saved_usd: float | None = None
    local_tokens: int = 0
    cloud_tokens: int = 0
    draft_proposed: int = 0
    draft_accepted: int = 0
    latency_ms: float = 0.0
    # The parts of the request that the answer was not held to; left out where there is nothing to say.
    notes: list[str] | UnsetType = UNSET

    def headers(self) -> dict[str, str]:
        reason = self.reason.replace("\n", " ")
        if not (reason.isascii() and reason.isprintable()):
            reason = "".join(each if each.isascii() and each.isprintable() else "?" for each in reason)
        shown = {
            "request-id": self.request_id,
            "tier": self.tier,
            "route": self.route,
            "reason": reason,
            "confidence": "" if self.confidence is None else f"{self.confidence:.4f}",
            "cost-usd": "" if self.cost_usd is None else f"{self.cost_usd:.8f}",
            "saved-usd": "" if self.saved_usd is None else f"{self.saved_usd:.8f}",
        }
        return {f"x-updraft-{name}": value for name, value in shown.items() if value}


prepare_types(UpdraftInfo)


class AssistantMessage(msgspec.Struct):
    """`content` is None where the model only called tools."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    # What the model thought before.
    reasoning_content: str | UnsetType = UNSET


class PromptToken(msgspec.Struct):
    """A token that stands, or could have stood, at a place of the prompt (vLLM's shape). `rank`: 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


class ChatChoice(msgspec.Struct):
    message: AssistantMessage
    finish_reason: FinishReason
    index: int = 0
    logprobs: ChoiceLogprobs | None = None
    stop_reason: StopReason | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """`sampling` (ours): what the tokens were chosen by, the model's own values where the request had none."""

    id: str
    model: str
    choices: list[ChatChoice]
    usage: Usage
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptToken] | None] | UnsetType = UNSET
    sampling: SamplingDefaults | UnsetType = UNSET
    # UpdraftInfo, or an engine's AnswerNotes: without a tag no schema tells them apart.
    updraft: Any = UNSET


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    arguments: str = ""
    name: str | None = None


class ToolCallDelta(msgspec.Struct):
    """More of the `index`-th call: id, type and name come first and once, then pieces of the arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    content: str | None = None
    role: Literal["assistant"] | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning_content: str | None = None


class ChunkChoice(msgspec.Struct):
    delta: Delta
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: ChoiceLogprobs | None = None
    stop_reason: StopReason | UnsetType = UNSET
    # Those that all text so far is made of, as far as they are new (`return_token_ids`).
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One streamed event. If `include_usage` was asked for, a last one without choices has the usage.

    `sampling` comes with the finish reason.
    """

    id: str
    model: str
    choices: list[ChunkChoice]
    created: int
    usage: TokenCounts | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | UnsetType = UNSET
    sampling: SamplingDefaults | UnsetType = UNSET
    # UpdraftInfo, or an engine's AnswerNotes: without a tag no schema tells them apart.
    updraft: Any = UNSET


class TextLogprobs(msgspec.Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    @staticmethod
    def of(scores: Sequence[ChatTokenLogprob], offsets: list[int]) -> TextLogprobs:
        """Among the likeliest tokens is in any case the one that was chosen."""
        return TextLogprobs(
            tokens=[score.token for score in scores],
            token_logprobs=[score.logprob for score in scores],
            top_logprobs=[
                {**{top.token: top.logprob for top in score.top_logprobs}, score.token: score.logprob}
                for score in scores
            ],
            text_offset=offsets,
        )

    @staticmethod
    def joined(parts: Sequence[TextLogprobs]) -> TextLogprobs:
        names = TextLogprobs.__struct_fields__
        return TextLogprobs(**{name: [each for part in parts for each in getattr(part, name)] for name in names})


class TextChoice(msgspec.Struct):
    text: str
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: TextLogprobs | None = None
    stop_reason: StopReason | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptToken] | None] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextCompletion(msgspec.Struct, kw_only=True):
    """`/v1/completions`; streamed chunks have the same shape."""

    id: str
    model: str
    choices: list[TextChoice]
    usage: TokenCounts | UnsetType | None = UNSET
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | UnsetType = UNSET
    sampling: SamplingDefaults | UnsetType = UNSET
    updraft: UpdraftInfo | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """A model of a list. Fields of which nothing is known are left out."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "updraft"
    # vLLM's: tokens of prompt and answer together.
    max_model_len: int | UnsetType = UNSET
    # vLLM's: the model that an alias stands for.
    root: str | UnsetType = UNSET
    # Ours: `chat`, `completions`, `embeddings`, `structured_outputs`, `tools`.
    capabilities: list[str] | UnsetType = UNSET


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"
