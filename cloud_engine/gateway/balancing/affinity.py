"""Which node has computed the beginning of a prompt before: hashes of its blocks, and those that each node has seen."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

_BLOCK = 1024  # bytes of JSON, some 250 tokens
_FINE_BLOCKS = 32  # behind them blocks are longer: whoever shares that much shares more
_LONG_BLOCK = 16 * _BLOCK
_MOST_BLOCKS = 64
_BYTES_PER_TOKEN = 4
_USUAL_ANSWER = 256  # tokens
_STARTS = (b'"messages"', b'"prompt"', b'"input"')


@dataclass(frozen=True, slots=True)
class Placement:
    """What the choice of a node depends on."""

    model: str
    # Hashes of the prompt's blocks, each of all before it too.
    blocks: Sequence[int] = ()
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
        return cls(model, prompt_blocks(scope, body, start), name, _USUAL_ANSWER + len(body) // _BYTES_PER_TOKEN)


def prompt_blocks(scope: int, body: bytes, start: int) -> list[int]:
    """A prompt that begins as another one has the same first blocks. Less than a block has none."""
    blocks: list[int] = []
    value, view = scope, memoryview(body)
    while len(blocks) < _MOST_BLOCKS:
        end = start + (_BLOCK if len(blocks) < _FINE_BLOCKS else _LONG_BLOCK)
        if end > len(body):
            break
        value = hash((value, hash(view[start:end])))
        blocks.append(value)
        start = end
    return blocks


class PrefixIndex:
    """The blocks and sessions that one node has seen lately, at most `size` of them."""

    def __init__(self, size: int = 32_768) -> None:
        self._size = size
        self._seen: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def num_matching(self, placement: Placement) -> int:
        """The first blocks that it has seen; a known session is worth all of them, and one more."""
        if placement.session in self._seen:
            return len(placement.blocks) + 1
        return bisect_left(placement.blocks, True, key=lambda block: block not in self._seen)

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
