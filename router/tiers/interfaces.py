"""The two tiers as the cascade sees them: small interfaces, so that its state machine is tested without a model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, Unpack

from ...protocol.errors import UnsupportedFeatureError
from ...protocol.http.forwarding import NOTHING, Forwarded
from ...protocol.prompts import Prompt
from ...protocol.requests import Message
from ...protocol.responses import MAX_TOKENS, FinishReason, StopReason
from ...protocol.sampling import SamplingDefaults, SamplingParams
from ...protocol.structured import AnswerOptions, Constraint
from ...text.tokenization import TextEncoder
from ..request.json_narrowing import table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ...classifier.features.gate_inputs import Signals
    from ...text.templates.reasoning import ReasoningStyle
    from ...text.tool_formats import ToolFormat


T = TypeVar("T")

#: When the device's answer may stand in for the cloud's.
Fallback = Literal["unreachable", "any", "never"]


class Token(Protocol):
    """One token written on the device; `text` is "" while a character is incomplete."""

    @property
    def id(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def signals(self) -> Signals: ...
    @property
    def top(self) -> tuple[tuple[int, float], ...]: ...


class PromptTokenScore(Protocol):
    """How likely a token of the prompt was; `top`: ids that could have stood there, with their log-probabilities."""

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
    tokens: list[Token] = field(default_factory=list[Token])
    # One per token, plus one for the end-of-turn token once the answer is complete.
    signals: list[Signals] = field(default_factory=list["Signals"])
    text: str = ""
    # Set once the answer is complete.
    finish_reason: FinishReason | None = None
    # Why a "length" is no limit of the request's.
    stop_reason: StopReason | None = None
    # The defaults that chose the tokens.
    sampling: SamplingDefaults | None = None
    # (hidden_size,); None until the engine has it, like the next two.
    prompt_hidden: NDArray[np.float32] | None = None
    # (prompt_tokens - 1,).
    prompt_logprobs: NDArray[np.float32] | None = None
    # (hidden_size,).
    answer_hidden: NDArray[np.float32] | None = None
    # Of each prompt token but the first, where the request asks for them.
    prompt_scores: Sequence[PromptTokenScore] = ()


class LocalGeneration(Protocol):
    """One local run: iterate it for tokens; `answer` grows with them; `aclose()` stops the decoding at once."""

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
        """Tokens of prompt and answer together."""
        ...

    @property
    def tool_format(self) -> ToolFormat | None:
        """The model's format of tool calls; None if it calls none."""
        ...

    @property
    def reasoning(self) -> ReasoningStyle | None:
        """The model's marks of thought before an answer; None if it has none."""
        ...

    async def start(
        self, messages: Sequence[Message], params: SamplingParams, **options: Unpack[AnswerOptions]
    ) -> LocalGeneration:
        """Begin an answer.

        Raises ContextLengthError if it does not fit the model's context window, InvalidRequestError for a constraint
        that is wrong, or too dear to compile.
        """
        ...

    async def start_text(
        self, prompt: Prompt, params: SamplingParams, *, constraint: Constraint | None = None
    ) -> LocalGeneration:
        """Go on with text or tokens as they are, without a chat template. Raises as `start` does."""
        ...

    async def with_encoder(self, work: Callable[[TextEncoder], T]) -> T:
        """The result of `work` with the model's tokenizer and chat template, in a thread. Raises what it raises."""
        ...

    def token_bytes(self, token_id: int, *, skip_special: bool = False) -> bytes:
        """One vocabulary entry, for log-probabilities; `skip_special`: empty for those that are no text."""
        ...

    async def aclose(self) -> None: ...


class ChatsOnly:
    """The refusals of a `LocalTier` without a tokenizer at hand."""

    async def start_text(
        self,
        prompt: Prompt,  # noqa: ARG002
        params: SamplingParams,  # noqa: ARG002
        *,
        constraint: Constraint | None = None,  # noqa: ARG002
    ) -> LocalGeneration:
        raise UnsupportedFeatureError("prompt: this local model answers chats only.", param="prompt")

    async def with_encoder(self, work: Callable[[TextEncoder], T]) -> T:  # noqa: ARG002
        raise UnsupportedFeatureError("This local model's tokenizer is not at hand: ask its server.")


@dataclass(slots=True)
class CloudUsage:
    """Token counts as the server reported them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    accepted: int = 0
    rejected: int = 0
    # Of the prompt, from the server's cache.
    cached_tokens: int = 0

    @staticmethod
    def of(body: dict[str, Any]) -> CloudUsage | None:
        """From a completion or chunk; None if it carries no usage, or one that cannot be: taken at its word it would
        spend every budget, and of half of it nobody knows what it is worth.
        """
        usage = table(body.get("usage"))
        if usage is None:
            return None
        read, written = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
        if read is None or written is None:
            return None
        details = table(usage.get("completion_tokens_details")) or {}
        accepted, rejected = (_count(details, f"{kind}_prediction_tokens") or 0 for kind in ("accepted", "rejected"))
        cached = _count(table(usage.get("prompt_tokens_details")) or {}, "cached_tokens") or 0
        return CloudUsage(read, written, accepted, rejected, min(cached, read))


def _count(counts: dict[str, Any], name: str) -> int | None:
    """0 where nothing is said; None for what cannot be a count."""
    value: Any = counts.get(name)
    return 0 if value is None else counted(value)


def counted(value: Any) -> int | None:
    """`value` if it can be a count of tokens."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS else None


@dataclass(frozen=True, slots=True)
class Content:
    """The body of a request of any kind."""

    data: bytes
    # Its media type.
    kind: str
    # The model that it names, for errors.
    model: str


@dataclass(frozen=True, slots=True)
class CloudContent:
    """The body of an answer of any kind."""

    # Its media type.
    kind: str
    # Whole, or a stream of events that its reader closes.
    body: bytes | AsyncGenerator[bytes]


#: Books an attempt that the cloud may charge and that broke for a cause. False: the budget pays for no other one.
Book = Callable[[str], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Booked(Forwarded):
    """Forwarded values of a request whose broken attempts are booked before each retry."""

    book: Book | None = field(default=None, repr=False)


class CloudStream(Protocol):
    """An open streamed answer: iterate it for the JSON of its events, each with its raw payload.

    Ends only after the server said that it was done; raises CloudFailure if the stream is cut, stalls or turns to
    nonsense. `aclose()` closes the connection, which a good server takes as a cancellation.
    """

    def __aiter__(self) -> AsyncIterator[tuple[bytes, dict[str, Any]]]: ...
    async def __anext__(self) -> tuple[bytes, dict[str, Any]]: ...
    async def aclose(self) -> None: ...


class CloudTier(Protocol):
    """An OpenAI-compatible endpoint. Bodies are decoded requests, and `forwarded` goes along with them.

    All methods raise CloudFailure, nothing else.

    `continues`: whether it goes on with an assistant's last message when told to; it turns false once the server has
    begun such a message anew. `timeout_s` is for all tries together.
    """

    @property
    def continues(self) -> bool: ...

    async def takes_drafts(self, model: str, *, timeout_s: float, forwarded: Forwarded = NOTHING) -> bool:
        """Whether `model` verifies a `prediction` that nobody asked for: others may bill it. Raises nothing."""
        ...

    def refuse_drafts(self) -> None:
        """From here on it takes none: it has refused the field."""
        ...

    async def complete(
        self, path: str, body: dict[str, Any], *, timeout_s: float, forwarded: Forwarded = NOTHING
    ) -> dict[str, Any]:
        """The whole answer of a request that does not stream, checked to be one."""
        ...

    async def open(
        self,
        path: str,
        body: dict[str, Any],
        *,
        timeout_s: float,
        begun: str | None = None,
        forwarded: Forwarded = NOTHING,
    ) -> CloudStream:
        """A stream whose first piece of content has arrived. `begun`: the text of the last message, which it goes on
        with: a stream that begins it anew fails, or is left without what it repeats.
        """
        ...

    async def embed(self, body: dict[str, Any], *, timeout_s: float, forwarded: Forwarded = NOTHING) -> dict[str, Any]:
        """The answer to a request for embeddings, checked to be one."""
        ...

    async def pass_on(
        self, path: str, content: Content, *, timeout_s: float, forwarded: Forwarded = NOTHING
    ) -> CloudContent:
        """Whatever the cloud answers to `content`, unread. Events come as they are sent."""
        ...

    async def aclose(self) -> None: ...
