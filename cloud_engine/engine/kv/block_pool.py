"""The pool of KV blocks: reference counts, and released blocks cached for reuse until they are evicted."""

from __future__ import annotations

from collections import OrderedDict

#: Placeholder in a block table for a released block outside every attention window; it keeps the other indices valid.
NO_BLOCK = -1


class BlockPool:
    """Fixed-size blocks numbered 0 to `num_blocks - 1`. Every operation is O(1).

    A block with references is in use. A free block may still be *cached*: registered under the hash of its content or a
    placeholder number, and returned by `lookup` until `allocate` evicts it, least recently released first.
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
        """Return a block for exclusive use. Check `num_free` first: raises KeyError if the pool is empty."""
        block, _ = self._free.popitem(last=False)
        self.forget(block)
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block found by `lookup`. From now on, do not write to the block."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop one reference. Raises ValueError if the block has none."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} was released more often than it was acquired")
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None
            if self._hash_of[block] is None:
                self._free.move_to_end(block, last=False)  # not cached: reuse this block first

    def register(self, block: int, content_hash: bytes | int) -> None:
        """Register a full block for `lookup`. Does nothing if the block or its content is already registered."""
        if content_hash not in self._cached and self._hash_of[block] is None:
            self._cached[content_hash] = block
            self._hash_of[block] = content_hash

    def forget(self, block: int) -> None:
        """Unregister a block, because its content is about to change."""
        content_hash = self._hash_of[block]
        if content_hash is not None:
            del self._cached[content_hash]
            self._hash_of[block] = None

    def lookup(self, content_hash: bytes | int) -> int | None:
        return self._cached.get(content_hash)
