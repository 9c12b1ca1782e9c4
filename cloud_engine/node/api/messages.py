"""`/v1/messages` on a node: translates Anthropic's Messages API to chat completions and back."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ....protocol.decoding import read_object
from ....protocol.dialects.bodies import TranslatedBody
from ....protocol.dialects.messages_events import streamed_message, whole_message
from ....protocol.dialects.messages_request import MessagesRequest, chat_body, read_count_request, read_messages_request
from ....protocol.http.wire import WireResponse


def read_message(body: bytes) -> tuple[MessagesRequest, bytes]:
    """Parse the request and return it with the body of the equivalent chat request. Raises InvalidRequestError."""
    asked = read_messages_request(read_object(body))
    return asked, msgspec.json.encode(chat_body(asked))


def read_count(body: bytes) -> bytes:
    """Return the equivalent chat request's body, to count its prompt tokens. Raises InvalidRequestError."""
    return msgspec.json.encode(chat_body(read_count_request(read_object(body))))


def message_of(asked: MessagesRequest, answer: WireResponse, prompt_tokens: int) -> WireResponse:
    """Translate the answer of the chat request into a message or its stream of events. Raises UpstreamError."""
    if isinstance(answer.body, bytes):
        return WireResponse.json(whole_message(asked, msgspec.json.decode(answer.body)))

    async def count() -> int:
        return prompt_tokens

    return replace(answer, body=TranslatedBody(answer.body, lambda payloads: streamed_message(asked, payloads, count)))
