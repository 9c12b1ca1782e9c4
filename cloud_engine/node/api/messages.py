"""`/v1/messages` on a node: a chat in the words of Anthropic's Messages API."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ....protocol.decoding import read_object
from ....protocol.dialects.bodies import TranslatedBody
from ....protocol.dialects.messages_events import streamed_message, whole_message
from ....protocol.dialects.messages_request import (
    MessagesRequest,
    chat_body,
    read_count_request,
    read_messages_request,
)
from ....protocol.http.wire import WireResponse


def read_message(body: bytes) -> tuple[MessagesRequest, bytes]:
    """The request, and the body of the chat request that asks the same. Raises InvalidRequestError."""
    asked = read_messages_request(read_object(body))
    return asked, msgspec.json.encode(chat_body(asked))


def read_count(body: bytes) -> bytes:
    """The body of the chat request whose prompt is to be counted. Raises InvalidRequestError."""
    return msgspec.json.encode(chat_body(read_count_request(read_object(body))))


def message_of(asked: MessagesRequest, answer: WireResponse) -> WireResponse:
    """The answer to the chat request, as a message or as the events of one. Raises UpstreamError."""
    if isinstance(answer.body, bytes):
        return WireResponse.json(whole_message(asked, msgspec.json.decode(answer.body)))
    return replace(answer, body=TranslatedBody(answer.body, lambda payloads: streamed_message(asked, payloads)))
