"""`/v1/batches`: files of requests that are answered in the background, while no client waits."""

from __future__ import annotations

import time

import msgspec

from .....accounting.budget import DAY_S
from .....protocol.decoding import decode, prepare_types
from .....protocol.dialects.responses_request import check_metadata
from .....protocol.errors import InvalidRequestError
from .....protocol.http.ids import new_id
from .....protocol.http.wire import WireResponse
from ....storage.batch_store import Batch
from ..route import RequestContext, Route
from .files import BATCH_DAYS, expires_s
from .pagination import list_of, page_of, query_of

_ENDPOINTS = tuple(
    f"/v1/{name}"
    for name in ("chat/completions", "completions", "embeddings", "responses", "moderations", "images/generations")
)
_LISTED = ("limit", "after")
WINDOW, WINDOW_S = "24h", DAY_S


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


prepare_types(BatchRequest)


def check_key(context: RequestContext) -> None:
    """Refuse a caller's own key for the cloud, which no batch keeps. Raises InvalidRequestError."""
    if context.request.cloud_key is not None:
        raise InvalidRequestError(
            "api_key: a batch runs later, with the cloud key in the settings. Create it without api_key.",
            param="api_key",
            code="unsupported_parameter",
        )


async def create(context: RequestContext) -> WireResponse:
    check_key(context)
    asked, owner, now = decode(context.request.body, BatchRequest), context.owner, int(time.time())
    if asked.endpoint not in _ENDPOINTS:
        raise InvalidRequestError(f"endpoint must be one of {', '.join(_ENDPOINTS)}.", param="endpoint")
    if asked.completion_window != WINDOW:
        raise InvalidRequestError(f"completion_window must be {WINDOW}.", param="completion_window")
    check_metadata(asked.metadata or {})
    kept = asked.output_expires_after
    outputs_expire_s = BATCH_DAYS * DAY_S if kept is None else expires_s(kept.anchor, kept.seconds)
    file = await context.batches.use(lambda stores: stores.files.get(owner, asked.input_file_id))
    if file.purpose != "batch":
        raise InvalidRequestError("The purpose of the input file must be batch.", param="input_file_id")
    batch = Batch(
        id=new_id("batch"),
        endpoint=asked.endpoint,
        input_file_id=file.id,
        completion_window=WINDOW,
        created_at=now,
        expires_at=now + WINDOW_S,
        metadata=asked.metadata,
    )
    await context.batches.use(lambda stores: stores.batches.create(owner, batch, outputs_expire_s))
    context.batches.work()
    return WireResponse.json(batch)


async def list_batches(context: RequestContext) -> WireResponse:
    owner, query = context.owner, query_of(context.request.query, _LISTED)
    page = page_of(query, newest_first=True)
    batches, more = await context.batches.use(lambda stores: stores.batches.page(owner, page))
    context.batches.work()
    return list_of(msgspec.to_builtins(batches), has_more=more)


async def retrieve(context: RequestContext) -> WireResponse:
    owner, batch_id = context.owner, context.parameters["batch"]
    batch = await context.batches.use(lambda stores: stores.batches.get(owner, batch_id))
    context.batches.work()
    return WireResponse.json(batch)


async def cancel(context: RequestContext) -> WireResponse:
    owner, batch_id = context.owner, context.parameters["batch"]
    return WireResponse.json(await context.batches.use(lambda stores: stores.batches.cancel(owner, batch_id)))


_PATH = "/v1/batches"
_BATCH = f"{_PATH}/{{batch}}"
ROUTES = (
    Route("POST", _PATH, create, "run the requests of a file in the background", BatchRequest, Batch),
    Route("GET", _PATH, list_batches, "the caller's batches", query=_LISTED),
    Route("GET", _BATCH, retrieve, "one batch", response_type=Batch),
    Route("POST", f"{_BATCH}/cancel", cancel, "cancel a batch; its answers so far are kept", response_type=Batch),
)
