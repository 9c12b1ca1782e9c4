"""Shape checks of cloud answers: completions, stream events and embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...protocol.http.lenient_json import json_of
from ..request.json_narrowing import table, tables
from .failures import invalid_answer
from .providers.provider import Provider


def completion_in(
    raw: bytes, url: str, provider: Provider, redact: Callable[[Any], Any], *, is_text: bool = False
) -> dict[str, Any]:
    """Return the answer as a completion. `is_text`: the request was a bare prompt. `redact`: hides keys in errors.

    Raises CloudFailure if the body is no completion, or if it is an error with status 200.
    """
    body = _table(raw, url, provider.read)
    if body.get("error") and not body.get("choices"):
        raise provider.reported(url, redact(body["error"]))
    body = provider.answer(body)
    choices = tables(body.get("choices"))
    is_choice = _is_text if is_text else _is_choice
    if not choices or not all(is_choice(choice) for choice in choices):
        raise invalid_answer(url, "its answer is not a completion")
    return body


def embeddings_in(raw: bytes, url: str) -> dict[str, Any]:
    """Return the decoded answer. Raises CloudFailure if it has no embeddings."""
    answer = _table(raw, url)
    if not tables(answer.get("data")):
        raise invalid_answer(url, "its answer has no embeddings")
    return answer


def models_in(raw: bytes, owner: str | None = None) -> frozenset[str]:
    """Return the model IDs in a model list, only those of `owner` if given. Empty if `raw` is not a list."""
    try:
        cards = tables((table(json_of(raw)) or {}).get("data")) or []
    except ValueError:
        return frozenset()
    return frozenset(str(card.get("id")) for card in cards if owner in (None, card.get("owned_by")))


def has_content(event: dict[str, Any]) -> bool:
    for choice in event["choices"]:
        delta = table(choice.get("delta")) or {}
        if choice.get("finish_reason") or choice.get("text"):
            return True
        if any(value for name, value in delta.items() if name != "role"):
            return True
    return False


def is_piece(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    return delta is None or (table(delta) is not None and _is_content(delta))


def _table(raw: bytes, url: str, read: Callable[[bytes], Any] = json_of) -> dict[str, Any]:
    try:
        return table(read(raw)) or {}
    except ValueError as error:
        raise invalid_answer(url, "its answer is not JSON") from error


def _is_text(choice: dict[str, Any]) -> bool:
    return isinstance(choice.get("text"), str) and isinstance(choice.get("finish_reason"), str | None)


def _is_choice(choice: dict[str, Any]) -> bool:
    """Return whether the choice has a message with content (even an empty string), or was blocked by a content filter.
    An empty message must not replace a good local answer.
    """
    message = table(choice.get("message"))
    if message is None or not _is_content(message) or not isinstance(choice.get("finish_reason"), str | None):
        return False
    calls = message.get("tool_calls")
    if calls is not None and tables(calls) is None:
        return False
    return (
        message.get("content") is not None
        or choice.get("finish_reason") == "content_filter"
        or any(value for name, value in message.items() if name not in ("role", "content"))
    )


def _is_content(message: dict[str, Any]) -> bool:
    """Return whether the message's content is a string, a list of parts, or missing."""
    content = message.get("content")
    return content is None or isinstance(content, str) or bool(tables(content))
