"""Endpoints of OpenAI and Ollama that the router does not support, each with advice."""

from __future__ import annotations

import re

from ....protocol.errors import UnsupportedFeatureError

_UNSUPPORTED = tuple(
    (re.compile(rf"(?:{methods}) {path}(?:/.*)?", re.DOTALL), instead)
    for methods, path, instead in (
        ("DELETE", "/v1/models", "use `updraft rm` or DELETE /updraft/models/{name} to remove a model of this "
         "device"),
        (r"\w+", "/api/(?:create|copy|push|delete|blobs)", "use `updraft rm` to remove a model of this device and "
         "/api/pull to fetch one"),
        (r"\w+", "/v1/(?:assistants|containers|evals|fine_tuning|realtime|threads|uploads|vector_stores|videos)",
         "this endpoint stores data or trains models at one provider. Call that provider directly"),
        ("POST", "/v1/images/(?:edits|variations)", "images are supported only by /v1/images/generations"),
    )
)  # fmt: skip


def check_supported(method: str, path: str) -> None:
    """Raise UnsupportedFeatureError, with advice, for a known endpoint that the router does not support."""
    for pattern, instead in _UNSUPPORTED:
        if pattern.fullmatch(f"{method} {path}"):
            raise UnsupportedFeatureError(
                f"{method} {path[:100]} is not supported by this server: {instead}.", code="unsupported_endpoint"
            )
