"""Every failure as one line a person can act on."""

from __future__ import annotations

from typing import Any

from ...protocol.errors import ConfigurationError, InvalidRequestError, UpdraftError

FAILED, MISUSED = 1, 2


def message_of(error: Exception) -> str:
    """The message for the user: our own one, the one the server sent, or at least the kind of failure."""
    if isinstance(error, UpdraftError):
        return error.message
    message = _server_error(error).get("message")
    if isinstance(message, str):
        return message
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}."
    return f"{type(error).__name__}: {error} (UPDRAFT_DEBUG=1 shows the traceback)"


def exit_code(error: Exception) -> int:
    """2 where the call or a setting has to change, else 1."""
    misused = isinstance(error, InvalidRequestError | ConfigurationError)
    return MISUSED if misused or _server_error(error).get("type") == ConfigurationError.type else FAILED


def _server_error(error: Exception) -> dict[str, Any]:
    """The error object that the openai client's errors carry."""
    body = getattr(error, "body", None)
    return body if isinstance(body, dict) else {}
