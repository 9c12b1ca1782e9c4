"""Commands to a terminal never reach it, however they are cut into pieces; people's own text stays."""

import logging
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.protocol.safety.redaction import PrintableStream, printable
from updraft.protocol.telemetry.logs import log_to_stderr

SEQUENCES = {
    "colour": "\x1b[31m",
    "clear screen": "\x1b[2J",
    "private mode": "\x1b[?1049h",
    "clipboard, ended by BEL": "\x1b]52;c;Y2FuYXJ5\x07",
    "clipboard, ended by ST": "\x1b]52;c;Y2FuYXJ5\x1b\\",
    "link": "\x1b]8;;http://evil\x1b\\",
    "device control": "\x1bP1$r0m\x1b\\",
    "reset": "\x1bc",
    "character set": "\x1b(0",
    "C1 CSI": "\x9b31m",
    "C1 OSC": "\x9d52;c;Y2FuYXJ5\x9c",
    "C1 alone": "\x85",
    "DEL": "\x7f",
    "backspace": "\x08",
    "carriage return": "\r",
    "bell": "\x07",
    "override": "\u202e",
    "isolate": "\u2066",
}


@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
def test_a_sequence_is_left_out_wherever_it_is_cut(sequence: str) -> None:
    text = f"before {sequence} after"
    assert printable(text) == "before  after"
    for cut in range(len(text) + 1):
        stream = PrintableStream()
        assert stream.feed(text[:cut]) + stream.feed(text[cut:]) + stream.end() == "before  after"
    stream = PrintableStream()
    assert "".join([*map(stream.feed, text), stream.end()]) == "before  after"


@pytest.mark.parametrize("text", ["Grüße\n\tand 日本語 🙂", "שלום עולם", "مرحبا", "👩‍👩‍👧 [31m ]52;c;"])
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert printable(text) == text
    stream = PrintableStream()
    assert "".join([*map(stream.feed, text), stream.end()]) == text


def test_a_sequence_without_an_end_hides_nothing() -> None:
    stream = PrintableStream()
    shown = stream.feed("\x1b]0;") + stream.feed("the answer " * 1000) + stream.end()
    assert shown.removeprefix("0;") == "the answer " * 1000


@given(st.lists(st.text(st.sampled_from("\x1b\x9b\x9d\x9c\x07[]\\;0m a\r\n\u202e"), max_size=6), max_size=8))
def test_no_escape_survives(pieces: list[str]) -> None:
    stream = PrintableStream()
    shown = "".join([*map(stream.feed, pieces), stream.end()])
    assert not set(shown) & set("\x1b\x9b\x9d\x9c\x07\r\u202e")
    assert printable(shown) == shown


@pytest.mark.parametrize("unit", ["\x1b", "\x1b]", "\x9d", "\x1b[", "\x1b[0;", "\x1bP0", "\x9d0"])
def test_time_is_linear(unit: str) -> None:
    def seconds(n: int) -> float:
        text, started = unit * n, time.process_time()
        printable(text)
        stream = PrintableStream()
        stream.feed(text)
        stream.end()
        return time.process_time() - started

    taken = [min(seconds(n) for _ in range(3)) for n in (20_000, 80_000)]
    assert all(later < 12 * earlier + 0.05 for earlier, later in pairwise(taken))


def test_logs_are_text_of_others_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    log_to_stderr()
    logging.getLogger("updraft").warning("the cloud said %s", SEQUENCES["clipboard, ended by BEL"])
    assert "\x1b" not in capsys.readouterr().err
