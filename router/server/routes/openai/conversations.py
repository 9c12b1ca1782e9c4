"""`/v1/conversations`: stored lists of items, which responses with `conversation` continue."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from .....protocol.decoding import decode
from .....protocol.dialects.responses_items import Item, is_vendor_item, items_of
from .....protocol.dialects.responses_request import check_metadata
from .....protocol.errors import UnsupportedFeatureError
from .....protocol.http.wire import WireResponse
from ....storage.answer_store import StoredAnswer, missing, only
from ..route import PAGE_PARAMETERS, RequestContext, Route, list_of, page_in, page_of, query_of

_KIND = "conversation"
_LISTED = (*PAGE_PARAMETERS, "include")


class ConversationRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request to create or change a conversation, or to add items."""

    items: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])
    metadata: dict[str, str] = msgspec.field(default_factory=dict[str, str])


async def extend(context: RequestContext, conversation_id: str, items: Sequence[Item]) -> None:
    """Add items to a conversation. A private request makes the conversation private. Raises NotFoundError."""

    def extended(stored: StoredAnswer) -> StoredAnswer:
        is_private = stored.private or context.request.mark.is_private
        return replace(stored, input=[*stored.input, *items], private=is_private)

    await _change(context, conversation_id, extended)


async def mark_private(context: RequestContext, given: Sequence[Item]) -> None:
    """Mark the request as private if one of the items that the caller sends is of a stored private answer."""
    ids, mark = {str(item["id"]) for item in given if item.get("id")}, context.request.mark
    if ids and context.answers.enabled and not mark.is_private:
        mark.is_private = await context.answers.use(lambda store: store.has_private(context.owner, ids))


async def create(context: RequestContext) -> WireResponse:
    asked = _read(context)
    await mark_private(context, asked.items)
    conversation_id, now = f"conv_{secrets.token_hex(24)}", int(time.time())
    body = {"id": conversation_id, "object": _KIND, "created_at": now, "metadata": asked.metadata}
    items = items_of(asked.items)
    about, is_private = (conversation_id, now, "", asked.metadata), context.request.mark.is_private
    made = StoredAnswer(context.owner, _KIND, *about, body, items, private=is_private)
    await context.answers.use(lambda store: store.put(made))
    return WireResponse.json(body)


async def retrieve(context: RequestContext) -> WireResponse:
    return WireResponse.json((await context.stored(_KIND, context.parameters[_KIND])).body)


async def update(context: RequestContext) -> WireResponse:
    metadata = _read(context).metadata
    changed = await _change(context, context.parameters[_KIND], lambda each: each.with_metadata(metadata))
    return WireResponse.json(changed.body)


async def delete(context: RequestContext) -> WireResponse:
    conversation_id = context.parameters[_KIND]
    await context.answers.use(lambda store: store.delete(context.owner, _KIND, conversation_id))
    return WireResponse.json({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


async def add_items(context: RequestContext) -> WireResponse:
    given = _read(context).items
    await mark_private(context, given)
    items = items_of(given)
    await extend(context, context.parameters[_KIND], items)
    return list_of(items, has_more=False)


async def list_items(context: RequestContext) -> WireResponse:
    page = page_of(query_of(context.request.query, _LISTED), newest_first=True)
    return page_in((await context.stored(_KIND, context.parameters[_KIND])).input, page)


async def retrieve_item(context: RequestContext) -> WireResponse:
    item_id, items = context.parameters["item"], (await context.stored(_KIND, context.parameters[_KIND])).input
    return WireResponse.json(only([item for item in items if item["id"] == item_id], item_id))


async def delete_item(context: RequestContext) -> WireResponse:
    item_id = context.parameters["item"]

    def without(stored: StoredAnswer) -> StoredAnswer:
        kept = [item for item in stored.input if item["id"] != item_id]
        if len(kept) == len(stored.input):
            raise missing(item_id)
        return replace(stored, input=kept)

    return WireResponse.json((await _change(context, context.parameters[_KIND], without)).body)


async def _change(
    context: RequestContext, conversation_id: str, change: Callable[[StoredAnswer], StoredAnswer]
) -> StoredAnswer:
    return await context.answers.use(lambda store: store.change(context.owner, _KIND, conversation_id, change))


def _read(context: RequestContext) -> ConversationRequest:
    asked = decode(context.request.body or b"{}", ConversationRequest)
    check_metadata(asked.metadata)
    for index, item in enumerate(asked.items):
        if is_vendor_item(item) or item.get("type") == "item_reference":
            kind = str(item["type"])[:100]
            raise UnsupportedFeatureError(f"items[{index}]: {kind!r} items are not supported here.", param="items")
    return asked


_PATH = "/v1/conversations"
_CONVERSATION, _ITEMS = f"{_PATH}/{{conversation}}", f"{_PATH}/{{conversation}}/items"
ROUTES = (
    Route(f"POST {_PATH}", create, "a stored conversation; these routes need the setting `store`", ConversationRequest),
    Route(f"GET {_CONVERSATION}", retrieve, "one conversation"),
    Route(f"POST {_CONVERSATION}", update, "replace a conversation's metadata", ConversationRequest),
    Route(f"DELETE {_CONVERSATION}", delete, "delete a conversation"),
    Route(f"POST {_ITEMS}", add_items, "add items to a conversation", ConversationRequest),
    Route(f"GET {_ITEMS}", list_items, "items of a conversation", query=_LISTED),
    Route(f"GET {_ITEMS}/{{item}}", retrieve_item, "one item of a conversation"),
    Route(f"DELETE {_ITEMS}/{{item}}", delete_item, "delete an item of a conversation"),
)
