"""`/v1/responses` on a node: stateless responses, translated to chat completions and back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ....protocol.decoding import read_object, unsupported
from ....protocol.dialects.responses_events import (
    begun_response,
    compacted_response,
    read_compact_request,
    streamed_response,
    summary_body,
    whole_response,
)
from ....protocol.dialects.responses_items import Item, items_of
from ....protocol.dialects.responses_request import ResponsesRequest, chat_body, prompt_body, read_responses_request
from ....protocol.errors import InvalidRequestError
from ....protocol.http.sse import TranslatedBody
from ....protocol.http.wire import WireResponse


@dataclass(frozen=True, slots=True)
class StatelessResponse:
    """A response in progress that is not stored."""

    # Body of the equivalent chat request.
    chat: bytes
    # Fields of the response known so far.
    response: dict[str, Any]
    # Notes on fields of the request that have no effect.
    hints: tuple[str, ...]
    # Fields of the chat request, each with the name that the client used.
    names: dict[str, str]


def read_stateless(body: bytes) -> StatelessResponse:
    """Parse a Responses request. Raises InvalidRequestError, also for features that need stored responses."""
    asked, items = _read(body)
    return StatelessResponse(
        msgspec.json.encode(chat_body(asked, items)),
        begun_response(asked, stored=False),
        (*asked.hints, *(["context_management: no effect"] if asked.compact_threshold else [])),
        asked.names,
    )


def read_prompt(body: bytes) -> bytes:
    """Return the equivalent chat request's body, for counting prompt tokens. Raises the errors of `read_stateless`."""
    return msgspec.json.encode(prompt_body(*_read(body)))


def read_compact(body: bytes) -> bytes:
    """Return the body of a chat request that asks for a summary. Raises the errors of `read_stateless`."""
    return summary_body(*_checked(read_compact_request(body)))


def compacted(answer: WireResponse) -> WireResponse:
    """Translate a chat answer with a summary into the answer to a compact request. Raises UpstreamError."""
    assert isinstance(answer.body, bytes), "summaries are not streamed"
    return WireResponse.json(compacted_response(msgspec.json.decode(answer.body)))


def _read(body: bytes) -> tuple[ResponsesRequest, list[Item]]:
    return _checked(read_responses_request(read_object(body)))


def _checked(asked: ResponsesRequest) -> tuple[ResponsesRequest, list[Item]]:
    for param in ("store", "background", "previous_response_id", "conversation"):
        if getattr(asked, param):
            raise unsupported(param)
    items = items_of([] if asked.input is None else asked.input)
    for index, item in enumerate(items):
        if item["type"] == "item_reference":
            raise unsupported(f"input[{index}].id")
    if not items and not asked.instructions:
        raise InvalidRequestError("input is required.", param="input", code="invalid_value")
    return asked, items


def translated(asked: StatelessResponse, answer: WireResponse) -> WireResponse:
    """Translate the answer of the chat request into a Response or its stream of events."""
    if isinstance(answer.body, bytes):
        return WireResponse.json(whole_response(asked.response, msgspec.json.decode(answer.body)))
    return replace(answer, body=TranslatedBody(answer.body, lambda payloads: _events(asked.response, payloads)))


async def _events(response: dict[str, Any], payloads: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    async with aclosing(streamed_response(response, payloads)) as steps:
        async for events, _ in steps:
            yield b"".join(events)
