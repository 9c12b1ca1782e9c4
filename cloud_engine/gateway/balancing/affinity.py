"""Nodes that have computed the beginning of a prompt before: hashes of its blocks, and those each node has seen."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
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
    """The blocks and sessions that one node has seen lately, at most `size` of them."""

    def __init__(self, size: int = 32_768) -> None:
        self._size = size
        self._seen: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def share_of(self, placement: Placement) -> float:
        """Of a prompt, what the node has seen of its beginning; of a session that it knows, more than all."""
        if placement.session in self._seen:
            return 2.0
        known = bisect_left(placement.blocks, True, key=lambda block: block not in self._seen)
        return _ENDS[known - 1] / placement.num_bytes if known else 0.0

    def add(self, placement: Placement) -> None:
        """The first blocks are the last to be forgotten, so that a block is never known without those before it."""
        seen = self._seen
        for block in reversed(placement.blocks):
            seen[block] = None
            seen.move_to_end(block)
        if placement.session is not None:
            seen[placement.session] = None
            seen.move_to_end(placement.session)
        while len(seen) > self._size:
            seen.popitem(last=False)
