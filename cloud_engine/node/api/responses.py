"""`/v1/responses` on a node: created from what the request says, and kept nowhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ....protocol.decoding import read_object, unsupported
from ....protocol.dialects.bodies import TranslatedBody
from ....protocol.dialects.responses_events import begun_response, streamed_response, whole_response
from ....protocol.dialects.responses_items import items_of
from ....protocol.dialects.responses_request import chat_body, read_responses_request
from ....protocol.errors import InvalidRequestError
from ....protocol.http.wire import WireResponse


@dataclass(frozen=True, slots=True)
class StatelessResponse:
    """A response that is to be made."""

    # The body of the chat request that asks the same.
    chat: bytes
    # As far as it has come.
    response: dict[str, Any]


def read_stateless(body: bytes) -> StatelessResponse:
    """Raises InvalidRequestError, also for what would need a memory."""
    asked = read_responses_request(read_object(body))
    for param in ("store", "background", "previous_response_id"):
        if getattr(asked, param):
            raise unsupported(param)
    items = items_of(asked.input or [])
    for index, item in enumerate(items):
        if item["type"] == "item_reference":
            raise unsupported(f"input[{index}].id")
    if not items:
        raise InvalidRequestError("input is required.", param="input", code="invalid_value")
    return StatelessResponse(msgspec.json.encode(chat_body(asked, items)), begun_response(asked, stored=False))


def translated(asked: StatelessResponse, answer: WireResponse) -> WireResponse:
    """The answer to the chat request, as a Response or as the events of one."""
    if isinstance(answer.body, bytes):
        return WireResponse.json(whole_response(asked.response, msgspec.json.decode(answer.body)))
    return replace(answer, body=TranslatedBody(answer.body, lambda payloads: _events(asked.response, payloads)))


async def _events(response: dict[str, Any], payloads: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    async with aclosing(streamed_response(response, payloads)) as steps:
        async for events, _ in steps:
            yield b"".join(events)
