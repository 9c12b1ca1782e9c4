"""Waiting for what other processes and threads do, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from updraft.router.accounting.ledger import Ledger, LedgerRow


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.02)


def ledger_rows(path: Path, count: int = 1) -> list[LedgerRow]:
    """The rows of a ledger that a router in use writes, as soon as there are `count`."""
    with closing(Ledger(path)) as ledger:
        wait_for(lambda: len(ledger.rows(limit=count)) >= count)
        return ledger.rows()
