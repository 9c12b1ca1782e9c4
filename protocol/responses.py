"""Response types: OpenAI's completion objects, chunks and usage, plus Updraft's `updraft` object.

Fields left at `UNSET` are omitted from the JSON.
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
#: The stop string that ended the answer, as in vLLM. With finish reason "length" and no limit in the request:
#: `default_max_tokens` (the server's limit or the end of the context) or `repetition_detected`.
StopReason = str
MAX_TOKENS = 2**32  # maximum per request; a larger count in an upstream's usage cannot be real


def fingerprint(model: str) -> str:
    """Return OpenAI's `system_fingerprint`, which is the same for all answers of a model."""
    return f"fp_{crc32(model.encode()):08x}"


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    """OpenAI's completion token details, and Updraft's counts of draft tokens."""

    # Tokens of the request's `prediction` that the model accepted.
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0
    # Tokens proposed by a draft model; omitted without a draft model.
    draft_proposed: int | UnsetType = UNSET
    draft_accepted: int | UnsetType = UNSET


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of an answer, or of a stream so far (vLLM's `continuous_usage_stats`)."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
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


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = msgspec.field(default_factory=list[TopLogprob])

    @staticmethod
    def of(
        token: int, logprob: float, top: Iterable[tuple[int, float]], token_bytes: Callable[[int], bytes]
    ) -> ChatTokenLogprob:
        """Build the entry of one token. A token may hold part of a character, so `bytes` has the exact content."""

        def shown(token: int, logprob: float) -> tuple[str, float, list[int]]:
            raw = token_bytes(token)
            return raw.decode("utf-8", "replace"), logprob, list(raw)

        return ChatTokenLogprob(*shown(token, logprob), [TopLogprob(*shown(*other)) for other in top])


class ChoiceLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class AnswerNotes(msgspec.Struct, kw_only=True):
    """`updraft` object in the answer of an engine. In the answer of a router it is an UpdraftInfo."""

    # Parts of the request's schema that were not enforced.
    notes: list[str]


class UpdraftInfo(msgspec.Struct, kw_only=True, omit_defaults=False):
    """Routing decision for an answer; also sent as `x-updraft-*` headers and recorded in the ledger."""

    request_id: str
    tier: Literal["local", "cloud"]
    # `local`; `cloud` (not tried locally, or no local tokens used); `escalated` (the cloud used the local answer as a
    # draft); `fallback` (local answer, because the cloud failed); `cache` (answer of `tier` to an equal request).
    route: Literal["local", "cloud", "escalated", "fallback", "cache"]
    reason: str
    # Gate that decided: 0 rules, 1 before, 2 during, 3 after generation.
    gate: int
    # Probability that the cloud's answer is better; None if no gate computed it.
    p_gain: float | None = None
    # Confidence in the local answer; None unless the `confidence` threshold decided.
    confidence: float | None = None
    # Value with which the gate compared `p_gain` or `confidence`.
    threshold: float | None = None
    # Cost of the answer, and cost that it saved, in US dollars; None if a model has no price.
    cost_usd: float | None = None
    saved_usd: float | None = None
    local_tokens: int = 0
    cloud_tokens: int = 0
    draft_proposed: int = 0
    draft_accepted: int = 0
    latency_ms: float = 0.0
    # Task of the request, with `learn`; omitted without.
    task: str | UnsetType = UNSET
    # Parts of the request that were not enforced; omitted if empty.
    notes: list[str] | UnsetType = UNSET

    def headers(self) -> dict[str, str]:
        reason = "".join(each if " " <= each <= "~" else "?" for each in self.reason.replace("\n", " "))
        shown = {
            "request-id": self.request_id,
            "tier": self.tier,
            "route": self.route,
            "reason": reason,
            "task": self.task or "",
            "p-gain": "" if self.p_gain is None else f"{self.p_gain:.4f}",
            "confidence": "" if self.confidence is None else f"{self.confidence:.4f}",
            "cost-usd": "" if self.cost_usd is None else f"{self.cost_usd:.8f}",
            "saved-usd": "" if self.saved_usd is None else f"{self.saved_usd:.8f}",
        }
        return {f"x-updraft-{name}": value for name, value in shown.items() if value}


prepare_types(UpdraftInfo)


class AssistantMessage(msgspec.Struct):
    """Message of an answer. `content` is None if the model only called tools."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class PromptToken(msgspec.Struct):
    """Log-probability of a prompt token or of an alternative token, as in vLLM. `rank` 1 is the most likely token."""

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
    """Response body of a chat. `sampling` (Updraft's): parameters used, with the model's defaults filled in."""

    id: str
    model: str
    choices: list[ChatChoice]
    usage: Usage
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptToken] | None] | UnsetType = UNSET
    sampling: SamplingDefaults | UnsetType = UNSET
    # UpdraftInfo or AnswerNotes; untyped, because msgspec cannot tell untagged structs apart.
    updraft: Any = UNSET


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    arguments: str = ""
    name: str | None = None


class ToolCallDelta(msgspec.Struct):
    """Part of the `index`-th tool call. The first part has id, type and name; later parts continue the arguments."""

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
    # Ids of tokens that are new since the last chunk and fully decoded into text (`return_token_ids`).
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """Chunk of a streamed chat. The chunk with the finish reason has `sampling`; with `include_usage`, a final chunk
    without choices has the usage."""

    id: str
    model: str
    choices: list[ChunkChoice]
    created: int
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | UnsetType = UNSET
    sampling: SamplingDefaults | UnsetType = UNSET
    # UpdraftInfo or AnswerNotes; untyped, because msgspec cannot tell untagged structs apart.
    updraft: Any = UNSET


class TextLogprobs(msgspec.Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    @staticmethod
    def of(scores: Sequence[ChatTokenLogprob], offsets: list[int]) -> TextLogprobs:
        """Build the log-probabilities of a text. `top_logprobs` always includes the chosen token."""
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
    """Response body of `/v1/completions`; streamed chunks have the same format."""

    id: str
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | UnsetType = UNSET
    sampling: SamplingDefaults | UnsetType = UNSET
    updraft: Any = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """Entry of the model list. Fields without a known value are omitted."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "updraft"
    # vLLM's: maximum tokens of prompt and answer together.
    max_model_len: int | UnsetType = UNSET
    # vLLM's: the model that an alias refers to.
    root: str | UnsetType = UNSET
    # Updraft's: any of `chat`, `completions`, `embeddings`, `structured_outputs`, `tools`.
    capabilities: list[str] | UnsetType = UNSET


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"
