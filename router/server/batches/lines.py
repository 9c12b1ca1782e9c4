"""The lines of batch files: requests that are read and checked, and answers that are written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ....protocol.decoding import UNREADABLE, prepare_types
from ....protocol.http.foreign import json_bytes, json_of
from ....protocol.http.ids import new_id
from ....protocol.http.wire import WireResponse
from ...storage.batch_store import BatchError
from ...storage.file_store import MB

MAX_LINES = 50_000
MAX_LINE = 8 * MB  # as the body of a request
_MAX_ERRORS = 100  # that are told of one file
_MAX_ID = 512  # characters
_LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """One request."""

    custom_id: str
    method: str
    url: str
    # The JSON as it stands.
    body: msgspec.Raw


class _BodyFlags(msgspec.Struct):
    """Options that a request cannot have in a batch: nobody waits for it."""

    stream: Any = None
    background: Any = None


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1 on. One that is too long is cut off, and the last."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if line.strip():
                yield number, line
            if len(line) > MAX_LINE:
                return


def read_line(line: bytes) -> BatchLine:
    return msgspec.json.decode(line, type=BatchLine)


def check_lines(path: Path, endpoint: str) -> tuple[int, list[BatchError]]:
    """The number of requests, and their faults."""
    known: set[str] = set()
    errors: list[BatchError] = []
    total = 0
    for number, raw in read_lines(path):
        total += 1
        error = _fault(raw, endpoint, known)
        if total > MAX_LINES:
            error = BatchError("too_many_requests", f"A batch holds up to {MAX_LINES} requests: split it.")
        if error is not None:
            error.line = number
            errors.append(error)
        if len(errors) == _MAX_ERRORS or total > MAX_LINES:
            break
    if not total:
        errors.append(BatchError("empty_file", "The input file holds no request."))
    return total, errors


def _fault(raw: bytes, endpoint: str, known: set[str]) -> BatchError | None:
    """The fault of a line, whose `custom_id` is `known` from here on."""
    if len(raw) > MAX_LINE:
        return BatchError("line_too_long", f"A line has up to {MAX_LINE} bytes.")
    try:
        line = read_line(raw)
        flags = msgspec.json.decode(line.body, type=_BodyFlags)
    except UNREADABLE as error:
        return BatchError("invalid_json_line", f"The line is not a request: {error}"[:500])
    if not 0 < len(line.custom_id) <= _MAX_ID:
        return BatchError("invalid_custom_id", f"A custom_id has 1 to {_MAX_ID} characters.", param="custom_id")
    if line.custom_id in known:
        return BatchError("duplicate_custom_id", f"Two lines have the custom_id {line.custom_id!r}.", param="custom_id")
    known.add(line.custom_id)
    if line.method != "POST":
        return BatchError("invalid_method", "The method must be POST.", param="method")
    if line.url != endpoint:
        return BatchError("invalid_url", f"The batch is for {endpoint}: so must be its lines.", param="url")
    if flags.stream or flags.background:
        return BatchError("invalid_value", "A batch has neither streams nor background responses.", param="body")
    return None


def answer_line(custom_id: str, response: WireResponse, request_id: str) -> bytes:
    assert isinstance(response.body, bytes), "no line asks for a stream"
    answer = {
        "status_code": response.status,
        "request_id": request_id,
        "body": msgspec.Raw(_on_one_line(response.body)),
    }
    return _line(custom_id, answer, None)


def _on_one_line(body: bytes) -> bytes:
    """`body` as JSON without line ends, U+2028 included; a JSON string where it is no JSON."""
    try:
        body = json_bytes(json_of(body, exact=True))
    except ValueError:
        body = json_bytes(body.decode(errors="replace"))
    for end, instead in _LINE_ENDS:
        body = body.replace(end, instead)
    return body


def expired_line(custom_id: str) -> bytes:
    message = "The request was not answered before the batch expired."
    return _line(custom_id, None, {"code": "batch_expired", "message": message})


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    line = {"id": new_id("batch_req"), "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


def answered(path: Path) -> set[str]:
    """The `custom_id` of each whole line of an output. A line that the end of a process tore is cut off."""
    found: set[str] = set()
    whole = 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            found.add(json_of(line)["custom_id"])
            whole += len(line)
        file.truncate(whole)
    return found


prepare_types(BatchLine, _BodyFlags)
