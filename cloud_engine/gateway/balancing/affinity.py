"""Prefix affinity: hashes of prompt blocks, and the nodes that have recently served each block."""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

_BLOCK = 1024  # minimum block size, in bytes of JSON; about 250 tokens
_READ = 4 * _BLOCK  # maximum bytes hashed per block; the end of a longer block is ignored
_MAX_BYTES = 2**20


def _ends() -> tuple[int, ...]:
    """Return the byte offset at which each prompt block ends. Later blocks are larger: a long prompt has few blocks."""
    ends = [_BLOCK]
    while ends[-1] < _MAX_BYTES:
        ends.append(ends[-1] + max(_BLOCK, ends[-1] // 8))
    return tuple(ends)


_ENDS = _ends()
_BYTES_PER_TOKEN = 4
_USUAL_ANSWER = 256  # assumed answer length, in tokens
_STARTS = (b'"messages"', b'"prompt"', b'"input"')


@dataclass(frozen=True, slots=True)
class Placement:
    """The properties of a request that decide which node gets the request."""

    model: str
    # Hashes of the prompt's blocks; each hash also covers all earlier blocks.
    blocks: Sequence[int] = ()
    # Length of the prompt, in bytes.
    num_bytes: int = 1
    # Hash of the conversation's name, if the client sent a name.
    session: int | None = None
    # Estimated tokens of prompt and answer, counted as the node's load.
    tokens: int = _USUAL_ANSWER

    @classmethod
    def of(cls, key_name: str, model: str, body: bytes, session: str = "") -> Placement:
        """Return the placement of a request. The key's name is part of each hash, so affinity stays within one key."""
        scope = hash((key_name, model))
        start = max(0, next((at for name in _STARTS if (at := body.find(name)) >= 0), 0))
        name = hash((scope, session)) if session else None
        tokens = _USUAL_ANSWER + len(body) // _BYTES_PER_TOKEN
        return cls(model, prompt_blocks(scope, body, start), len(body) - start, name, tokens)


def prompt_blocks(scope: int, body: bytes, start: int) -> list[int]:
    """Return one hash per block, which covers the prompt up to the block's end. Equal prefixes have equal hashes."""
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
    """Prompt blocks and sessions that nodes have served lately, shared with all processes forked from this one.

    A two-way set-associative table of hashes: a new entry evicts the older entry of its pair. Writes are not locked; of
    two concurrent writes to the same pair, one may be lost.
    """

    def __init__(self, pairs: int = 2**19) -> None:
        self._pairs = pairs
        self._table = memoryview(mmap.mmap(-1, pairs * 16)).cast("q")

    def share_of(self, node: str, placement: Placement) -> float:
        """Return the share of the prompt that the node has served before, or 2.0 if it has served the session."""
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
