"""Error messages and exit codes for failures of commands."""

from __future__ import annotations

from io import UnsupportedOperation
from typing import Any

from ...protocol.errors import ConfigurationError, InvalidRequestError, UpdraftError


def message_of(error: Exception) -> str:
    """Return the message for the user: Updraft's own, else the server's, else the exception's type and text."""
    if isinstance(error, UpdraftError):
        return error.message
    if isinstance(message := _server_error(error).get("message"), str):
        return message
    if isinstance(error, UnsupportedOperation):  # `main` has opened a closed standard output for reading only
        return "Standard output is closed."
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}."
    return f"{type(error).__name__}: {error} (UPDRAFT_DEBUG=1 shows the traceback)"


def exit_code(error: Exception) -> int:
    """Return 2 if the user has to change the command or a setting, else 1."""
    misused = isinstance(error, InvalidRequestError | ConfigurationError)
    return 2 if misused or _server_error(error).get("type") == ConfigurationError.type else 1


def _server_error(error: Exception) -> dict[str, Any]:
    """Return the error object in the body of an openai client error; empty for other errors."""
    body = getattr(error, "body", None)
    return body if isinstance(body, dict) else {}
