"""`/v1/messages` on a node: translates requests of Anthropic's Messages API to chat completions."""

from __future__ import annotations

import msgspec

from ....protocol.decoding import read_object
from ....protocol.dialects.messages_request import MessagesRequest, chat_body, read_count_request, read_messages_request


def read_message(body: bytes) -> tuple[MessagesRequest, bytes]:
    """Parse the request and return it with the body of the equivalent chat request. Raises InvalidRequestError."""
    asked = read_messages_request(read_object(body))
    return asked, msgspec.json.encode(chat_body(asked))


def read_count(body: bytes) -> bytes:
    """Return the equivalent chat request's body, to count its prompt tokens. Raises InvalidRequestError."""
    return msgspec.json.encode(chat_body(read_count_request(read_object(body))))
