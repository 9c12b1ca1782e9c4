"""`/v1/batches`: files of requests that are answered in the background, while no client waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from .....accounting.budget import DAY_S
from .....protocol.decoding import decode
from .....protocol.dialects.responses_request import check_metadata
from .....protocol.errors import InvalidRequestError
from .....protocol.http.wire import WireResponse, new_id
from ....storage.batch_store import Batch, BatchStore
from ..route import RequestContext, Route, list_of, page_of, query_of
from .files import BATCH_DAYS, expires_s

_ENDPOINTS = tuple(
    f"/v1/{name}"
    for name in ("chat/completions", "completions", "embeddings", "responses", "moderations", "images/generations")
)
_LISTED = ("limit", "after")
_WINDOW, _WINDOW_S = "24h", DAY_S


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """Expiry of the output files."""

    anchor: str
    seconds: int


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request to create a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


def check_key(context: RequestContext) -> None:
    """Raise InvalidRequestError for a request with the caller's own cloud key, because batches store no keys."""
    if context.request.cloud_key is not None:
        raise InvalidRequestError(
            "api_key: a batch runs later, with the cloud key in the settings. Create it without api_key.",
            param="api_key",
            code="unsupported_parameter",
        )


def new_batch(prefix: str, endpoint: str, input_file_id: str, **more: Any) -> Batch:
    """Return a batch that has not begun, with an ID that starts with `prefix`."""
    now = int(time.time())
    window = {"completion_window": _WINDOW, "created_at": now, "expires_at": now + _WINDOW_S}
    return Batch(id=new_id(prefix), endpoint=endpoint, input_file_id=input_file_id, **window, **more)


async def find(
    context: RequestContext, owner: str, read: Callable[[BatchStore, str, str], Batch] = BatchStore.get
) -> Batch:
    """Return the batch that the path names, read by a method of the store. Raises NotFoundError."""
    return await context.batches.use(lambda stores: read(stores.batches, owner, context.parameters["batch"]))


async def create(context: RequestContext) -> WireResponse:
    check_key(context)
    asked, owner = decode(context.request.body, BatchRequest), context.owner
    if asked.endpoint not in _ENDPOINTS:
        raise InvalidRequestError(f"endpoint must be one of {', '.join(_ENDPOINTS)}.", param="endpoint")
    if asked.completion_window != _WINDOW:
        raise InvalidRequestError(f"completion_window must be {_WINDOW}.", param="completion_window")
    check_metadata(asked.metadata or {})
    kept = asked.output_expires_after
    outputs_expire_s = BATCH_DAYS * DAY_S if kept is None else expires_s(kept.anchor, kept.seconds)
    file = await context.batches.use(lambda stores: stores.files.get(owner, asked.input_file_id))
    if file.purpose != "batch":
        raise InvalidRequestError("The purpose of the input file must be batch.", param="input_file_id")
    batch = new_batch("batch", asked.endpoint, file.id, metadata=asked.metadata)
    await context.batches.use(lambda stores: stores.batches.create(owner, batch, outputs_expire_s))
    context.batches.work()
    return WireResponse.json(batch)


async def list_batches(context: RequestContext) -> WireResponse:
    page = page_of(query_of(context.request.query, _LISTED), newest_first=True)
    batches, more = await context.batches.use(lambda stores: stores.batches.page(context.owner, page))
    context.batches.work()
    return list_of(msgspec.to_builtins(batches), has_more=more)


async def retrieve(context: RequestContext) -> WireResponse:
    batch = await find(context, context.owner)
    context.batches.work()
    return WireResponse.json(batch)


async def cancel(context: RequestContext) -> WireResponse:
    return WireResponse.json(await find(context, context.owner, BatchStore.cancel))


_PATH = "/v1/batches"
_BATCH = f"{_PATH}/{{batch}}"
ROUTES = (
    Route(f"POST {_PATH}", create, "run the requests of a file in the background", BatchRequest, Batch),
    Route(f"GET {_PATH}", list_batches, "the caller's batches", query=_LISTED),
    Route(f"GET {_BATCH}", retrieve, "one batch", response_type=Batch),
    Route(f"POST {_BATCH}/cancel", cancel, "cancel a batch; its answers so far are kept", response_type=Batch),
)
