"""Compaction of long conversations: a summary by the model replaces the earlier items."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from ..decoding import read_object
from ..errors import UpstreamError, invalid_value
from ..http.lenient_json import object_of, objects_of
from .chat_chunks import text_of
from .responses_events import usage_of
from .responses_items import Item, compaction_of, items_of, since_compaction
from .responses_request import ResponsesRequest, TextOptions, chat_body, read_responses_request

_ASK = (
    "Summarize this conversation for a colleague who will continue it. Keep names, numbers, decisions, results of "
    "tools and open tasks. Write only the summary."
)


def read_compact_request(body: bytes) -> ResponsesRequest:
    """Check the body of `POST /v1/responses/compact`. Raises InvalidRequestError, for example without a model."""
    fields = read_object(body)
    if fields.get("model") is None:
        raise invalid_value("model", "is required")
    return read_responses_request({**fields, "stream": False})


def summary_body(request: ResponsesRequest, items: Sequence[Item]) -> bytes:
    """Return the body of the chat request for a summary of `items`."""
    plain: dict[str, Any] = {"stream": False, "tool_choice": "none", "text": TextOptions(), "include": None}
    asked = msgspec.structs.replace(request, **plain, max_output_tokens=None, top_logprobs=None)
    return msgspec.json.encode(chat_body(asked, [*items, *items_of(_ASK)]))


def compaction_by(completion: dict[str, Any], rest: Sequence[Item] = ()) -> Item:
    """Return an item that stands for the summary in `completion` and for `rest`. Raises UpstreamError."""
    messages = [object_of(choice.get("message")) for choice in objects_of(completion.get("choices"))]
    summary = "".join(text_of(message.get("content")) for message in messages)
    if not summary.strip():
        raise UpstreamError("The model wrote no summary of the conversation. Try again, or use another model.")
    return compaction_of([*items_of(f"Summary of the conversation so far:\n{summary}"), *rest])


def compacted_response(completion: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a compact request. Raises UpstreamError if the model wrote no summary."""
    return {
        "id": f"resp_{secrets.token_hex(24)}",
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [compaction_by(completion)],
        "usage": usage_of(object_of(completion.get("usage"))),
    }


def split_for_compaction(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Return the items to summarize, and the rest from the last user message on, which must stay unchanged."""
    whole = since_compaction(items)
    at = max((index for index, item in enumerate(whole) if item.get("role") == "user"), default=0)
    return whole[:at], whole[at:]
