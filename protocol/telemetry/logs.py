"""Logging to standard error or a file: secrets redacted, rate-limited, as terminal-safe text or JSON."""

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

import msgspec

from ..safety.private_files import private_file
from ..safety.redaction import printable

FORMAT_VARIABLE = "UPDRAFT_LOG_FORMAT"
"""Environment variable of the log format, inherited by child processes."""

MAX_LINES_A_MINUTE = 60
MAX_LOG_BYTES = 10_000_000
"""Size at which a log file is rotated; the last three old files are kept."""

_KEPT_FILES = 3
_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SECRETS = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s'\",;]+"), r"\1 [redacted]"),
    (re.compile(r"\b(sk|hf|updraft)[-_][A-Za-z0-9_-]{24,}"), r"\1-[redacted]"),
    (re.compile(r"(\w://)[^\s/@]+@"), r"\1[redacted]@"),
    (re.compile(r"(?i)([?&][\w-]*(?:key|token|secret)=)[^\s&#'\"]+"), r"\1[redacted]"),
)


def redacted(text: str) -> str:
    """Redact text that looks like a key, and the user and password of URLs."""
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


def log_to_stderr() -> None:
    """Log warnings and errors to standard error, unless logging is already configured."""
    _log_to(logging.StreamHandler())


def log_to_file(path: Path) -> None:
    """Log warnings and errors to a rotated file that only the user can read. Raises OSError."""
    _log_to(_PrivateFileHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=_KEPT_FILES, encoding="utf-8"))


def _log_to(handler: logging.Handler) -> None:
    handler.setFormatter(_JsonFormatter() if os.environ.get(FORMAT_VARIABLE) == "json" else _TextFormatter(_LINE))
    handler.addFilter(LogRateLimit())
    logging.basicConfig(handlers=[handler])


class _PrivateFileHandler(RotatingFileHandler):
    def _open(self) -> TextIOWrapper:
        private_file(Path(self.baseFilename))
        return super()._open()


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(redacted(super().format(record)))


class _JsonFormatter(logging.Formatter):
    """Formatter for one JSON object per line. Omits the message of an exception, which may quote a prompt."""

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


class LogRateLimit(logging.Filter):
    """Rate limit per log statement, so that a client sending bad requests cannot fill the disk."""

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
            record.msg = f"{record.msg} (further lines from this statement are suppressed for this minute)"
        return self._counts[place] <= MAX_LINES_A_MINUTE
