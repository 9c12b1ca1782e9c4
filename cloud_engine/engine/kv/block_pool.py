"""The pool of KV blocks: reference counts, and released blocks cached for reuse until they are evicted.

The prefix cache finds computed blocks of earlier requests by their prefix, hashing lazily.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

from ..types.request_state import PrefixHashes, UnhashedBlocks

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


class PrefixCache:
    """Finds blocks by the prefix that ends in them.

    A request is *alone* while no other request has the same first block. Then only its first block is hashed, and the
    later ones are registered under placeholder keys until another request shares the first block, so unshared prefixes
    cost next to nothing. With `gaps` (sliding window), first blocks are released first, so all blocks are hashed.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, gaps: bool) -> None:
        self._pool = pool
        self._block_size = block_size
        self._gaps = gaps
        self._alone: dict[int, PrefixHashes] = {}  # first block -> hashes of its only request
        self._keys = count()

    def leading(self, prefix: PrefixHashes, token_ids: Sequence[int], num_blocks: int) -> list[int]:
        """Return the cached blocks among the first `num_blocks`, up to the first block that is not cached."""
        blocks: list[int] = []
        if num_blocks > 0 and self._first_block(prefix, token_ids) is not None:
            for block in self.each(prefix, token_ids, num_blocks):
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def each(self, prefix: PrefixHashes, token_ids: Sequence[int], num_blocks: int) -> list[int | None]:
        """Look up each of the first `num_blocks` blocks; None for blocks that are not cached."""
        prefix.extend(token_ids, num_blocks, self._block_size)
        return [self._pool.lookup(content_hash) for content_hash in prefix.hashes[:num_blocks]]

    def register(
        self, prefix: PrefixHashes, token_ids: Sequence[int], block_table: Sequence[int], start: int, end: int
    ) -> None:
        """Register the full blocks `block_table[start:end]`. `token_ids` may grow, but must not change otherwise."""
        if start == 0 and not self._gaps and self._first_block(prefix, token_ids) is None:
            self._pool.register(block_table[0], prefix.hashes[0])
            self._alone[block_table[0]] = prefix
            prefix.unhashed = UnhashedBlocks(token_ids)
            start = 1
        if prefix.unhashed is not None:
            for block in block_table[start:end]:
                key = next(self._keys)
                prefix.unhashed.keys.append(key)
                self._pool.register(block, key)
            return
        prefix.extend(token_ids, end, self._block_size)
        for index in range(start, end):
            if block_table[index] != NO_BLOCK:
                self._pool.register(block_table[index], prefix.hashes[index])

    def share(self, first_block: int) -> None:
        """Hash all blocks of the request that was alone with this first block, to replace its placeholder keys."""
        prefix = self._alone.pop(first_block, None)
        if prefix is None or prefix.unhashed is None:
            return
        unhashed, prefix.unhashed = prefix.unhashed, None
        end = 1 + len(unhashed.keys)
        prefix.extend(unhashed.token_ids, end, self._block_size)
        for key, content_hash in zip(unhashed.keys, prefix.hashes[1:end], strict=True):
            block = self._pool.lookup(key)
            if block is not None:  # not evicted meanwhile
                self._pool.forget(block)
                self._pool.register(block, content_hash)

    def evicted(self, block: int) -> None:
        """Drop the record of a block that the pool has evicted."""
        prefix = self._alone.pop(block, None)
        if prefix is not None:
            prefix.unhashed = None  # later blocks can only be found through the first one

    def _first_block(self, prefix: PrefixHashes, token_ids: Sequence[int]) -> int | None:
        """Look up the first block of `prefix`. If it is cached, `share` and return it, else return None."""
        if not prefix.hashes:
            prefix.extend(token_ids, 1, self._block_size)
        block = self._pool.lookup(prefix.hashes[0])
        if block is not None:
            self.share(block)
        return block
