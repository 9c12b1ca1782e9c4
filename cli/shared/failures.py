"""Every failure as one line a person can act on."""

from __future__ import annotations

from ...protocol.errors import UpdraftError


def message_of(error: Exception) -> str:
    """What to tell the user: our own message, the one the server sent, or at least the kind of failure."""
    if isinstance(error, UpdraftError):
        return error.message
    body = getattr(error, "body", None)  # errors of the openai client carry the server's error object
    if isinstance(body, dict) and isinstance(body.get("message"), str):
        return body["message"]
    return f"{type(error).__name__}: {error} (UPDRAFT_DEBUG=1 shows the traceback)"
