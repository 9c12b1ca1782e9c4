"""The owners of KV blocks: reference counts, and finished blocks kept for reuse until their room is needed."""

from __future__ import annotations

from collections import OrderedDict

#: Stands in a block table where the block behind every window was, so that the others keep their places.
NO_BLOCK = -1


class BlockPool:
    """Fixed-size blocks numbered 0 to `num_blocks - 1`. Every operation is O(1).

    A block with references is in use. A free block may still be *cached*: registered under the hash of its content, or
    under a number that stands in for it, found again by `lookup`, and evicted, least recently released first, when
    `allocate` needs it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: list[bytes | int | None] = [None] * num_blocks
        self._cached: dict[bytes | int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self) -> int:
        """A block for exclusive use. The caller checks `num_free` first; an empty pool raises KeyError."""
        block, _ = self._free.popitem(last=False)
        self.forget(block)
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Take one more reference on a block found by `lookup`; its content must not be written any more."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Give one reference back. Raises ValueError on a block nobody holds."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is released more often than it was taken")
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None
            if self._hash_of[block] is None:
                self._free.move_to_end(block, last=False)  # nothing worth keeping: reuse it first

    def register(self, block: int, content_hash: bytes | int) -> None:
        """Make a full block findable, unless it is. The first block with a content wins; later twins stay private."""
        if content_hash not in self._cached and self._hash_of[block] is None:
            self._cached[content_hash] = block
            self._hash_of[block] = content_hash

    def forget(self, block: int) -> None:
        """Let nobody find a block any more, because its content changes."""
        content_hash = self._hash_of[block]
        if content_hash is not None:
            del self._cached[content_hash]
            self._hash_of[block] = None

    def lookup(self, content_hash: bytes | int) -> int | None:
        return self._cached.get(content_hash)
