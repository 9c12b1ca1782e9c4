"""SQLite files that several processes write: the switch to a write-ahead log, which two of them may try at once."""

from __future__ import annotations

import sqlite3
import time

_PATIENCE_S, _PAUSE_S = 5.0, 0.01


def use_wal(connection: sqlite3.Connection) -> None:
    """Let `connection` write ahead, each commit safe from the death of the process.

    SQLite's own timeout does not hold here: while another connection switches, a new file is "locked" at once. So this
    waits, up to 5 seconds. Raises sqlite3.OperationalError.
    """
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError:
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE_S)
    connection.execute("PRAGMA synchronous=NORMAL")
