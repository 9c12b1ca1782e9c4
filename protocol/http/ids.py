"""Random identifiers with a prefix for their type, safe in URLs and headers."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    """Return `prefix`, a hyphen and 24 random hexadecimal digits, such as `chatcmpl-5f0c…`."""
    return f"{prefix}-{secrets.token_hex(12)}"
