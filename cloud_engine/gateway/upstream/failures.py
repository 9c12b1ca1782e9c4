"""Why a node gave no answer."""

from __future__ import annotations


class UpstreamFailure(Exception):
    """The node could not be reached, or the connection to it broke."""


class UpstreamTimeout(UpstreamFailure):
    """The node took longer than it may: to connect, to its first token, or between two."""
