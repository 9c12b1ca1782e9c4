"""Usage databases of gateways from before the ledger had a schema version: their rows are taken over."""

from __future__ import annotations

import sqlite3

from ....protocol.wal import columns

_COLUMNS = (
    *("id", "request_id", "key_name", "model", "node", "status", "prompt_tokens", "completion_tokens"),
    *("accepted_prediction_tokens", "rejected_prediction_tokens", "latency_ms", "ttft_ms", "retries", "bytes"),
    "started_at",
)
_SHARED = ", ".join(_COLUMNS[1:])


def put_aside(connection: sqlite3.Connection) -> bool:
    """Rename the table of an older gateway; whether there was one."""
    if columns(connection, "usage") != _COLUMNS:
        return False
    connection.execute("ALTER TABLE usage RENAME TO usage_before")
    return True


def take_over(connection: sqlite3.Connection) -> None:
    """Copy the rows of the renamed table into the new one, with a key's name as its tenant and id, and drop it."""
    connection.execute(
        f"INSERT INTO usage ({_SHARED}, cached_tokens, tier, key_id, tenant, worker, state, id)"
        f" SELECT {_SHARED}, 0, 'interactive', key_name, key_name, '', 'settled', printf('before-%016d', id)"
        " FROM usage_before"
    )
    connection.execute("DROP TABLE usage_before")
