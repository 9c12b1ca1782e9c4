"""Addresses and keys in a form that logs, metrics and errors may show."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

SHORTEST_KEY = 8
"""Characters. A shorter key may be a part of any word, so that it cannot be taken out of a text."""


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
