"""`/v1/files`: input and output files of batches, and other uploads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from io import BytesIO
from typing import BinaryIO

import msgspec

from .....accounting.budget import DAY_S
from .....protocol.dialects.multipart import FormPart, read_form
from .....protocol.errors import InvalidRequestError, RequestTooLargeError
from .....protocol.http.wire import WireRequest, WireResponse
from ....storage.file_store import MB, FileMetadata, FileObject, FileWriter
from ...batches.run import TrackedBody
from ..route import PAGE_PARAMETERS, RequestContext, Route, list_of, page_of, query_of

UPLOADS = "/v1/files"
_LISTED = (*PAGE_PARAMETERS, "purpose")
MAX_FILE = 512 * MB  # OpenAI's limit
MAX_UPLOAD = MAX_FILE + MB  # also allows 1 MB of other form fields
BATCH_DAYS = 30  # default lifetime of a batch's files
_PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
_MAX_LISTED = 10_000
_MAX_FIELD, _MAX_FILENAME = 1024, 255  # characters
_PIECE = 2**18


def _label(filename: str | None, fields: dict[str, str], size: int) -> FileMetadata:
    """Return the metadata of a file, from its form. Raises InvalidRequestError if a field is missing or invalid."""
    if not filename:
        raise InvalidRequestError("The form needs a file with a filename.", param="file")
    unknown = fields.keys() - {"purpose", "expires_after[anchor]", "expires_after[seconds]"}
    if unknown:
        name = min(unknown)
        raise InvalidRequestError(f"Unknown form field {name[:100]!r}.", param=name)
    purpose = fields.get("purpose", "")
    if purpose not in _PURPOSES:
        raise InvalidRequestError(f"purpose must be one of {', '.join(_PURPOSES)}.", param="purpose")
    anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        lifetime_s = BATCH_DAYS * DAY_S if purpose == "batch" else None
    else:
        readable = seconds is not None and seconds.isascii() and seconds.isdecimal() and len(seconds) < 10
        lifetime_s = expires_s(anchor or "", int(seconds or "") if readable else 0)
    return FileMetadata(size, filename.replace("\\", "/").rpartition("/")[2][:_MAX_FILENAME], purpose, lifetime_s)


def expires_s(anchor: str, seconds: int) -> int:
    """Return `seconds` if the expiry is valid. Raises InvalidRequestError if not."""
    if anchor != "created_at" or not 3600 <= seconds <= BATCH_DAYS * DAY_S:
        raise InvalidRequestError(
            f"expires_after needs the anchor created_at and 3600 to {BATCH_DAYS * DAY_S} seconds.",
            param="expires_after",
        )
    return seconds


async def create(context: RequestContext) -> WireResponse:
    writer = await context.batches.use(lambda stores: stores.files.begin(context.owner))
    try:
        with closing(writer):
            label = await _receive(context.request, writer)
        made = await context.batches.use(lambda stores: stores.files.complete(writer.id, label))
    except BaseException:
        await asyncio.shield(context.batches.use(lambda stores: stores.files.discard(writer.id)))
        raise
    context.batches.work()
    return WireResponse.json(made)


async def _receive(request: WireRequest, writer: FileWriter) -> FileMetadata:
    """Write the file as it arrives. Raises InvalidRequestError, RequestTooLargeError and DiskSpaceError."""
    filename, fields, name = None, dict[str, str](), ""
    pieces = _pieces(BytesIO(request.body)) if request.upload is None else request.upload
    async with aclosing(read_form(request.headers.get("content-type", ""), pieces)) as parts:
        async for part in parts:
            if isinstance(part, FormPart):
                name = part.name
                if name in fields or (name == "file" and filename is not None):
                    raise InvalidRequestError(f"The form has the field {name[:100]!r} twice.", param=name)
                if name == "file":
                    filename = part.filename or ""
                else:
                    fields[name] = ""
            elif name == "file":
                if writer.size + len(part) > MAX_FILE:
                    raise RequestTooLargeError(f"A file must have at most {MAX_FILE} bytes.", param="file")
                await asyncio.to_thread(writer.write, part)
            else:
                fields[name] += part.decode(errors="replace")
                if len(fields[name]) > _MAX_FIELD:
                    raise InvalidRequestError(f"The field {name[:100]!r} is too long.", param=name)
    return _label(filename, fields, writer.size)


async def _pieces(file: BinaryIO) -> AsyncGenerator[bytes]:
    while piece := await asyncio.to_thread(file.read, _PIECE):
        yield piece


async def list_files(context: RequestContext) -> WireResponse:
    query = query_of(context.request.query, _LISTED)
    page = page_of(query, newest_first=True, most=_MAX_LISTED, usual=_MAX_LISTED)
    files, more = await context.batches.use(lambda stores: stores.files.page(context.owner, page, query.get("purpose")))
    return list_of(msgspec.to_builtins(files), has_more=more)


async def retrieve(context: RequestContext) -> WireResponse:
    return WireResponse.json(await _find(context))


async def content(context: RequestContext) -> WireResponse:
    entry = await _find(context)
    file = await context.batches.use(lambda stores: stores.files.path(entry.id).open("rb"))
    return WireResponse(200, {"content-type": "application/octet-stream"}, TrackedBody(_pieces(file), file.close))


async def delete(context: RequestContext) -> WireResponse:
    file_id = context.parameters["file"]
    await context.batches.use(lambda stores: stores.files.delete(context.owner, file_id))
    return WireResponse.json({"id": file_id, "object": "file", "deleted": True})


async def _find(context: RequestContext) -> FileObject:
    return await context.batches.use(lambda stores: stores.files.get(context.owner, context.parameters["file"]))


_FILE = f"{UPLOADS}/{{file}}"
ROUTES = (
    Route(f"POST {UPLOADS}", create, "upload a file of up to 512 MB, as a form", response_type=FileObject, form=True),
    Route(f"GET {UPLOADS}", list_files, "the caller's files", query=_LISTED),
    Route(f"GET {_FILE}", retrieve, "metadata of one file", response_type=FileObject),
    Route(f"DELETE {_FILE}", delete, "delete a file"),
    Route(f"GET {_FILE}/content", content, "content of a file"),
)
