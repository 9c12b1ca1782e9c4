"""Identifiers: random, prefixed by what they name, safe in URLs and headers."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    """`new_id("chatcmpl")` -> `chatcmpl-5f0c…`, 24 hexadecimal digits of randomness."""
    return f"{prefix}-{secrets.token_hex(12)}"
