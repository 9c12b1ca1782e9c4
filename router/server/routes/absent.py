"""Endpoints of OpenAI and Ollama that are not here: a request to one is told what to do instead."""

from __future__ import annotations

import re

from ....protocol.errors import UnsupportedFeatureError

_ABSENT = tuple(
    (re.compile(rf"(?:{methods}) {path}(?:/.*)?", re.DOTALL), instead)
    for methods, path, instead in (
        ("POST", "/v1/responses/compact", "only the server that compacts a conversation can read it again. Send the "
         "items that still matter as `input`"),
        (r"\w+", "/v1/conversations", "a conversation goes on with `previous_response_id`, or with all its items as "
         "`input`"),
        ("DELETE", "/v1/models", "`updraft rm` and DELETE /updraft/models/{name} remove a model of this "
         "device"),
        (r"\w+", "/api/(?:create|copy|push|delete|blobs)", "`updraft rm` removes a model of this device; "
         "/api/pull fetches one"),
        (r"\w+", "/v1/(?:assistants|containers|evals|fine_tuning|realtime|threads|uploads|vector_stores|videos)",
         "it keeps or trains something at one provider. Ask that provider"),
        ("POST", "/v1/images/(?:edits|variations)", "pictures are made by /v1/images/generations alone"),
    )
)  # fmt: skip


def check_absent(method: str, path: str) -> None:
    """Raises UnsupportedFeatureError for an endpoint that others have."""
    for pattern, instead in _ABSENT:
        if pattern.fullmatch(f"{method} {path}"):
            raise UnsupportedFeatureError(
                f"{method} {path[:100]} is not supported by this server: {instead}.", code="unsupported_endpoint"
            )
