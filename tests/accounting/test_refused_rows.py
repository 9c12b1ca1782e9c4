"""A row that the database refuses does not repeat the changes of the rows around it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from updraft.accounting.ledger.store import LedgerWriteError, SqliteStore
from updraft.accounting.ledger.table import BookedRow, Values
from updraft.router.accounting.ledger import Ledger, RequestWriter
from updraft.router.accounting.prices import Prices
from updraft.router.accounting.request_record import RequestRecord

ROW = RequestRecord(Prices(), "large").row(200)


def test_a_refused_row_and_a_held_file_settle_every_budget_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, alone = SqliteStore.write, list[str]()

    def held_at_the_third(store: SqliteStore, intents: Sequence[Values], rows: Sequence[BookedRow]) -> None:
        if len(rows) == 1:
            alone.append(rows[0].values[0])
            if len(alone) == 3:
                raise LedgerWriteError("database is locked")
        write(store, intents, rows)

    async def enter(path: Path) -> None:
        writer = RequestWriter(path)
        for name in ("a", "refused", "c", "d"):
            model = "\ud83d" if name == "refused" else "m"
            writer.enter(replace(ROW, id=name, model=model), ((1, 0, 0, 0.0, "day", 0, name),))
        assert await asyncio.to_thread(writer.flush, 10.0)
        await writer.aclose()

    with closing(Ledger(tmp_path / "ledger")) as ledger, ledger.transaction() as connection:
        empty = [("day", 0, name, 0, 0, 0, 0.0) for name in ("a", "refused", "c", "d")]
        connection.executemany("INSERT INTO spending VALUES (?, ?, ?, ?, ?, ?, ?)", empty)
    monkeypatch.setattr(SqliteStore, "write", held_at_the_third)
    asyncio.run(enter(tmp_path / "ledger"))
    with closing(Ledger(tmp_path / "ledger", read_only=True)) as ledger:
        assert {row.id for row in ledger.rows()} == {"a", "c", "d"}
    with closing(sqlite3.connect(tmp_path / "ledger")) as connection:
        booked = dict(connection.execute("SELECT scope, requests FROM spending").fetchall())
    assert booked == {"a": 1, "refused": 0, "c": 1, "d": 1}
