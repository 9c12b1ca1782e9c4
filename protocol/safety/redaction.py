"""Redaction of API keys and URL credentials for logs, metrics and errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, cast
from urllib.parse import quote, quote_plus, urlsplit

SHORTEST_KEY = 8
"""Minimum length for replacing a key anywhere; a shorter key could be part of a word and is replaced only as a word."""

_REPLACEMENT = "[the API key]"


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
