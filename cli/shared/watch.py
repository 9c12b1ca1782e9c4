"""Progress of long operations: live bars on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .console import Console

QUIET_S = 10.0

Advance = Callable[[str], None]


@contextmanager
def first_uses_reported(say: Callable[[str], None]) -> Iterator[None]:
    """Pass log messages about the local engine's first use on this machine, which can take a minute, to `say`."""
    log, handler = logging.getLogger("updraft.local.first_use"), _ReportHandler(say)
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate


class _ReportHandler(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())


class Watch:
    """Progress display, e.g. `with watch.stage("local only", 300) as advance: advance("71 % right")`."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False)

    def begin(self, what: str) -> None:
        """Show the current activity; on a terminal, `end` erases the line."""
        if self._console.is_terminal:
            self._console.print(f"{what} ...", end="", highlight=False, markup=False, no_wrap=True, overflow="ellipsis")
        else:
            self.say(f"{what} ...")

    def end(self) -> None:
        if self._console.is_terminal:
            self._console.file.write("\r\033[K")
            self._console.file.flush()

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Advance]:
        """Show a stage of `total` steps. Call the yielded function after each step with a progress note."""
        with self._bar(name, total) if self._console.is_terminal else self._lines(name, total) as advance:
            yield advance

    @contextmanager
    def _bar(self, name: str, total: int) -> Iterator[Advance]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description:<28}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(name, total=total, note="")
            yield lambda note: progress.update(task, advance=1, note=note)

    @contextmanager
    def _lines(self, name: str, total: int) -> Iterator[Advance]:
        started = reported = time.monotonic()
        done, last = 0, ""

        def advance(note: str) -> None:
            nonlocal reported, done, last
            done, last = done + 1, note
            if time.monotonic() - reported > QUIET_S:
                reported = time.monotonic()
                self.say(", ".join(filter(None, (f"{name}: {done} of {total}", note))))

        yield advance
        took = f"{name}: {done} of {total} in {time.monotonic() - started:.1f} s"
        self.say(", ".join(filter(None, (took, last))))
