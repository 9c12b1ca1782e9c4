"""Sanitizing of texts: API keys and URL credentials in logs, metrics and errors; escape sequences on terminals.

Text from models, servers, files and templates is untrusted. On a terminal, escape sequences could write to the
clipboard or hide text. `printable` removes them, control characters except line feed and tab, and characters that
change the writing direction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, cast
from urllib.parse import quote, quote_plus, urlsplit

SHORTEST_KEY = 8
"""Minimum length for replacing a key anywhere; a shorter key could be part of a word and is replaced only as a word."""

_REPLACEMENT = "[the API key]"
_MAX_HELD = 4096  # maximum characters of an unfinished sequence
_STRING = rf"[^\x07\x1b\n\x80-\x9f]{{0,{_MAX_HELD}}}"
_BEGUN_STRING = rf"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f]){_STRING}"
_BEGUN_CSI = r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,64}"
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SEQUENCE = re.compile(rf"{_BEGUN_STRING}(?:\x07|\x1b\\|\x9c)|{_BEGUN_CSI}[@-~]|\x1b[ -/]{{0,64}}[0-~]")
_BEGUN = re.compile(rf"(?:{_BEGUN_STRING}\x1b?|{_BEGUN_CSI}|\x1b[ -/]{{0,64}})\Z")


class Redactor:
    """Replaces credentials in errors. Do not use it for answers, which may contain the same text legitimately."""

    def __init__(self, secrets: Iterable[str]) -> None:
        forms = {form for secret in secrets if secret for form in (secret, quote(secret, safe=""), quote_plus(secret))}
        patterns = [_pattern(form) for form in sorted(forms, key=len, reverse=True)]
        self._pattern = re.compile("|".join(patterns)) if patterns else None

    def text(self, text: str) -> str:
        return paired(text if self._pattern is None else self._pattern.sub(_REPLACEMENT, text))

    def json(self, value: Any) -> Any:
        """Redact all strings and names in decoded JSON. Raises RecursionError if nested too deeply."""
        return with_texts(value, self.text)


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to all strings and names in decoded JSON. Raises RecursionError if nested too deeply."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [with_texts(each, change) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {change(name): with_texts(each, change) for name, each in cast("dict[str, Any]", value).items()}
    return value


def _pattern(secret: str) -> str:
    escaped = re.escape(secret)
    return escaped if len(secret) >= SHORTEST_KEY else rf"(?<![\w-]){escaped}(?![\w-])"


def paired(text: str) -> str:
    """Replace lone surrogates, which files and logs cannot hold, by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_sendable(key: str) -> bool:
    """Return whether the key is valid in a header. HTTP libraries would quote an invalid key in their error message."""
    return all("!" <= character <= "~" for character in key)


def shown_url(url: str) -> str:
    """Remove user, password, query and fragment from a URL, even from a malformed one."""
    bare = re.split(r"[?#]", url, maxsplit=1)[0]
    try:
        parts = urlsplit(bare)
        _ = parts.port  # raises ValueError if a password with a slash was parsed as the port
    except ValueError:
        return re.sub(r"^(.*//)?.*@", r"\1", bare)
    if not parts.netloc:
        return re.sub(r"^.*@", "", bare)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def printable(text: str) -> str:
    """Remove terminal control sequences from `text`. Bytes that are not UTF-8 (PEP 383) are shown as escapes."""
    return _UNPRINTABLE.sub("", _SEQUENCE.sub("", text)).encode("utf-8", "backslashreplace").decode()


class PrintableStream:
    """Incremental `printable`, for text in pieces that may split an escape sequence."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        """Return the text that is safe to show so far."""
        text = self._held + piece
        begun = _BEGUN.search(text)
        at = len(text) if begun is None else begun.start()
        self._held = text[at:]
        return printable(text[:at])

    def end(self) -> str:
        """Return the rest of the text. An unfinished sequence loses only its control characters."""
        held, self._held = self._held, ""
        return printable(held)
