"""Failures of a node or of the connection to a node."""

from __future__ import annotations

from ....protocol.errors import REQUEST_FAILED, UpstreamError


class UpstreamFailure(Exception):
    """The node was unreachable, or the connection broke."""


class AnswerFailure(UpstreamFailure):
    """The node is up, but its answer is an error or invalid. One other node is tried.

    `error`: the error that the node reported. `event`: the same error as a stream event.
    """

    def __init__(self, why: str, error: UpstreamError | None = None, event: bytes = b"") -> None:
        super().__init__(why)
        self.error = error
        self.event = event

    @property
    def is_final(self) -> bool:
        """Return whether the request itself made the engine fail, so that other nodes must not get it."""
        return self.error is not None and self.error.code == REQUEST_FAILED


class UnreachableError(UpstreamFailure):
    """No connection to the node could be made, so the node has not received the request."""


class AnswerTooLargeError(UpstreamFailure):
    """The answer exceeds the gateway's size limit; other nodes would answer the same."""


class UpstreamTimeout(UpstreamFailure):
    """The node exceeded a timeout: to connect, for the first bytes, or between two pieces."""
