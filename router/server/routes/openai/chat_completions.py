"""`/v1/chat/completions`: routed chat. Completions with `store: true` can be listed, updated and deleted later."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from .....protocol.decoding import decode, read_object, read_switches
from .....protocol.dialects.chat_chunks import ChatChunks
from .....protocol.dialects.responses_request import check_metadata
from .....protocol.hints import metadata_notes, storable
from .....protocol.http import sse
from .....protocol.http.lenient_json import json_bytes, json_of
from .....protocol.http.sse import TranslatedBody
from .....protocol.http.wire import WireResponse
from .....protocol.requests import ChatRequest
from .....protocol.responses import ChatCompletion
from ....storage.answer_store import StoredAnswer
from ...answers import not_stored
from ..route import PAGE_PARAMETERS, RequestContext, Route, list_of, page_in, page_of, query_of

_KIND = "chat.completion"
_LISTED = (*PAGE_PARAMETERS, "model", "metadata")


class MetadataUpdate(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a metadata update."""

    metadata: dict[str, str] = msgspec.field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class _StoredCompletion:
    """A completion to store."""

    context: RequestContext
    # Request body without `store` and `metadata`.
    body: dict[str, Any]
    metadata: Any

    async def keep(self, completion: dict[str, Any], completion_id: str) -> bool:
        """Add the ID and the metadata to the completion and store it. Return False if storing fails."""
        metadata = storable(self.metadata)
        completion |= {"id": completion_id, "metadata": metadata}
        messages = [{**each, "id": f"{completion_id}-{index}"} for index, each in enumerate(self.body["messages"])]
        about = completion_id, time.time(), str(completion.get("model")), metadata
        return await self.context.answers.keep(StoredAnswer(self.context.owner, _KIND, *about, completion, messages))


async def create(context: RequestContext) -> WireResponse:
    wanted = _completion_to_store(context)
    if wanted is None:
        return await context.router.chat(context.request)
    notes = metadata_notes(wanted.metadata)
    made = await context.router.chat(replace(context.request, body=msgspec.json.encode(wanted.body), hints=notes))
    if made.status != 200:
        return made
    completion_id = made.headers["x-request-id"]  # clouds may reuse their own IDs
    if not isinstance(made.body, bytes):
        return replace(made, body=TranslatedBody(made.body, lambda payloads: _events(wanted, payloads, completion_id)))
    completion: dict[str, Any] = json_of(made.body, exact=True)
    kept = await wanted.keep(completion, completion_id)
    return WireResponse.json(completion if kept else not_stored(completion), headers=made.headers)


def _completion_to_store(context: RequestContext) -> _StoredCompletion | None:
    """Return the completion to store, if any. If the router has no answer store, `store` is left to the cloud."""
    if not context.answers.enabled or b'"store"' not in context.request.body:
        return None
    body = read_object(context.request.body)
    read_switches(body, ChatRequest)
    if body.pop("store", None) is not True:
        return None
    return _StoredCompletion(context, body, body.pop("metadata", None))


async def _events(wanted: _StoredCompletion, payloads: AsyncIterator[bytes], own_id: str) -> AsyncGenerator[bytes]:
    """Yield the events with `own_id` as ID, but hold back the `updraft` object until the completion is stored."""
    chunks, failed, finish, last = ChatChunks(), False, None, list[bytes]()
    async for payload in payloads:
        chunk: dict[str, Any] = json_of(payload, exact=True)
        if "error" not in chunk and chunk.get("id") != own_id:
            chunk["id"] = own_id
            payload = json_bytes(chunk)  # noqa: PLW2901
        chunks.read(chunk)
        failed = failed or "error" in chunk
        finish = finish or (chunk if "updraft" in chunk else None)
        if finish is None:
            yield b"data: " + payload + b"\n\n"
        else:
            last.append(payload)
    completion = chunks.whole()
    if not failed and not await wanted.keep(completion, own_id) and finish is not None:
        last[0] = json_bytes(not_stored(finish))
    for payload in last:
        yield b"data: " + payload + b"\n\n"
    if not failed:
        yield sse.DONE


async def list_stored(context: RequestContext) -> WireResponse:
    owner, query = context.owner, query_of(context.request.query, _LISTED)
    metadata = {name[len("metadata[") : -1]: value for name, value in query.items() if name.startswith("metadata[")}
    page = page_of(query, newest_first=False)
    answers, more = await context.answers.use(
        lambda store: store.page(owner, _KIND, page, model=query.get("model"), metadata=metadata)
    )
    return list_of([each.body for each in answers], has_more=more)


async def retrieve(context: RequestContext) -> WireResponse:
    return WireResponse.json((await context.stored(_KIND, context.parameters["completion"])).body)


async def update(context: RequestContext) -> WireResponse:
    metadata = decode(context.request.body, MetadataUpdate).metadata
    check_metadata(metadata)
    owner, completion_id = context.owner, context.parameters["completion"]
    changed = await context.answers.use(
        lambda store: store.change(owner, _KIND, completion_id, lambda each: each.with_metadata(metadata))
    )
    return WireResponse.json(changed.body)


async def delete(context: RequestContext) -> WireResponse:
    completion_id = context.parameters["completion"]
    await context.answers.use(lambda store: store.delete(context.owner, _KIND, completion_id))
    return WireResponse.json({"id": completion_id, "object": "chat.completion.deleted", "deleted": True})


async def list_messages(context: RequestContext) -> WireResponse:
    page = page_of(query_of(context.request.query, PAGE_PARAMETERS), newest_first=False)
    stored = await context.stored(_KIND, context.parameters["completion"])
    return page_in([_shown(message) for message in stored.input], page)


def _shown(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as OpenAI lists it, with multi-part content under `content_parts`."""
    if not isinstance(message.get("content"), list):
        return {"content": None, "refusal": None, "content_parts": None, **message}
    return {**message, "refusal": None, "content": None, "content_parts": message["content"]}


_STORED = "/v1/chat/completions/{completion}"
ROUTES = (
    Route("POST /v1/chat/completions", create, "routed chat", ChatRequest, ChatCompletion, streams=True),
    Route(
        "GET /v1/chat/completions",
        list_stored,
        "completions stored with `store: true`; these five routes need the setting `store`",
        query=_LISTED,
    ),
    Route(f"GET {_STORED}", retrieve, "one stored completion"),
    Route(f"POST {_STORED}", update, "update its `metadata`", MetadataUpdate),
    Route(f"DELETE {_STORED}", delete, "delete it"),
    Route(f"GET {_STORED}/messages", list_messages, "messages of the request", query=PAGE_PARAMETERS),
)
