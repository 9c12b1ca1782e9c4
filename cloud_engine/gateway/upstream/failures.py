"""The failures of a node."""

from __future__ import annotations


class UpstreamFailure(Exception):
    """The node could not be reached, or the connection to it broke."""


class UnreachableError(UpstreamFailure):
    """No connection to the node could be made, so no request has reached it."""


class AnswerTooLargeError(UpstreamFailure):
    """The gateway does not hold so much. Another node would answer the same."""


class UpstreamTimeout(UpstreamFailure):
    """The node took longer than it may: to connect, to its first token, or between two."""
