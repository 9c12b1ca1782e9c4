"""The failures of a node."""

from __future__ import annotations

from ....protocol.errors import UpstreamError


class UpstreamFailure(Exception):
    """The node could not be reached, or the connection to it broke."""


class AnswerFailure(UpstreamFailure):
    """The node lives, but its answer is an error or unusable. Another node is asked once.

    `error`: the error that the node reports. `event`: the same as an event of the stream.
    """

    def __init__(self, why: str, error: UpstreamError | None = None, event: bytes = b"") -> None:
        super().__init__(why)
        self.error = error
        self.event = event


class UnreachableError(UpstreamFailure):
    """No connection to the node could be made, so no request has reached it."""


class AnswerTooLargeError(UpstreamFailure):
    """The gateway does not hold so much. Another node would answer the same."""


class UpstreamTimeout(UpstreamFailure):
    """The node took longer than it may: to connect, to its first token, or between two."""
