"""Shared by `why`, `log` and `usage`: the ledger to read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...protocol.errors import InvalidRequestError
from ...protocol.safety.private_files import has_file

if TYPE_CHECKING:
    from ...router.accounting.ledger import Ledger

LedgerPath = Annotated[
    Path | None, typer.Option("--ledger", metavar="PATH", help="Ledger to read. [the configured one]")
]


@contextmanager
def open_ledger(path: Path | None) -> Iterator[Ledger]:
    """The ledger at `path`, or the configured one, to read only. Raises InvalidRequestError without a file."""
    from ...router.accounting.ledger import Ledger
    from ...router.accounting.ledger_writer import collect_rows
    from ...router.settings_sources import load_config

    path = load_config().ledger if path is None else path
    if path is None or not has_file(path):
        where = "The settings name no ledger" if path is None else f"There is no ledger at {path}"
        raise InvalidRequestError(f"{where}: name one with --ledger, or ask something first.")
    collect_rows(path)
    with closing(Ledger(path, read_only=True)) as ledger:
        yield ledger
