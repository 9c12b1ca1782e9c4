"""`/v1/messages`: routed chat in Anthropic's Messages API."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from ....protocol.decoding import read_object
from ....protocol.dialects.messages_events import message_of
from ....protocol.dialects.messages_request import MessagesRequest, chat_body, read_count, read_messages_request
from ....protocol.http.forwarding import NativeRequest
from ....protocol.http.wire import WireRequest, WireResponse, off_event_loop
from .openai.tokens import count_input, prompt_tokens
from .route import RequestContext, Route


async def create(context: RequestContext) -> WireResponse:
    request = context.request
    asked, chat = await off_event_loop(request.body, lambda: _read(request))
    count = partial(prompt_tokens, context, chat.body)
    return await context.router.chat(chat, lambda made: message_of(asked, made, count))


async def count_tokens(context: RequestContext) -> WireResponse:
    """Count tokens with the tokenizer of the device's model; a cloud model may count differently."""
    request = context.request
    body = await off_event_loop(request.body, lambda: read_count(request.body))
    return WireResponse.json(msgspec.structs.replace(await count_input(context, body), object=UNSET))


def _read(request: WireRequest) -> tuple[MessagesRequest, WireRequest]:
    """Return the request, and the equivalent chat request without Anthropic's headers."""
    fields = read_object(request.body, exact="input")
    asked = read_messages_request(fields)
    own = {name: text for name, text in request.headers.items() if name == "anthropic-beta"}
    headers = {name: value for name, value in request.headers.items() if not name.startswith("anthropic-")}
    native = NativeRequest("anthropic", fields, headers=own)
    told: dict[str, Any] = {"hints": asked.hints, "names": asked.names, "native": native}
    return asked, replace(request, body=msgspec.json.encode(chat_body(asked)), headers=headers, **told)


ROUTES = (
    Route("POST /v1/messages", create, "routed chat in Anthropic's Messages API", MessagesRequest, streams=True),
    Route("POST /v1/messages/count_tokens", count_tokens, "number of tokens, by the device's tokenizer"),
)
