"""Validation of node answers before relaying: JSON of the expected shape, and well-formed events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from ....protocol.decoding import UNREADABLE, prepare_types
from ....protocol.errors import UpstreamError
from ....protocol.http import sse
from ....protocol.http.lenient_json import error_in, json_bytes, json_of, object_of, standard_json
from ....protocol.validation_messages import plain_words
from ..upstream.client import Response
from ..upstream.failures import AnswerFailure
from .answer_types import (
    REQUIRED,
    NodeChatCompletion,
    NodeChunk,
    NodeCompletion,
    NodeEmbedding,
    NodeEmbeddings,
    NodeEvent,
    NodeMessage,
    NodeModerations,
    NodeRanking,
    NodeResponse,
    NodeTextCompletion,
    NodeTokenCount,
    WrittenFields,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS, RERANK, MODERATIONS = "/v1/embeddings", "/v1/rerank", "/v1/moderations"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT_TOKENS, INPUT_TOKENS = "/v1/messages/count_tokens", "/v1/responses/input_tokens"
EVENTS = b"text/event-stream"
_FIELD_LINES = (b":", b"data", b"event", b"id", b"retry")
WithoutKey = Callable[[bytes], bytes]
"""Replaces the node's API key in the node's output."""

_NUMBERS = b"0123456789.+-eE, \t\r\n[]"  # all bytes of a JSON list of numbers
_T = TypeVar("_T")


class _Fault(msgspec.Struct):
    error: Any = None


prepare_types(_Fault)
_CHUNK, _EVENT = msgspec.json.Decoder(NodeChunk), msgspec.json.Decoder(NodeEvent)
_WRITTEN = msgspec.json.Decoder(WrittenFields)
_WHOLE: dict[str, msgspec.json.Decoder[Any]] = {
    CHAT: msgspec.json.Decoder(NodeChatCompletion),
    COMPLETIONS: msgspec.json.Decoder(NodeTextCompletion),
    EMBEDDINGS: msgspec.json.Decoder(NodeEmbeddings),
    RERANK: msgspec.json.Decoder(NodeRanking),
    MODERATIONS: msgspec.json.Decoder(NodeModerations),
    RESPONSES: msgspec.json.Decoder(NodeResponse),
    MESSAGES: msgspec.json.Decoder(NodeMessage),
    **dict.fromkeys((COUNT_TOKENS, INPUT_TOKENS), msgspec.json.Decoder(NodeTokenCount)),
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
        # msgspec does not validate UTF-8 in fields that it skips, and lenient parsers replace invalid bytes
        _ = body.isascii() or body.decode(json.detect_encoding(body))
    except UnicodeDecodeError as error:
        raise AnswerFailure("the body is not UTF-8") from error
    try:
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
    """Return the body of an answer. Choices of a completion that lack a finish reason get one. Raises AnswerFailure if
    such a choice ends within a function call."""
    unfinished = [choice for choice in getattr(answer, "choices", ()) if not choice.finish_reason]
    if not unfinished:
        return body
    if isinstance(answer, NodeChatCompletion):
        check_arguments(text.encode() for choice in unfinished for _, text in choice.message.arguments)
    fields = json_of(body, exact=True)
    for choice in fields["choices"]:
        calls = object_of(choice.get("message")).get("tool_calls")
        choice["finish_reason"] = choice.get("finish_reason") or ("tool_calls" if calls else "stop")
    return json_bytes(fields)


def check_arguments(calls: Iterable[bytes]) -> None:
    """Raises AnswerFailure unless the arguments of all function calls are whole: valid JSON, or empty."""
    for arguments in calls:
        try:
            _ = json_of(arguments or b"{}")
        except ValueError as error:
            raise AnswerFailure("the answer ended within a tool call") from error


def _check_shape(decoder: msgspec.json.Decoder[Any], body: bytes, route: str) -> Any:
    """Decode the body. Raises a msgspec error, a subclass of ValueError, if it does not have the expected shape."""
    answer = decoder.decode(body)
    if isinstance(answer, NodeCompletion) and answer.error:
        raise msgspec.ValidationError("the answer reports an error")
    if isinstance(answer, NodeEmbeddings) and not all(map(_is_vector, answer.data)):
        raise msgspec.ValidationError("`embedding` is neither a list of numbers nor a text")
    if isinstance(answer, NodeRanking) and answer.results is None and answer.data is None:
        raise msgspec.ValidationError(f"`results` is missing in the answer of {route}")
    return answer


def _is_vector(item: NodeEmbedding) -> bool:
    """Return whether an embedding is a list of numbers or a base64 text. Its numbers are not decoded."""
    value = bytes(item.embedding)
    return value.startswith(b'"') or (value.startswith(b"[") and not value.translate(None, _NUMBERS))


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
    if chunk.choices is chunk.error is chunk.object is chunk.usage is None:
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


def written_bytes(data: bytes) -> int:
    """Return the bytes of generated text in the data of an event that `chunk_of` or `event_of` has accepted."""
    try:
        return _WRITTEN.decode(data).text_bytes
    except UNREADABLE:  # lone surrogates
        return _WRITTEN.decode(json_bytes(json_of(data))).text_bytes


def event_of(event: bytes) -> tuple[NodeEvent, bytes]:
    """Decode a Responses, Messages or audio event. Also return the event as strict JSON. Raises AnswerFailure.

    The type is empty for comments and `[DONE]`.
    """
    data = sse.data_of(event)
    if data == b"[DONE]" or (not data and is_comment(event)):
        return NodeEvent(""), event
    decoded, spelled = _decoded(_EVENT, data)
    name, kind = REQUIRED.get(decoded.type, ("type", str))
    if not isinstance(getattr(decoded, name), kind):
        raise AnswerFailure(f"the event {decoded.type} lacks a valid `{name}`")
    if spelled is None:
        return decoded, event
    fields = (line for line in event.split(b"\n") if not line.startswith(b"data"))
    return decoded, b"\n".join((*fields, b"data: " + spelled))


def is_comment(event: bytes) -> bool:
    """Return whether an event without data consists of valid field lines; clients ignore such an event."""
    return all(line.startswith(_FIELD_LINES) for line in event.split(b"\n") if line)
