"""Progress reports and retries of long operations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ...protocol.errors import DownloadError
from .web import RetryLimits, TemporaryError

Result = TypeVar("Result")


def _ignore(*_: object) -> None:
    """Ignore a report."""


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """Callbacks: `progress(done, total)` in bytes (total None: unknown), and `say(line)` to tell the user something."""

    progress: Callable[[int, int | None], None] = _ignore
    say: Callable[[str], None] = _ignore


def retrying(attempt: Callable[[], Result], retries: RetryLimits, report: ProgressReport) -> Result:
    """Call `attempt` until it succeeds. Raises DownloadError after `retries.tries` temporary failures."""
    failures = 0
    while True:
        try:
            return attempt()
        except TemporaryError as error:
            failures += 1
            give_up_or_wait(error, failures, retries, report)


def give_up_or_wait(
    error: TemporaryError, failures: int, retries: RetryLimits, report: ProgressReport, after: str = ""
) -> None:
    """Sleep before the next try. After too many failures, raise DownloadError, whose message ends with `after`."""
    if failures >= retries.tries:
        raise DownloadError(f"{error}; gave up after {failures} tries{after}. Try again later.") from error
    wait_s = retries.wait_s(failures, error.wait_s)
    report.say(f"{error}; trying again in {wait_s:.0f} s")
    time.sleep(wait_s)
