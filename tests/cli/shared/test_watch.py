"""Progress messages keep their brackets; on a terminal, the progress line disappears at the end."""

from __future__ import annotations

import io
import logging
import re

import pytest
from rich.console import Console
from updraft.cli.shared import watch as watching
from updraft.cli.shared.watch import Watch, first_uses_reported


@pytest.mark.parametrize(("note", "rest"), [("", ""), ("71 % right", ", 71 % right")])
def test_a_line_ends_with_the_note_if_there_is_one(monkeypatch: pytest.MonkeyPatch, note: str, rest: str) -> None:
    monkeypatch.setattr(watching, "QUIET_S", -1.0)
    shown = io.StringIO()
    with Watch(Console(file=shown, width=80)).stage("both tiers", 2) as advance:
        advance(note)
        advance(note)
    first, second, last = shown.getvalue().splitlines()
    assert (first, second) == (f"both tiers: 1 of 2{rest}", f"both tiers: 2 of 2{rest}")
    assert re.fullmatch(rf"both tiers: 2 of 2 in [\d.]+ s{rest}", last)


def console(*, terminal: bool) -> tuple[io.StringIO, Watch]:
    file = io.StringIO()
    return file, Watch(Console(file=file, force_terminal=terminal, width=40, no_color=True))


def test_brackets_in_a_note_are_text() -> None:
    file, watch = console(terminal=False)
    watch.say("pip install '.[cloud]'")
    assert file.getvalue() == "pip install '.[cloud]'\n"


def test_a_step_is_a_line_where_there_is_no_terminal() -> None:
    file, watch = console(terminal=False)
    watch.begin("importing torch")
    watch.end()
    assert file.getvalue() == "importing torch ...\n"


def test_a_step_is_taken_away_on_a_terminal() -> None:
    file, watch = console(terminal=True)
    watch.begin("importing torch")
    assert "importing torch ..." in file.getvalue()
    watch.end()
    assert file.getvalue().endswith("\r\x1b[K")
    assert "\n" not in file.getvalue()


def test_only_the_first_use_is_reported() -> None:
    lines: list[str] = []
    log = logging.getLogger("updraft.local.first_use")
    with first_uses_reported(lines.append):
        log.info("Trying %s", "a model")
    log.info("Trying another")
    assert lines == ["Trying a model"]
