"""The gateway's table of usage rows."""

from __future__ import annotations

import sqlite3
from dataclasses import fields
from pathlib import Path

from ....accounting.ledger.table import LedgerTable
from ....protocol.errors import ConfigurationError
from ....protocol.wal import columns, transaction
from .metering import COLUMNS, UsageRow
from .older_format import put_aside, take_over

VERSION = 1
"""Of the schema. A file of another version is refused."""

_SQLITE = {"str": "TEXT", "State": "TEXT", "int": "INTEGER", "float": "REAL", "float | None": "REAL"}
_POSTGRES = {"TEXT": "text", "INTEGER": "bigint", "REAL": "double precision"}


def create_table(*, postgres: bool = False) -> list[str]:
    """The statements that make the schema."""
    types = [_SQLITE[str(column.type)] for column in fields(UsageRow)]
    made = ", ".join(
        f"{name} {_POSTGRES[kind] if postgres else kind}" for name, kind in zip(COLUMNS, types, strict=True)
    )
    return [
        f"CREATE TABLE IF NOT EXISTS usage ({made}, PRIMARY KEY (id))",
        "CREATE INDEX IF NOT EXISTS usage_key ON usage (key_id, started_at)",
        "CREATE INDEX IF NOT EXISTS usage_time ON usage (started_at)",
        "CREATE INDEX IF NOT EXISTS usage_intents ON usage (worker) WHERE state = 'intent'",
        "CREATE TABLE IF NOT EXISTS usage_schema (version INTEGER NOT NULL)",
    ]


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    with transaction(connection):
        is_older = put_aside(connection)
        if columns(connection, "usage") not in ((), COLUMNS):
            raise ConfigurationError(f"{path} is a usage database of another version: choose another --db.")
        for statement in create_table():
            connection.execute(statement)
        if is_older:
            take_over(connection)
        found = connection.execute("SELECT version FROM usage_schema").fetchone()
        if found is None:
            connection.execute("INSERT INTO usage_schema VALUES (?)", (VERSION,))
        elif found[0] != VERSION:
            raise ConfigurationError(f"{path} has schema {found[0]}, this version has {VERSION}: choose another --db.")


USAGE = LedgerTable(
    name="usage",
    columns=COLUMNS,
    time="started_at",
    prepare=_prepare,
    purpose="as the usage database",
    param="db",
    state="state",
    fixed=frozenset(("id", "request_id", "key_name", "model", "started_at", "tier", "key_id", "tenant", "worker")),
)
