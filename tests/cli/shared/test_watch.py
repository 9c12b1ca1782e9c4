"""Progress without a terminal: lines that end where there is nothing more to say."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from updraft.cli.shared import watch


@pytest.mark.parametrize(("note", "rest"), [("", ""), ("71 % right", ", 71 % right")])
def test_a_line_ends_with_the_note_if_there_is_one(monkeypatch: pytest.MonkeyPatch, note: str, rest: str) -> None:
    monkeypatch.setattr(watch, "QUIET_S", -1.0)
    shown = io.StringIO()
    with watch.Watch(Console(file=shown, width=80)).stage("both tiers", 2) as advance:
        advance(note)
        advance(note)
    first, second, last = shown.getvalue().splitlines()
    assert (first, second) == (f"both tiers: 1 of 2{rest}", f"both tiers: 2 of 2{rest}")
    assert re.fullmatch(rf"both tiers: 2 of 2 in [\d.]+ s{rest}", last)
