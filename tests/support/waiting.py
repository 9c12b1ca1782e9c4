"""Waits for other processes and threads, with a limit that also suits busy machines."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from updraft.router.accounting.ledger import Ledger, LedgerRow


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold within 60 seconds"
        time.sleep(0.02)


def ledger_rows(path: Path, count: int = 1) -> list[LedgerRow]:
    """Return the rows of a ledger that a running router writes, once there are at least `count`."""
    with closing(Ledger(path)) as ledger:
        wait_for(lambda: len(ledger.rows(limit=count)) >= count)
        return ledger.rows()
