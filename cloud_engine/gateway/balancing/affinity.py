"""Nodes that have computed the beginning of a prompt before: hashes of its blocks, and which node has seen them."""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

_BLOCK = 1024  # bytes of JSON, some 250 tokens
_READ = 4 * _BLOCK  # of a longer block
_MAX_BYTES = 2**20


def _ends() -> tuple[int, ...]:
    """The ends of blocks: behind the first ones each is an eighth of all before it, so that few cover a long prompt."""
    ends = [_BLOCK]
    while ends[-1] < _MAX_BYTES:
        ends.append(ends[-1] + max(_BLOCK, ends[-1] // 8))
    return tuple(ends)


_ENDS = _ends()
_BYTES_PER_TOKEN = 4
_USUAL_ANSWER = 256  # tokens
_STARTS = (b'"messages"', b'"prompt"', b'"input"')


@dataclass(frozen=True, slots=True)
class Placement:
    """The properties of a request that decide on its node."""

    model: str
    # Hashes of the prompt's blocks, each of all before it too.
    blocks: Sequence[int] = ()
    # Of the prompt.
    num_bytes: int = 1
    # The hash of the conversation's name, where the client gave it one.
    session: int | None = None
    # What it keeps a node busy with, estimated.
    tokens: int = _USUAL_ANSWER

    @classmethod
    def of(cls, key_name: str, model: str, body: bytes, session: str = "") -> Placement:
        """Caches of different keys are apart, and so are blocks and sessions here."""
        scope = hash((key_name, model))
        start = max(0, next((at for name in _STARTS if (at := body.find(name)) >= 0), 0))
        name = hash((scope, session)) if session else None
        tokens = _USUAL_ANSWER + len(body) // _BYTES_PER_TOKEN
        return cls(model, prompt_blocks(scope, body, start), len(body) - start, name, tokens)


def prompt_blocks(scope: int, body: bytes, start: int) -> list[int]:
    """A prompt that begins as another one has the same first blocks. Less than a block has none."""
    blocks: list[int] = []
    value, begin, size = scope, start, len(body) - start
    for end in _ENDS:
        if end > size:
            break
        value = hash((value, body[begin : min(start + end, begin + _READ)]))
        blocks.append(value)
        begin = start + end
    return blocks


class PrefixIndex:
    """The blocks and sessions that nodes have seen lately, for all processes that are forked from this one.

    A table of pairs: what comes takes the first place of its pair, and of the others there the older one is forgotten.
    Nothing is locked: of two that are written to one place at once, one is not known.
    """

    def __init__(self, pairs: int = 2**19) -> None:
        self._pairs = pairs
        self._table = memoryview(mmap.mmap(-1, pairs * 16)).cast("q")

    def share_of(self, node: str, placement: Placement) -> float:
        """Of a prompt, what the node has seen of its beginning; of a session that it knows, more than all."""
        if placement.session is not None and self._has(hash((node, placement.session))):
            return 2.0
        known = bisect_left(placement.blocks, True, key=lambda block: not self._has(hash((node, block))))
        return _ENDS[known - 1] / placement.num_bytes if known else 0.0

    def add(self, node: str, placement: Placement) -> None:
        for block in placement.blocks:
            self._keep(hash((node, block)))
        if placement.session is not None:
            self._keep(hash((node, placement.session)))

    def _has(self, value: int) -> bool:
        at = value % self._pairs * 2
        return value in (self._table[at], self._table[at + 1])

    def _keep(self, value: int) -> None:
        table, at = self._table, value % self._pairs * 2
        if table[at] != value:
            table[at + 1], table[at] = table[at], value
