"""Interfaces of the local and the cloud tier. Tests of the cascade implement them without a model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, Unpack

from ...protocol.errors import UnsupportedFeatureError
from ...protocol.http.forwarding import Forwarding
from ...protocol.prompts import Prompt
from ...protocol.requests import Message
from ...protocol.responses import FinishReason, StopReason, Usage
from ...protocol.sampling import SamplingDefaults, SamplingParams
from ...protocol.structured import AnswerOptions, Constraint
from ...text.tokenization import TextEncoder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ...classifier.features.gate_inputs import Signals
    from ...text.templates.reasoning import ReasoningStyle
    from ...text.tool_formats import ToolFormat


T = TypeVar("T")

#: Failures after which a local answer may replace the cloud's.
Fallback = Literal["unreachable", "any", "never"]


class Token(Protocol):
    """One token generated on the device. `text` is empty if the token ends inside a character."""

    @property
    def id(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def signals(self) -> Signals: ...
    @property
    def top(self) -> tuple[tuple[int, float], ...]: ...


class PromptTokenScore(Protocol):
    """Log-probability of a prompt token. `top`: the most likely tokens at its position, as (ID, log-probability)."""

    @property
    def id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int: ...
    @property
    def top(self) -> tuple[tuple[int, float], ...]: ...


@dataclass(slots=True)
class LocalAnswer:
    """The local model's answer so far."""

    prompt_tokens: int = 0
    # Prompt tokens from the prefix cache; known from the first token on.
    cached_tokens: int = 0
    tokens: list[Token] = field(default_factory=list[Token])
    # Confidence signals of each token, and of the end-of-turn token of a complete answer.
    signals: list[Signals] = field(default_factory=list["Signals"])
    text: str = ""
    # Finish reason. None: the answer is incomplete.
    finish_reason: FinishReason | None = None
    # Reason why the answer ended with "length" before the request's own limit. None: it did not.
    stop_reason: StopReason | None = None
    # Default sampling parameters that were used for fields missing in the request.
    sampling: SamplingDefaults | None = None
    # Whether the model has no setting for the request's reasoning effort.
    ignores_effort: bool = False
    # Style of the reasoning in `text`. None: `text` has no reasoning.
    reasoning: ReasoningStyle | None = None
    # Hidden state of the prompt, shape (hidden_size,). None until the engine reports it.
    prompt_hidden: NDArray[np.float32] | None = None
    # Log-probabilities of the prompt tokens, shape (prompt_tokens - 1,). None until the engine reports them.
    prompt_logprobs: NDArray[np.float32] | None = None
    # Hidden state of the answer, shape (hidden_size,). None until the engine reports it.
    answer_hidden: NDArray[np.float32] | None = None
    # Scores of all prompt tokens but the first, if requested.
    prompt_scores: Sequence[PromptTokenScore] = ()

    def usage(self, more_tokens: int = 0) -> Usage:
        """Return the token counts, with `more_tokens` of other answers to the prompt or of a continuation."""
        return Usage.of(self.prompt_tokens, len(self.tokens) + more_tokens, cached=self.cached_tokens)


class LocalGeneration(Protocol):
    """One local run. Iteration yields tokens and adds them to `answer`. `aclose()` stops decoding at once."""

    answer: LocalAnswer

    def __aiter__(self) -> AsyncIterator[Token]: ...
    async def __anext__(self) -> Token: ...
    async def aclose(self) -> None: ...


class LocalTier(Protocol):
    """The model on this device."""

    @property
    def model_id(self) -> str: ...
    @property
    def context_length(self) -> int:
        """Maximum number of prompt and answer tokens together."""
        ...

    @property
    def tool_format(self) -> ToolFormat | None:
        """Format of the model's tool calls; None if the model has no tool calls."""
        ...

    @property
    def reasoning(self) -> ReasoningStyle | None:
        """Markers of the model's reasoning before an answer; None if it does not reason."""
        ...

    async def start(
        self, messages: Sequence[Message], params: SamplingParams, **options: Unpack[AnswerOptions]
    ) -> LocalGeneration:
        """Start an answer. Raises ContextLengthError if the prompt exceeds the context window, InvalidRequestError for
        a constraint that is invalid or too expensive to compile."""
        ...

    async def start_text(
        self, prompt: Prompt, params: SamplingParams, *, constraint: Constraint | None = None
    ) -> LocalGeneration:
        """Continue text or tokens without a chat template. Raises the errors of `start`."""
        ...

    async def with_encoder(self, work: Callable[[TextEncoder], T]) -> T:
        """Call `work` with the tokenizer and chat template, in a thread, and return its result. Raises its errors."""
        ...

    def token_bytes(self, token_id: int, *, skip_special: bool = False) -> bytes:
        """Return the bytes of a vocabulary entry. `skip_special`: return no bytes for special tokens."""
        ...

    async def aclose(self) -> None: ...


class ChatOnlyTier:
    """Mixin for a `LocalTier` without tokenizer access: refuses bare prompts and tokenization."""

    async def start_text(
        self,
        prompt: Prompt,  # noqa: ARG002
        params: SamplingParams,  # noqa: ARG002
        *,
        constraint: Constraint | None = None,  # noqa: ARG002
    ) -> LocalGeneration:
        raise UnsupportedFeatureError("prompt: this local model supports only chats.", param="prompt")

    async def with_encoder(self, work: Callable[[TextEncoder], T]) -> T:  # noqa: ARG002
        raise UnsupportedFeatureError("This local model's tokenizer is not available here. Ask the local server.")


@dataclass(frozen=True, slots=True)
class Content:
    """Request body of any content type."""

    data: bytes
    # Media type.
    kind: str
    # Name of the model in the body, to show in errors.
    model: str


@dataclass(frozen=True, slots=True)
class CloudContent:
    """Answer body of any content type."""

    # Media type.
    kind: str
    # Whole body, or a stream of server-sent events that the consumer must close.
    body: bytes | AsyncGenerator[bytes]


#: Function that charges a failed attempt, given its cause, before a retry. Returns whether the budget allows a retry.
Book = Callable[[str], Awaitable[bool]]


@dataclass(slots=True)
class Delivery:
    """Progress of sending a request, as the events of httpcore's extension `trace`."""

    # Whether the cloud may have read, and thus charge for, a part of the request.
    has_begun: bool = False

    async def trace(self, event: str, info: Mapping[str, Any]) -> None:
        if event.endswith("send_request_headers.started") and info["request"].method != b"CONNECT":
            self.has_begun = True  # CONNECT reaches only a proxy


@dataclass(frozen=True, slots=True)
class ChargedForwarding(Forwarding):
    """Headers, query and key to forward, with a function that charges a failed attempt before each retry."""

    book: Book | None = field(default=None, repr=False)
    # Progress of the current attempt.
    delivery: Delivery = field(default_factory=Delivery)
    # Filled with the `x-ratelimit-*` headers of the cloud's last response.
    rate_limits: dict[str, str] = field(default_factory=dict[str, str])
    # Filled with the notes of the last translation of the request.
    call_notes: list[str] = field(default_factory=list[str])
    # Filled with notes on the hints that the cloud's provider ignores.
    hints: list[str] = field(default_factory=list[str])
    # Filled with the names of the sent fields, if the request was written for the cloud's API.
    native_fields: list[str] = field(default_factory=list[str])


class CloudStream(Protocol):
    """An open streamed answer. Iteration yields the raw payload and the decoded JSON of each event.

    Iteration ends only after the server's end mark. Raises CloudFailure if the stream is cut, stalls or is malformed.
    `aclose()` closes the connection, which a good server treats as a cancellation.
    """

    def __aiter__(self) -> AsyncIterator[tuple[bytes, dict[str, Any]]]: ...
    async def __anext__(self) -> tuple[bytes, dict[str, Any]]: ...
    async def aclose(self) -> None: ...
