"""Validation of node answers before relaying: JSON of the expected shape, and well-formed events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from ....accounting.token_estimate import text_bytes
from ....protocol.decoding import UNREADABLE, prepare_types
from ....protocol.errors import UpstreamError
from ....protocol.http import sse
from ....protocol.http.lenient_json import error_in, json_bytes, json_of, object_of, standard_json
from ....protocol.validation_messages import plain_words
from ..upstream.client import Response
from ..upstream.failures import AnswerFailure

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS, RERANK, MODERATIONS = "/v1/embeddings", "/v1/rerank", "/v1/moderations"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT_TOKENS, INPUT_TOKENS = "/v1/messages/count_tokens", "/v1/responses/input_tokens"
EVENTS = b"text/event-stream"
_FIELD_LINES = (b":", b"data", b"event", b"id", b"retry")
_ANSWER_FIELDS = ("id", "object", "type", "output", "content", "usage")
WithoutKey = Callable[[bytes], bytes]
"""Replaces the node's API key in the node's output."""

_T = TypeVar("_T")
_Objects = list[dict[str, msgspec.Raw]]


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: Any = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Message(msgspec.Struct):
    content: str | list[Any] | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    refusal: Any = None


_NO_DELTA = _Message()


class _Ranking(msgspec.Struct):
    results: _Objects | None = None
    data: _Objects | None = None


class _Item(msgspec.Struct):
    """An answer of the Responses or Messages API. Nodes omit various fields."""

    output: _Objects | None = None
    content: _Objects | None = None


class _ChunkChoice(msgspec.Struct):
    index: int | None = None
    delta: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None


class NodeChunk(msgspec.Struct):
    """A stream event of a chat or text completion."""

    choices: list[_ChunkChoice] | None = None
    usage: msgspec.Raw = msgspec.Raw()
    error: Any = None
    object: Any = None

    @property
    def is_error(self) -> bool:
        return (self.error is not None and not self.choices) or self.object == "error"

    @property
    def is_finished(self) -> bool:
        return bool([choice for choice in self.choices or () if choice.finish_reason is not None])

    @property
    def text_bytes(self) -> int:
        """The number of UTF-8 bytes in all generated text, including reasoning and tool-call arguments."""
        total = 0
        for choice in self.choices or ():
            delta = choice.delta or _NO_DELTA
            if text := delta.content or choice.text:  # fast path that suffices for nearly all events
                total += len(text) if isinstance(text, str) and text.isascii() else text_bytes(text)
            for other in (delta.reasoning, delta.reasoning_content, delta.refusal, delta.function_call):
                if other:
                    total += text_bytes(other)
            for call in delta.tool_calls or ():
                total += text_bytes(call.function and call.function.arguments)
        return total


class _Event(msgspec.Struct):
    """A stream event of the Responses, Messages or audio API."""

    type: str
    response: msgspec.Raw = msgspec.Raw()
    message: msgspec.Raw = msgspec.Raw()


class _Fault(msgspec.Struct):
    error: Any = None


prepare_types(NodeChunk, _Event, _Fault)
_OF_RESPONSE = frozenset(
    f"response.{name}" for name in ("queued", "created", "in_progress", "completed", "incomplete", "failed")
)
_CHUNK, _EVENT = msgspec.json.Decoder(NodeChunk), msgspec.json.Decoder(_Event)


def _list_of(**fields: Any) -> Any:
    """Return the type of a non-empty list whose objects have these fields, and optionally a finish reason."""
    kind = msgspec.defstruct("_Object", [*fields.items(), ("finish_reason", Any, None)])
    return Annotated[list[kind], msgspec.Meta(min_length=1)]


def _decoder(**fields: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(msgspec.defstruct("_Answer", fields.items()))


_WHOLE: dict[str, msgspec.json.Decoder[Any]] = {
    CHAT: _decoder(choices=_list_of(message=_Message)),
    COMPLETIONS: _decoder(choices=_list_of(text=str)),
    EMBEDDINGS: _decoder(data=_list_of(embedding=msgspec.Raw)),
    RERANK: msgspec.json.Decoder(_Ranking),
    MODERATIONS: _decoder(results=_list_of()),
    **dict.fromkeys((RESPONSES, MESSAGES), msgspec.json.Decoder(_Item)),
    **dict.fromkeys((COUNT_TOKENS, INPUT_TOKENS), _decoder(input_tokens=int)),
}


def content_type(response: Response) -> bytes:
    """Return the media type in lower case, without parameters; empty if missing."""
    return dict(response.headers).get(b"content-type", b"").partition(b";")[0].strip().lower()


def checked_whole(route: str, body: bytes, kind: bytes, without_key: WithoutKey) -> bytes:
    """Validate an answer with status 200. Encode JSON that only lenient parsers accept (NaN), and an answer without
    finish reasons, again. All other answers keep their bytes. Raises AnswerFailure."""
    decoder = _WHOLE.get(route)
    if decoder is None:  # audio, or a transcript in one of several formats
        if not body or kind == b"text/html":
            raise AnswerFailure(f"the answer has {len(body)} bytes and the type {kind.decode('latin-1') or 'unknown'}")
        return body
    try:
        _ = body.isascii() or body.decode()  # msgspec does not validate UTF-8 in fields that it skips
        return _finished(_check_shape(decoder, body, route), body)
    except msgspec.ValidationError as error:
        raise AnswerFailure(f"unexpected JSON: {plain_words(error)}", reported_in(without_key(body))) from error
    except UNREADABLE:
        try:
            answer = _check_shape(decoder, json_bytes(json_of(body)), route)
            return _finished(answer, standard_json(body))
        except ValueError as error:
            raise AnswerFailure("the body is not a valid JSON answer", reported_in(without_key(body))) from error


def _finished(answer: Any, body: bytes) -> bytes:
    """Return the body of an answer. Choices of a completion that lack a finish reason get one."""
    if all(choice.finish_reason for choice in getattr(answer, "choices", ())):
        return body
    fields = json_of(body, exact=True)
    for choice in fields["choices"]:
        calls = object_of(choice.get("message")).get("tool_calls")
        choice["finish_reason"] = choice.get("finish_reason") or ("tool_calls" if calls else "stop")
    return json_bytes(fields)


def _check_shape(decoder: msgspec.json.Decoder[Any], body: bytes, route: str) -> Any:
    """Decode the body. Raises a msgspec error, a subclass of ValueError, if it does not have the expected shape."""
    answer = decoder.decode(body)
    if isinstance(answer, _Item):
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        is_error = reported_in(body) is not None and answer.output is None
        if is_error or not any(name in fields for name in _ANSWER_FIELDS):
            raise msgspec.ValidationError("the fields of an answer are missing")
    elif isinstance(answer, _Ranking) and answer.results is None and answer.data is None:
        raise msgspec.ValidationError(f"`results` is missing in the answer of {route}")
    return answer


def reported_in(body: bytes) -> UpstreamError | None:
    """Return the error in the body of an answer, or None."""
    try:
        if not msgspec.json.decode(body, type=_Fault).error:
            return None
    except UNREADABLE:
        return None
    said = error_in(body, UpstreamError.status, "The node reported an error.")
    return UpstreamError(said["message"], param=said["param"], code=said["code"])


def chunk_of(event: bytes) -> tuple[NodeChunk, bytes]:
    """Decode a `data:` event of a completion. Return the chunk, and the event as strict JSON. Raises AnswerFailure."""
    chunk, spelled = _decoded(_CHUNK, event[6:])
    if chunk.choices is chunk.error is chunk.object is None and bytes(chunk.usage) in (b"", b"null"):
        raise AnswerFailure("a stream event contains no part of an answer")
    return chunk, event if spelled is None else b"data: %b\n\n" % spelled


def _decoded(decoder: msgspec.json.Decoder[_T], data: bytes) -> tuple[_T, bytes | None]:
    """Decode an event's data. Also return it as strict JSON if only lenient parsers accept it (NaN), else None.

    Escaped lone surrogates are accepted unchanged, since a stream may split an emoji between two events.
    """
    try:
        _ = data.isascii() or data.decode()
        try:
            return decoder.decode(data), None
        except msgspec.ValidationError:
            raise
        except UNREADABLE:
            spelled = standard_json(data)
            return decoder.decode(json_bytes(json_of(data))), None if spelled == data else spelled
    except (*UNREADABLE, ValueError) as error:
        raise AnswerFailure(f"a stream event is not valid JSON of an answer: {error}") from error


def type_of(event: bytes) -> tuple[str, bytes]:
    """Return the type of a Responses, Messages or audio event, and the event as strict JSON. Raises AnswerFailure.

    The type is empty for comments and `[DONE]`.
    """
    data = sse.data_of(event)
    if data == b"[DONE]" or (not data and is_comment(event)):
        return "", event
    decoded, spelled = _decoded(_EVENT, data)
    held = decoded.response if decoded.type in _OF_RESPONSE else decoded.message
    if (decoded.type in _OF_RESPONSE or decoded.type == "message_start") and not bytes(held).startswith(b"{"):
        raise AnswerFailure(f"the event {decoded.type} contains no answer")
    if spelled is None:
        return decoded.type, event
    fields = (line for line in event.split(b"\n") if not line.startswith(b"data"))
    return decoded.type, b"\n".join((*fields, b"data: " + spelled))


def is_comment(event: bytes) -> bool:
    """Return whether an event without data consists of valid field lines; clients ignore such an event."""
    return all(line.startswith(_FIELD_LINES) for line in event.split(b"\n") if line)
