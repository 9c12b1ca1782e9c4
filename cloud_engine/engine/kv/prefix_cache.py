"""The blocks that hold prefixes, so that later requests need not compute them again; hashed when somebody asks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from ..types.prefix_hashes import PrefixHashes, Unhashed
from .block_pool import NO_BLOCK, BlockPool


class PrefixCache:
    """Finds blocks by the prefix that ends in them.

    A request whose first block nobody else begins with is *alone*: only that block is hashed, and those behind it are
    kept in the pool under stand-ins, until somebody comes with the same first block. So what nobody shares costs next
    to nothing. `gaps`: first blocks may be gone before those behind them, as under a window; then nobody is alone.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, gaps: bool) -> None:
        self._pool = pool
        self._block_size = block_size
        self._gaps = gaps
        self._alone: dict[int, PrefixHashes] = {}  # by first block
        self._keys = count()

    def leading(self, prefix: PrefixHashes, token_ids: Sequence[int], num_blocks: int) -> list[int]:
        """The cached ones of the first `num_blocks` blocks, up to the first that is missing."""
        blocks: list[int] = []
        if num_blocks > 0 and self._first_block(prefix, token_ids) is not None:
            for found in self.each(prefix, token_ids, num_blocks):
                if found is None:
                    break
                blocks.append(found)
        return blocks

    def each(self, prefix: PrefixHashes, token_ids: Sequence[int], num_blocks: int) -> list[int | None]:
        """The place in the cache of each of the first `num_blocks` blocks, if it has one."""
        prefix.extend(token_ids, num_blocks, self._block_size)
        return [self._pool.lookup(content_hash) for content_hash in prefix.hashes[:num_blocks]]

    def register(
        self, prefix: PrefixHashes, token_ids: Sequence[int], block_table: Sequence[int], start: int, end: int
    ) -> None:
        """Make `block_table[start:end]` findable, all of them full. `token_ids` may grow, but nothing in it changes."""
        if start == 0 and not self._gaps and self._first_block(prefix, token_ids) is None:
            self._pool.register(block_table[0], prefix.hashes[0])
            self._alone[block_table[0]] = prefix
            prefix.unhashed = Unhashed(token_ids)
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
        """Others may begin with this block from now on: whoever was alone with it gives its blocks their hashes."""
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

    def forget(self, block: int) -> None:
        """Let nobody find a block any more, because its content changes."""
        self._pool.forget(block)
        self.evicted(block)

    def evicted(self, block: int) -> None:
        """The pool has forgotten a block to give it to somebody else."""
        prefix = self._alone.pop(block, None)
        if prefix is not None:
            prefix.unhashed = None  # out of reach now, and the first to be evicted

    def _first_block(self, prefix: PrefixHashes, token_ids: Sequence[int]) -> int | None:
        """The place of the first block in the cache, if it has one."""
        if not prefix.hashes:
            prefix.extend(token_ids, 1, self._block_size)
        block = self._pool.lookup(prefix.hashes[0])
        if block is not None:
            self.share(block)
        return block
