"""Shared by `why`, `log` and `usage`: the ledger to read, and its rows for a terminal and for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...protocol.errors import InvalidRequestError

if TYPE_CHECKING:
    from ...router.accounting.ledger import Ledger, LedgerRow

LedgerPath = Annotated[
    Path | None, typer.Option("--ledger", metavar="PATH", help="Ledger to read. [the configured one]")
]


@contextmanager
def open_ledger(path: Path | None) -> Iterator[Ledger]:
    """The ledger at `path`, or the configured one, to read only. Raises InvalidRequestError if there is none."""
    from ...router.accounting.ledger import Ledger
    from ...router.settings_sources import load_config

    path = load_config().ledger if path is None else path
    if path is None or not path.exists():
        where = "The settings name no ledger" if path is None else f"There is no ledger at {path}"
        raise InvalidRequestError(f"{where}: name one with --ledger, or ask something first.")
    with closing(Ledger(path, read_only=True)) as ledger:
        yield ledger


def facts_of(row: LedgerRow) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "decisions": decisions_of(row)}


def decisions_of(row: LedgerRow) -> list[dict[str, Any]]:
    return json.loads(row.decisions)


def time_of(row: LedgerRow) -> str:
    """When the request came, by the clock of this machine."""
    return datetime.fromtimestamp(row.ts).astimezone().isoformat(sep=" ", timespec="seconds")


def printable(text: str) -> str:
    """Text of callers may be in it, and must not command the terminal nor look like another line."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
