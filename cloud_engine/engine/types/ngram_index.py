"""An n-gram index of a growing text."""

from __future__ import annotations

from collections.abc import Sequence

_SIZE = 3  # tokens per n-gram


class NgramIndex:
    """Maps each n-gram of `_SIZE` tokens to the position after its latest occurrence, if a token follows there.

    Each token is indexed once and adds at most one entry.
    """

    __slots__ = ("_follows", "_read")

    def __init__(self) -> None:
        self._follows: dict[tuple[int, ...], int] = {}
        self._read = _SIZE  # tokens before this position are indexed

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Return the position after an earlier copy of the text's last n-gram. The text may only grow between calls."""
        for position in range(self._read, len(token_ids)):
            self._follows[tuple(token_ids[position - _SIZE : position])] = position
        self._read = max(self._read, len(token_ids))
        return self._follows.get(tuple(token_ids[-_SIZE:]))
