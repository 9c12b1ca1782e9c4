"""Types of the answers and stream events of each API: the fields that clients read. All other fields are skipped.

Fields that real servers omit or set to null are optional.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from ....accounting.token_estimate import ATTACHED_TOKENS, text_bytes
from ....protocol.decoding import prepare_types
from ....protocol.http.lenient_json import object_of, rows

#: Fields of a delta that contain no generated text.
_NOT_WRITTEN = frozenset(
    (
        *("id", "type", "role", "name", "index", "status", "format", "call_id", "tool_call_id"),
        *("annotations", "citation", "stop_reason", "stop_sequence", "container", "provider_specific_fields"),
    )
)
#: Fields of a delta that repeat the text of another field, where both are sent.
_REPEATS = {"reasoning_details": "reasoning", "thinking_blocks": "reasoning_content"}
_IMAGE_BYTES = 4 * ATTACHED_TOKENS  # four bytes of text are a token
Index = Annotated[int, msgspec.Meta(ge=0)]


class _AnyObject(msgspec.Struct):
    """Any JSON object; its fields are skipped."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Custom(msgspec.Struct):
    input: str | None = None


class _ToolCall(msgspec.Struct):
    index: Any = None
    function: _Function | None = None
    custom: _Custom | None = None


class _Audio(msgspec.Struct):
    transcript: str | None = None


class _Message(msgspec.Struct):
    """The message of a whole chat answer, or a stream's delta."""

    content: str | list[Any] | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: _Audio | None = None

    @property
    def arguments(self) -> Iterator[tuple[Any, str]]:
        """The arguments of each function call, with the call's index."""
        calls = self.tool_calls or ()
        yield from ((call.index, call.function.arguments or "") for call in calls if call.function is not None)
        if self.function_call is not None:
            yield None, self.function_call.arguments or ""


class _Choice(msgspec.Struct, kw_only=True):
    index: Index | None = None
    finish_reason: str | None = None


class _ChatChoice(_Choice, kw_only=True):
    message: _Message


class _TextChoice(_Choice, kw_only=True):
    text: str


class _ChunkChoice(_Choice, kw_only=True):
    delta: _Message | None = None
    text: str | None = None


class _Answer(msgspec.Struct, kw_only=True):
    usage: _AnyObject | None = None


class NodeCompletion(_Answer, kw_only=True):
    error: Any = None


class NodeChatCompletion(NodeCompletion, kw_only=True):
    choices: Annotated[list[_ChatChoice], msgspec.Meta(min_length=1)]


class NodeTextCompletion(NodeCompletion, kw_only=True):
    choices: Annotated[list[_TextChoice], msgspec.Meta(min_length=1)]


class NodeChunk(NodeCompletion, kw_only=True):
    """A stream event of a chat or text completion."""

    choices: list[_ChunkChoice] | None = None
    object: Any = None

    @property
    def is_error(self) -> bool:
        """Return whether the chunk reports an error: alone, or beside a last choice (as OpenRouter does)."""
        return bool(self.error) or (self.error is not None and not self.choices) or self.object == "error"

    @property
    def is_finished(self) -> bool:
        return bool([choice for choice in self.choices or () if choice.finish_reason is not None])

    @property
    def arguments(self) -> Iterator[tuple[tuple[Any, Any], str]]:
        """The arguments of each function call, with the indices of choice and call."""
        for choice in self.choices or ():
            for index, arguments in choice.delta.arguments if choice.delta is not None else ():
                yield (choice.index, str(index)), arguments


class NodeEmbedding(msgspec.Struct):
    embedding: msgspec.Raw
    index: Index | None = None


class NodeEmbeddings(_Answer, kw_only=True):
    data: Annotated[list[NodeEmbedding], msgspec.Meta(min_length=1)]


class _Rank(msgspec.Struct):
    index: Index | None = None
    relevance_score: float | None = None
    score: float | None = None


class NodeRanking(msgspec.Struct):
    """The ranked documents, under either of two names."""

    results: list[_Rank] | None = None
    data: list[_Rank] | None = None


class _Moderation(msgspec.Struct):
    flagged: bool | None = None


class NodeModerations(msgspec.Struct):
    results: Annotated[list[_Moderation], msgspec.Meta(min_length=1)]


class NodeTokenCount(msgspec.Struct):
    input_tokens: Annotated[int, msgspec.Meta(ge=0)]


class _OutputPart(msgspec.Struct):
    text: str | None = None
    refusal: str | None = None


class _OutputItem(msgspec.Struct):
    type: str
    content: list[_OutputPart] | None = None


class NodeResponse(_Answer, kw_only=True):
    """An answer of the Responses API."""

    output: list[_OutputItem]


class _ResponseState(_Answer, kw_only=True):
    """The response so far, in an event."""

    output: list[_OutputItem] | None = None


class _ContentBlock(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    name: str | None = None
    input: _AnyObject | None = None


class NodeMessage(_Answer, kw_only=True):
    """An answer of the Messages API."""

    content: list[_ContentBlock]
    stop_reason: str | None = None


class _BlockDelta(msgspec.Struct):
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None


class NodeEvent(msgspec.Struct):
    """A stream event of the Responses, Messages or audio API."""

    type: str
    index: Index | None = None
    text: str | None = None
    delta: str | _BlockDelta | None = None
    item: _OutputItem | None = None
    content_block: _ContentBlock | None = None
    response: _ResponseState | None = None
    message: _AnyObject | str | None = None


class _WrittenChoice(msgspec.Struct):
    delta: Any = None
    text: str | None = None
    message: Any = None  # some servers send a whole message in a stream


class WrittenFields(msgspec.Struct):
    """The fields of a stream event that contain generated text, with all their members."""

    choices: list[_WrittenChoice] | None = None
    delta: Any = None

    @property
    def text_bytes(self) -> int:
        """The number of UTF-8 bytes in all generated text, including reasoning and tool-call arguments."""
        total = 0 if self.delta is None else _written_bytes(self.delta)
        for choice in self.choices or ():
            total += _written_bytes(choice.delta or choice.text or choice.message)
        return total


def _written_bytes(delta: Any) -> int:
    """Return the bytes of all text in a delta, except fields in `_NOT_WRITTEN`. An image counts a fixed number."""
    total = 0
    for name, value in object_of(delta).items() if isinstance(delta, dict) else (("text", delta),):
        if isinstance(value, str) and value.isascii():  # fast path that suffices for nearly all events
            total += 0 if name in _NOT_WRITTEN else len(value)
        elif name == "images":
            total += len(rows(value) or ()) * _IMAGE_BYTES
        elif name == "audio":
            total += text_bytes(object_of(value).get("transcript"))
        elif value and name not in _NOT_WRITTEN and not object_of(delta).get(_REPEATS.get(name, "")):
            total += text_bytes(value, _NOT_WRITTEN)
    return total


#: Field that an event of this type must have, and the field's type.
REQUIRED: dict[str, tuple[str, type]] = {
    "message_start": ("message", _AnyObject),
    "content_block_start": ("content_block", _ContentBlock),
    "content_block_delta": ("delta", _BlockDelta),
    "transcript.text.delta": ("delta", str),
    **{
        f"response.{name}": ("response", _ResponseState)
        for name in ("queued", "created", "in_progress", "completed", "incomplete", "failed")
    },
    **{
        f"response.{name}.delta": ("delta", str)
        for name in ("output_text", "refusal", "function_call_arguments", "reasoning_text", "reasoning_summary_text")
    },
}

prepare_types(NodeChunk, NodeEvent, WrittenFields)
