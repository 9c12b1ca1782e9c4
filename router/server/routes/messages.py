"""`/v1/messages`: routed chat in Anthropic's Messages API, and its batches on the worker of `/v1/batches`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Any

import msgspec
from msgspec import UNSET

from ....accounting.budget import DAY_S
from ....protocol.decoding import convert, read_object
from ....protocol.dialects.messages_events import message_of
from ....protocol.dialects.messages_request import MessagesRequest, chat_body, read_count, read_messages_request
from ....protocol.errors import InvalidRequestError, invalid_value
from ....protocol.http.forwarding import NativeRequest
from ....protocol.http.lenient_json import json_keeping, json_line
from ....protocol.http.wire import WireRequest, WireResponse, off_event_loop
from ...storage.batch_store import Batch, BatchStore, RequestCounts
from ...storage.file_store import FileMetadata
from ..batches.lines import MESSAGES_PATH, check_lines, read_line, read_lines
from ..batches.run import MESSAGES, Stores
from .openai.batches import check_key, find, new_batch
from .openai.files import BATCH_DAYS
from .openai.tokens import count_input, prompt_tokens
from .route import RequestContext, Route, page_of, query_of, recorded

_PATH = f"{MESSAGES_PATH}/batches"
_KEPT_S = BATCH_DAYS * DAY_S
_LISTED = ("limit", "after_id")
_MAX_LISTED, _LINES_AT_ONCE = 1000, 100


async def answer(context: RequestContext) -> WireResponse:
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


class MessageBatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request to create a batch: objects with a `custom_id` and the `params` of a message."""

    requests: list[dict[str, Any]]


async def create(context: RequestContext) -> WireResponse:
    check_key(context)
    fields, owner = read_object(context.request.body), _owner(context)
    convert(fields, MessageBatchRequest)
    batch = await context.batches.use(lambda stores: _create(stores, owner, fields["requests"]))
    context.batches.work()
    return _shown(batch)


def _create(stores: Stores, owner: str, requests: list[dict[str, Any]]) -> Batch:
    """Write the requests to a file, as in OpenAI's batches, and create the batch. Raises InvalidRequestError."""
    writer = stores.files.begin(owner)
    bodies = {"method": "POST", "url": MESSAGES_PATH}
    lines = [{**bodies, "custom_id": each.get("custom_id"), "body": each.get("params")} for each in requests]
    try:
        with closing(writer):
            writer.write(b"".join(map(json_line, lines)))
        total, errors = check_lines(stores.files.path(writer.id), MESSAGES_PATH)
        if errors:
            raise invalid_value(f"requests[{(errors[0].line or 1) - 1}]", errors[0].message.rstrip("."))
        stores.files.complete(writer.id, FileMetadata(writer.size, "requests.jsonl", "batch", _KEPT_S))
    except BaseException:
        stores.files.discard(writer.id)
        raise
    batch = new_batch("msgbatch", MESSAGES_PATH, writer.id, request_counts=RequestCounts(total))
    stores.batches.create(owner, batch, _KEPT_S)
    return batch


async def list_batches(context: RequestContext) -> WireResponse:
    owner, query = _owner(context), query_of(context.request.query, _LISTED)
    page = page_of({name.removesuffix("_id"): query[name] for name in query}, newest_first=True, most=_MAX_LISTED)
    batches, more = await context.batches.use(lambda stores: stores.batches.page(owner, page))
    ends = {"first_id": batches[0].id, "last_id": batches[-1].id} if batches else {"first_id": None, "last_id": None}
    return WireResponse.json({"data": [_fields(batch) for batch in batches], "has_more": more, **ends})


async def retrieve(context: RequestContext) -> WireResponse:
    batch = await find(context, _owner(context))
    context.batches.work()
    return _shown(batch)


async def cancel(context: RequestContext) -> WireResponse:
    return _shown(await find(context, _owner(context), BatchStore.cancel))


async def delete(context: RequestContext) -> WireResponse:
    batch = await find(context, _owner(context), BatchStore.delete)
    await context.batches.use(lambda stores: [stores.files.discard(file_id) for file_id in batch.files])
    return WireResponse.json({"id": batch.id, "type": "message_batch_deleted"})


async def results(context: RequestContext) -> WireResponse:
    batch = await find(context, _owner(context))
    if not batch.is_over:
        raise InvalidRequestError("The batch has not ended. Wait until its processing_status is ended.")
    lines = await context.batches.use(lambda stores: _results(stores, batch))
    return WireResponse(200, {"content-type": "application/x-jsonl"}, _sent(lines))


def _results(stores: Stores, batch: Batch) -> Iterator[bytes]:
    """Yield one result line per request. Cancelled requests, which have no line in the output files, come last."""
    known: set[str] = set()
    for file_id in batch.files[1:]:
        for _, raw in read_lines(stores.files.path(file_id)):
            line: dict[str, Any] = json_keeping(raw, "body")
            known.add(line["custom_id"])
            if line["error"] is not None:
                yield _result(line, type="expired")
            elif line["response"]["status_code"] == 200:
                yield _result(line, type="succeeded", message=line["response"]["body"])
            else:
                yield _result(line, type="errored", error=line["response"]["body"])
    for _, raw in read_lines(stores.files.path(batch.input_file_id)):
        if (custom_id := read_line(raw).custom_id) not in known:
            yield _result({"custom_id": custom_id}, type="canceled")


def _result(line: dict[str, Any], **result: Any) -> bytes:
    return json_line({"custom_id": line["custom_id"], "result": result})


async def _sent(lines: Iterator[bytes]) -> AsyncGenerator[bytes]:
    while some := await asyncio.to_thread(lambda: b"".join(islice(lines, _LINES_AT_ONCE))):
        yield some


def _owner(context: RequestContext) -> str:
    return MESSAGES + context.owner


def _shown(batch: Batch) -> WireResponse:
    return WireResponse.json(_fields(batch))


def _fields(batch: Batch) -> dict[str, Any]:
    """Return a batch as Anthropic describes it. The failed requests of an expired batch count as expired."""
    counts, over, expired = batch.request_counts, batch.is_over, batch.status == "expired"
    left = counts.total - counts.completed - counts.failed
    failed = {"errored": 0, "expired": counts.failed} if expired else {"errored": counts.failed, "expired": 0}
    unanswered = {"processing": 0, "canceled": left} if over else {"processing": left, "canceled": 0}
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if over else "canceling" if batch.status == "cancelling" else "in_progress",
        "request_counts": {"succeeded": counts.completed, **failed, **unanswered},
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": _time(batch.completed_at or batch.cancelled_at or batch.expired_at or batch.failed_at),
        "cancel_initiated_at": _time(batch.cancelling_at),
        "archived_at": None,
        "results_url": f"{_PATH}/{batch.id}/results" if over else None,
    }


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


_BATCH = f"{_PATH}/{{batch}}"


ROUTES = (
    Route(
        "POST /v1/messages", recorded(answer), "routed chat in Anthropic's Messages API", MessagesRequest, streams=True
    ),
    Route("POST /v1/messages/count_tokens", count_tokens, "number of tokens, by the device's tokenizer"),
    Route(f"POST {_PATH}", create, "answer messages in the background, as in Anthropic's API", MessageBatchRequest),
    Route(f"GET {_PATH}", list_batches, "the caller's batches of messages", query=_LISTED),
    Route(f"GET {_BATCH}", retrieve, "one batch of messages"),
    Route(f"DELETE {_BATCH}", delete, "delete a batch of messages that has ended"),
    Route(f"GET {_BATCH}/results", results, "one line per request of a batch that has ended"),
    Route(f"POST {_BATCH}/cancel", cancel, "cancel a batch of messages; its answers so far are kept"),
)
