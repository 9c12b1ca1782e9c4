"""Addresses and keys in a form that logs, metrics and errors may show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast
from urllib.parse import quote, quote_plus, urlsplit

SHORTEST_KEY = 8
"""Characters. A shorter key may be part of any word: it is replaced only where it stands alone."""

_REPLACEMENT = "[the API key]"


class Redactor:
    """Replaces credentials in errors. Never for the content of answers: the same word may be a right answer."""

    def __init__(self, secrets: Iterable[str]) -> None:
        forms = {form for secret in secrets if secret for form in (secret, quote(secret, safe=""), quote_plus(secret))}
        patterns = [_pattern(form) for form in sorted(forms, key=len, reverse=True)]
        self._pattern = re.compile("|".join(patterns)) if patterns else None

    def text(self, text: str) -> str:
        return paired(text if self._pattern is None else self._pattern.sub(_REPLACEMENT, text))

    def json(self, value: Any) -> Any:
        """Decoded JSON with every text redacted, names too. Raises RecursionError if it is nested too deeply."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.json(each) for each in cast("list[Any]", value)]
        if isinstance(value, dict):
            fields = cast("Mapping[str, Any]", value)
            return {self.text(name): self.json(each) for name, each in fields.items()}
        return value


def _pattern(secret: str) -> str:
    found = re.escape(secret)
    return found if len(secret) >= SHORTEST_KEY else rf"(?<![\w-]){found}(?![\w-])"


def paired(text: str) -> str:
    """`text` with a replacement character for each half of a surrogate pair, which no file or log can hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_sendable(key: str) -> bool:
    """Whether a header can hold it as one word. HTTP libraries quote one that cannot be sent in their error."""
    return all("!" <= character <= "~" for character in key)


def shown_url(url: str) -> str:
    """`url` without user, password, query and fragment, whether it is a sound one or not."""
    bare = re.split(r"[?#]", url, maxsplit=1)[0]
    try:
        parts = urlsplit(bare)
        _ = parts.port  # raises for a password with a slash, which looks like a port
    except ValueError:
        return re.sub(r"^(.*//)?.*@", r"\1", bare)
    if not parts.netloc:
        return re.sub(r"^.*@", "", bare)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
