"""The log of a process on its standard error: without secrets, bounded, and fit for a terminal or for a machine."""

from __future__ import annotations

import logging
import os
import re
import time
import traceback
from collections import Counter
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal

import msgspec

from ..safety.private_files import private_file
from ..safety.terminal_text import printable

LogFormat = Literal["text", "json"]
FORMAT_VARIABLE = "UPDRAFT_LOG_FORMAT"
"""Where the format stands, so that the processes that this one starts write alike."""

MAX_LINES_A_MINUTE = 60
MAX_LOG_BYTES = 10_000_000
"""A log file that has grown so large is put aside; the last three are kept."""

_KEPT_FILES = 3
_SECRETS = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s'\",;]+"), r"\1 [redacted]"),
    (re.compile(r"\b(sk|hf|updraft)[-_][A-Za-z0-9_-]{24,}"), r"\1-[redacted]"),
    (re.compile(r"(\w://)[^\s/@]+@"), r"\1[redacted]@"),
    (re.compile(r"(?i)([?&][\w-]*(?:key|token|secret)=)[^\s&#'\"]+"), r"\1[redacted]"),
)


def redacted(text: str) -> str:
    """`text` without what looks like a key, and without the user and password of an address."""
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


def log_to_stderr() -> None:
    """Warnings and errors of this process, unless it logs already."""
    _log_to(logging.StreamHandler())


def log_to_file(path: Path) -> None:
    """The same into a file that only the user can read, and that does not grow for ever. Raises OSError."""
    _log_to(_PrivateFileHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=_KEPT_FILES, encoding="utf-8"))


def _log_to(handler: logging.Handler) -> None:
    handler.setFormatter(_JsonFormatter() if os.environ.get(FORMAT_VARIABLE) == "json" else _TextFormatter(_LINE))
    handler.addFilter(FewOfEach())
    logging.basicConfig(handlers=[handler])


class _PrivateFileHandler(RotatingFileHandler):
    def _open(self) -> TextIOWrapper:
        private_file(Path(self.baseFilename))
        return super()._open()


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(redacted(super().format(record)))


class _JsonFormatter(logging.Formatter):
    """One object a line. Of an exception it tells the type and the place: its message may quote a prompt."""

    def format(self, record: logging.LogRecord) -> str:
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{whole}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(redacted(record.getMessage())),
            "process": record.process,
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = record.exc_info[0].__qualname__
            line["stack"] = "".join(traceback.format_tb(record.exc_info[2]))
        return msgspec.json.encode(line).decode()


_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class FewOfEach(logging.Filter):
    """Lets some lines a minute pass from each place in the code: who sends nonsense cannot fill the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._minute = 0
        self._counts: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        minute = int(record.created // 60)
        if minute != self._minute:
            self._minute = minute
            self._counts.clear()
        place = (record.pathname, record.lineno)
        self._counts[place] += 1
        if self._counts[place] == MAX_LINES_A_MINUTE:
            record.msg = f"{record.msg} (further lines of this kind are left out for this minute)"
        return self._counts[place] <= MAX_LINES_A_MINUTE
