"""Repetitions in a text: an index that grows with the text."""

from __future__ import annotations

from collections.abc import Sequence

_SIZE = 3  # tokens that must repeat


class NgramIndex:
    """The place at which each run of `_SIZE` tokens of one text was last followed by another token.

    One entry per token at most, and every token is read once.
    """

    __slots__ = ("_follows", "_read")

    def __init__(self) -> None:
        self._follows: dict[tuple[int, ...], int] = {}
        self._read = _SIZE  # tokens before this have been entered as followers

    def find(self, token_ids: Sequence[int]) -> int | None:
        """The continuation of an earlier occurrence of the text's end. `token_ids`: last time's, and more."""
        for position in range(self._read, len(token_ids)):
            self._follows[tuple(token_ids[position - _SIZE : position])] = position
        self._read = max(self._read, len(token_ids))
        return self._follows.get(tuple(token_ids[-_SIZE:]))
