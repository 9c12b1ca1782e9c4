"""Lines of batch files: parsing and checking of requests, writing of answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ....protocol.decoding import UNREADABLE, prepare_types
from ....protocol.http.lenient_json import json_keeping, json_line, json_of
from ....protocol.http.wire import WireResponse, new_id
from ...storage.batch_store import BatchError
from ...storage.file_store import MB

#: Endpoint in whose batches a faulty body fails only its own request. Elsewhere it makes the whole batch invalid.
MESSAGES_PATH = "/v1/messages"
MAX_LINES = 50_000
MAX_LINE = 8 * MB  # maximum bytes of a line, like the default limit of a request body
_MAX_ERRORS = 100  # maximum errors reported per file
_MAX_ID = 512  # characters


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """One request of a batch file."""

    custom_id: str
    method: str
    url: str
    # Raw JSON of the request.
    body: msgspec.Raw


class _BodyFlags(msgspec.Struct):
    """Options not allowed in a batch, where no client waits for the answer."""

    stream: Any = None
    background: Any = None


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield non-blank lines with their numbers from 1. A line over `MAX_LINE` bytes is cut off and is the last."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
            if line.strip():
                yield number, line
            if len(line) > MAX_LINE:
                return


def read_line(line: bytes) -> BatchLine:
    return msgspec.json.decode(line, type=BatchLine)


def check_lines(path: Path, endpoint: str) -> tuple[int, list[BatchError]]:
    """Check a batch file for `endpoint`. Return the number of requests and the first faults."""
    known: set[str] = set()
    errors: list[BatchError] = []
    total = 0
    for number, raw in read_lines(path):
        total += 1
        error = _fault(raw, endpoint, known)
        if total > MAX_LINES:
            error = BatchError("too_many_requests", f"A batch must have at most {MAX_LINES} requests. Split the file.")
        if error is not None:
            error.line = number
            errors.append(error)
        if len(errors) == _MAX_ERRORS or total > MAX_LINES:
            break
    if not total:
        errors.append(BatchError("empty_file", "The input file contains no requests."))
    return total, errors


def _fault(raw: bytes, endpoint: str, known: set[str]) -> BatchError | None:
    """Return the line's fault, or None. Adds the line's `custom_id` to `known`."""
    if len(raw) > MAX_LINE:
        return BatchError("line_too_long", f"A line must have at most {MAX_LINE} bytes.")
    try:
        raw.decode()  # msgspec does not check the texts in a raw body
        line = read_line(raw)
    except UNREADABLE as error:
        return BatchError("invalid_json_line", f"The line is not a valid request: {error}"[:500])
    if not 0 < len(line.custom_id) <= _MAX_ID:
        return BatchError("invalid_custom_id", f"custom_id must have 1 to {_MAX_ID} characters.", param="custom_id")
    if line.custom_id in known:
        return BatchError("duplicate_custom_id", f"Two lines have the custom_id {line.custom_id!r}.", param="custom_id")
    known.add(line.custom_id)
    if line.method != "POST":
        return BatchError("invalid_method", "The method must be POST.", param="method")
    if line.url != endpoint:
        return BatchError("invalid_url", f"url must be {endpoint}, the endpoint of the batch.", param="url")
    return None if endpoint == MESSAGES_PATH else body_fault(line)


def body_fault(line: BatchLine) -> BatchError | None:
    """Return the fault of a body that no batch can answer, or None."""
    try:
        flags = msgspec.json.decode(line.body, type=_BodyFlags)
    except UNREADABLE as error:
        return BatchError("invalid_json_line", f"The line is not a valid request: {error}"[:500])
    if any(flag and str(flag).lower() != "false" for flag in (flags.stream, flags.background)):
        return BatchError("invalid_value", "A request in a batch cannot set stream or background.", param="body")
    return None


def answer_line(custom_id: str, response: WireResponse, request_id: str) -> bytes:
    assert isinstance(response.body, bytes), "batch requests do not stream"
    try:
        body = json_keeping(response.body, "input")  # keep the JSON text of Anthropic's tool inputs
    except ValueError:
        body = response.body.decode(errors="replace")
    return _line(custom_id, {"status_code": response.status, "request_id": request_id, "body": body}, None)


def expired_line(custom_id: str) -> bytes:
    message = "The request was not answered before the batch expired."
    return _line(custom_id, None, {"code": "batch_expired", "message": message})


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    return json_line({"id": new_id("batch_req"), "custom_id": custom_id, "response": response, "error": error})


def answered(path: Path) -> set[str]:
    """Return the `custom_id` of each complete line of an output file, and remove an incomplete line left by a crash."""
    ids: set[str] = set()
    whole = 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            ids.add(json_of(line)["custom_id"])
            whole += len(line)
        file.truncate(whole)
    return ids


prepare_types(BatchLine, _BodyFlags)
