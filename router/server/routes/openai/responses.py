"""`/v1/responses`: routed chat in OpenAI's Responses API."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from .....protocol.decoding import read_object
from .....protocol.dialects.chat_chunks import framed
from .....protocol.dialects.responses_events import (
    ResponseEvents,
    begun_response,
    compacted_response,
    compaction_by,
    read_compact_request,
    split_for_compaction,
    streamed_response,
    summary_body,
    whole_response,
)
from .....protocol.dialects.responses_items import Item, is_private, items_of, since_compaction, with_own_ids
from .....protocol.dialects.responses_request import ResponsesRequest, chat_body, prompt_body, read_responses_request
from .....protocol.errors import InvalidRequestError, NotFoundError, UpdraftError, UpstreamError, invalid_value
from .....protocol.http import sse
from .....protocol.http.lenient_json import json_of
from .....protocol.http.sse import TranslatedBody
from .....protocol.http.wire import PrivacyMark, WireRequest, WireResponse, off_event_loop
from ....responses import completion as answer
from ....storage.answer_store import StoredAnswer
from ...answers import BackgroundResponse, is_ended, not_stored
from ..route import PAGE_PARAMETERS, RequestContext, Route, page_in, page_of, query_of, recorded, switch_of, translated
from . import tokens
from .conversations import extend, mark_private

log = logging.getLogger("updraft.router")

_KIND = "response"
_ANSWERED = ("completed", "incomplete")
_RETRIEVED = ("include", "include_obfuscation", "starting_after", "stream")
_LISTED = (*PAGE_PARAMETERS, "include")


@dataclass(frozen=True, slots=True)
class _Creation:
    """A response to create."""

    context: RequestContext
    asked: ResponsesRequest
    # Items of the whole conversation before the answer.
    items: list[Item]
    # Number of the first items that are stored already.
    known: int
    # Equivalent chat request.
    chat: WireRequest
    # Response so far.
    response: dict[str, Any]

    def read(self, made: WireResponse, events: Callable[[AsyncIterator[bytes]], AsyncGenerator[bytes]]) -> WireResponse:
        """Return `made` with its stream translated by `events`. If `made` is no stream, complete `response` from it."""
        if not isinstance(made.body, bytes):
            return replace(made, body=TranslatedBody(made.body, events))
        whole_response(self.response, json_of(made.body, exact=True))
        return made

    async def keep(self, events: Sequence[bytes] = ()) -> bool:
        """Store the response and extend its conversation, as requested. On failure unset `store` and return False."""
        response, unstored = self.response, self.context.request.unstored
        stored = _stored(self.context.owner, response, self.items, events, self.chat.mark)
        if unstored is not None and response["status"] in _ANSWERED:
            unstored.clear()
            unstored[stored.id] = stored
        if await self._extend() and (not response["store"] or await self.context.answers.keep(stored)):
            return True
        response["store"] = False
        if "updraft" in response:
            response.update(not_stored(response))
        return False

    async def _extend(self) -> bool:
        conversation, response = self.asked.conversation_id, self.response
        if conversation is not None and response["status"] in _ANSWERED:
            try:
                await extend(self.context, conversation, [*self.items[self.known :], *response["output"]])
            except (sqlite3.Error, UpdraftError) as error:
                log.error("cannot add response %r to its conversation: %s", response["id"], error)
                return False
        return True


async def create(context: RequestContext) -> WireResponse:
    body = context.request.body
    asked = await off_event_loop(body, lambda: read_responses_request(read_object(body)))
    if asked.store or asked.background:
        context.answers.wanted("background" if asked.background else "store")
    if asked.background and asked.store is False:
        raise InvalidRequestError("background needs store=true to retrieve the response.", param="background")
    items, known = await _conversation(context, asked)
    response = begun_response(asked, stored=context.answers.enabled and asked.store is not False)
    response["output"] += await _compaction(context, asked, items)
    shown = [*items, *response["output"]]
    translated = await off_event_loop(body, lambda: msgspec.json.encode(chat_body(asked, shown)))
    chat = replace(context.request, body=translated, hints=asked.hints, names=asked.names)
    creation = _Creation(context, asked, items, known, chat, response)
    if asked.background or not asked.generate:  # may be stored before the router has read the request
        await context.router.mark(chat)
    if asked.background:
        await context.answers.use(lambda _: None)  # fail now if the store is unusable
        return _begin(creation)
    if not asked.generate:
        events = ResponseEvents(response)
        streamed = b"".join([*events.begin(), *events.finish(None)])
        await creation.keep()
        return WireResponse(200, sse.HEADERS, _replayed(streamed)) if asked.stream else WireResponse.json(response)
    made = await context.router.chat(chat, partial(creation.read, events=partial(_events, creation)))
    if made.status != 200 or not isinstance(made.body, bytes):
        return made
    await creation.keep()
    return WireResponse.json(response, headers=made.headers)


async def input_tokens(context: RequestContext) -> WireResponse:
    """Count tokens with the tokenizer of the device's model; a cloud model may count differently."""
    body = context.request.body
    asked = await off_event_loop(body, lambda: read_responses_request(read_object(body)))
    items, _ = await _conversation(context, asked)
    chat = await off_event_loop(body, lambda: msgspec.json.encode(prompt_body(asked, items)))
    return WireResponse.json(await tokens.count_input(context, chat))


async def compact(context: RequestContext) -> WireResponse:
    """Let the model summarize the conversation."""
    body = context.request.body
    asked = await off_event_loop(body, lambda: read_compact_request(body))
    items, _ = await _conversation(context, asked)
    chat = replace(context.request, body=summary_body(asked, items), hints=asked.hints)
    mark = context.request.mark
    return await context.router.chat(
        chat, lambda made: translated(made, partial(compacted_response, private=mark.is_private))
    )


async def _compaction(context: RequestContext, asked: ResponsesRequest, items: list[Item]) -> list[Item]:
    """Compact the items before the last user message if the prompt exceeds the request's threshold. Return the
    compaction item. If the model fails, return nothing, since the answer may still succeed."""
    threshold = asked.compact_threshold
    earlier, rest = split_for_compaction(items) if threshold is not None else ([], [])
    if threshold is None or not earlier:
        return []
    if await tokens.prompt_tokens(context, msgspec.json.encode(prompt_body(asked, items))) < threshold:
        return []
    made = await context.router.chat(replace(context.request, body=summary_body(asked, earlier)))
    if made.status != 200 or not isinstance(made.body, bytes):
        return []
    try:
        return [compaction_by(json_of(made.body), rest, private=context.request.mark.is_private)]
    except UpstreamError as error:
        log.warning("the conversation was not compacted: %s", error.message)
        return []


async def _conversation(context: RequestContext, asked: ResponsesRequest) -> tuple[list[Item], int]:
    """Return the items before the answer, and how many are stored. Mark the request if an item is of a private request.
    Raises NotFoundError, InvalidRequestError."""
    if (asked.input, asked.previous_response_id, asked.conversation) == (None, None, None) and not asked.instructions:
        raise InvalidRequestError("input is required.", param="input", code="invalid_value")
    earlier, added = await _earlier(context, asked), items_of([] if asked.input is None else asked.input)
    referred = {item["id"] for item in added if item["type"] == "item_reference"}
    known, mark = dict[str, Item](), context.request.mark
    if referred:
        try:
            known, is_marked = await context.answers.use(lambda store: store.items(context.owner, referred))
        except NotFoundError as error:
            raise NotFoundError(error.message, param="input", code=error.code) from error
        mark.is_private |= is_marked
    items = with_own_ids([*earlier, *(known.get(item["id"], item) for item in added)])
    mark.is_private |= is_private(items)
    await mark_private(context, asked.input if isinstance(asked.input, list) else ())
    if earlier:
        calls = {item.get("call_id") for item in since_compaction(items) if item["type"] == "function_call"}
        for index, item in enumerate(added):
            if item["type"] == "function_call_output" and item["call_id"] not in calls:
                raise invalid_value(f"input[{index}].call_id", "no function call in this conversation has this ID")
    return items, len(earlier)


async def _earlier(context: RequestContext, asked: ResponsesRequest) -> list[Item]:
    """Return the items of the conversation or the previous response. Raises NotFoundError or InvalidRequestError."""
    previous, conversation = asked.previous_response_id, asked.conversation_id
    if conversation is not None:
        if previous is not None:
            raise invalid_value("conversation", "leave out previous_response_id or conversation")
        context.answers.wanted("conversation")
        held = await context.stored("conversation", conversation)
        context.request.mark.is_private |= held.private
        return held.input
    if previous is None:
        return []
    if context.answers.running(context.owner, previous) is not None:
        raise InvalidRequestError(f"{previous} is still running. Wait for it to end.", param="previous_response_id")
    stored: StoredAnswer | None = (context.request.unstored or {}).pop(previous, None)
    try:
        stored = stored or await context.stored(_KIND, previous)
    except NotFoundError as error:
        code = "previous_response_not_found"
        raise NotFoundError(error.message, param="previous_response_id", code=code) from error
    context.request.mark.is_private |= stored.private
    return [*stored.input, *stored.body["output"]]


async def _events(creation: _Creation, payloads: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the events. The response is stored before its last event, so that clients can then retrieve it."""
    async with aclosing(streamed_response(creation.response, payloads)) as steps:
        async for events, response in steps:
            if is_ended(response) and not await creation.keep():
                last = json_of(events[-1].partition(b"data: ")[2], exact=True)
                events[-1] = framed({**last, "response": response})
            yield b"".join(events)


def _begin(creation: _Creation) -> WireResponse:
    """Start the response in the background. Raises OverloadedError."""
    response, streamed = creation.response, creation.asked.stream
    owner, mark = creation.context.owner, creation.chat.mark
    running = BackgroundResponse(owner, response, creation.items, streamed, mark=mark)
    response["status"] = "queued"
    queued = WireResponse.json(response)
    creation.context.answers.begin(running, _run(creation, running))
    return WireResponse(200, sse.HEADERS, running.follow(-1)) if streamed else queued


async def _run(creation: _Creation, running: BackgroundResponse) -> None:
    """Create the response without a timeout, since no client waits. A shutdown discards it."""
    response = creation.response
    response["status"] = "in_progress"
    try:
        chat, events = replace(creation.chat, timeout_s=None), partial(_logged, running)
        made = await creation.context.router.chat(chat, partial(creation.read, events=events))
        if not isinstance(made.body, bytes):
            async for _ in made.body:
                pass
        elif made.status != 200:
            running.fail(msgspec.json.decode(made.body)["error"])
    except Exception:
        log.exception("background response %s failed", response["id"])
        running.fail(answer.internal_error().to_body()["error"])
    await creation.keep(running.events)


async def _logged(running: BackgroundResponse, payloads: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    async with aclosing(streamed_response(running.response, payloads)) as steps:
        async for events, _ in steps:
            running.add(events)
            yield b""


async def retrieve(context: RequestContext) -> WireResponse:
    query = query_of(context.request.query, _RETRIEVED)
    streams = switch_of(query, "stream")
    running, after = _running(context), _starting_after(query)
    if running is not None and not streams:
        return WireResponse.json(running.response)
    if running is not None and running.streamed:
        return WireResponse(200, sse.HEADERS, running.follow(after))
    stored = None if running is not None else await context.stored(_KIND, context.parameters["response"])
    if stored is not None and not streams:
        return WireResponse.json(stored.body)
    if stored is None or not stored.events:
        raise InvalidRequestError("Only a response created with background and stream can be streamed.", param="stream")
    return WireResponse(200, sse.HEADERS, _replayed("".join(stored.events[after + 1 :]).encode()))


def _starting_after(query: dict[str, str]) -> int:
    given = query.get("starting_after", "-1")
    if given != "-1" and not (given.isascii() and given.isdecimal() and len(given) < 10):
        raise InvalidRequestError("starting_after must be an event number.", param="starting_after")
    return int(given)


async def _replayed(events: bytes) -> AsyncGenerator[bytes]:
    yield events


async def delete(context: RequestContext) -> WireResponse:
    response_id, running = context.parameters["response"], _running(context)
    if running is not None:
        await running.cancel()
    if running is None or is_ended(running.response):
        await context.answers.use(lambda store: store.delete(context.owner, _KIND, response_id))
    return WireResponse.json({"id": response_id, "object": "response", "deleted": True})


async def cancel(context: RequestContext) -> WireResponse:
    running = _running(context)
    if running is None:
        stored = await context.stored(_KIND, context.parameters["response"])
        if not stored.body["background"]:
            raise InvalidRequestError("Only a response created with background=true can be cancelled.")
        return WireResponse.json(stored.body)
    await running.cancel()
    response = running.response
    if not is_ended(response):
        response["status"] = "cancelled"
        stored = _stored(running.owner, response, running.input, running.events, running.mark)
        await context.answers.keep(stored)
    return WireResponse.json(response)


async def input_items(context: RequestContext) -> WireResponse:
    page, running = page_of(query_of(context.request.query, _LISTED), newest_first=True), _running(context)
    items = (await context.stored(_KIND, context.parameters["response"])).input if running is None else running.input
    return page_in(items, page)


def _running(context: RequestContext) -> BackgroundResponse | None:
    return context.answers.running(context.owner, context.parameters["response"])


def _stored(
    owner: str, response: dict[str, Any], items: list[Item], events: Sequence[bytes], mark: PrivacyMark
) -> StoredAnswer:
    about = response["id"], response["created_at"], response["model"], response["metadata"]
    return StoredAnswer(
        owner, _KIND, *about, response, items, [event.decode() for event in events], private=mark.is_private
    )


ROUTES = (
    Route("POST /v1/responses", recorded(create),
          "routed chat in OpenAI's Responses API", ResponsesRequest, streams=True),
    Route("POST /v1/responses/input_tokens", input_tokens, "number of tokens, by the device's tokenizer",
          ResponsesRequest, tokens.InputTokens),
    Route("POST /v1/responses/compact", recorded(compact),
          "summary of a conversation, to continue from", ResponsesRequest),
    Route("GET /v1/responses/{response}", retrieve, "a stored response; these four routes need the setting `store`",
          streams=True, query=_RETRIEVED),
    Route("DELETE /v1/responses/{response}", delete, "delete a stored response"),
    Route("POST /v1/responses/{response}/cancel", cancel, "cancel a background response"),
    Route("GET /v1/responses/{response}/input_items", input_items, "items that the response answers",
          query=_LISTED),
)  # fmt: skip
