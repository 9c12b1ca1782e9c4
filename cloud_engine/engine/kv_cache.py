"""Block tables: which blocks hold a request's keys and values, and which it can take over from earlier requests."""

from __future__ import annotations

import hashlib
from array import array

from .block_pool import BlockPool
from .request import RequestState


class KVCacheManager:
    """Hands blocks to requests. Knows nothing of tensors; the runner turns block tables into memory.

    Full blocks are hashed in a chain (parent hash + tokens), so equal hashes mean equal prefixes and a prefix found in
    the pool need not be computed again. The chain begins with the request's salt.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, has_draft: bool = False
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._prefix_caching = prefix_caching
        self._has_draft = has_draft
        self._copies: dict[int, int] = {}  # block -> the block whose content it is to get

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def admit(self, state: RequestState) -> bool:
        """Give a request blocks for all its known tokens, cached ones first, or nothing at all.

        On success `num_computed_tokens` covers the cached prefix. The last known token is always computed anew: its
        logits are needed.
        """
        cached = self._cached_prefix(state)
        if not self._has_room(state, cached):
            return False
        missing = self.blocks_for(len(state.token_ids)) - len(cached)
        for block in cached:
            self.pool.share(block)
        state.block_table = cached + [self.pool.allocate() for _ in range(missing)]
        state.num_registered_blocks = len(cached)
        state.num_computed_tokens = state.num_draft_computed_tokens = len(cached) * self.block_size
        return True

    def can_admit(self, state: RequestState) -> bool:
        """Whether `admit` would succeed now."""
        return self._has_room(state, self._cached_prefix(state))

    def _has_room(self, state: RequestState, cached: list[int]) -> bool:
        missing = self.blocks_for(len(state.token_ids)) - len(cached)
        revived = sum(self.pool.references(block) == 0 for block in cached)
        return missing + revived <= self.pool.num_free

    def grow(self, state: RequestState, num_tokens: int) -> bool:
        """Extend the block table to hold `num_tokens`, or change nothing and say False.

        A block that is about to be written but is shared with a fork is replaced by a copy first.
        """
        missing = self.blocks_for(num_tokens) - len(state.block_table)
        shared = self._shared_tail(state)
        if max(missing, 0) + (shared is not None) > self.pool.num_free:
            return False
        if shared is not None:
            source = state.block_table[shared]
            state.block_table[shared] = self.pool.allocate()
            self._copies[state.block_table[shared]] = source
            self.pool.release(source)
        state.block_table.extend(self.pool.allocate() for _ in range(missing))
        return True

    def fork(self, parent: RequestState, child: RequestState) -> None:
        """Give `child` the blocks of what it has in common with `parent`, its computed tokens; nothing is copied."""
        blocks = parent.block_table[: self.blocks_for(child.num_computed_tokens)]
        for block in blocks:
            self.pool.share(block)
        child.block_table = list(blocks)
        child.block_hashes = parent.block_hashes[: child.num_computed_tokens // self.block_size]
        child.num_registered_blocks = min(parent.num_registered_blocks, len(child.block_hashes))

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, target) blocks to copy before the next pass; all sources are to be read before any is written."""
        copies = [(source, target) for target, source in self._copies.items()]
        self._copies.clear()
        return copies

    def trim(self, state: RequestState) -> None:
        """Give back blocks beyond the known tokens, left over from refuted drafts."""
        for _ in range(len(state.block_table) - self.blocks_for(len(state.token_ids))):
            self.pool.release(state.block_table.pop())

    def register(self, state: RequestState) -> None:
        """Make blocks that became full findable for later requests; with a draft model both halves must be there."""
        if not (self._prefix_caching and state.request.uses_prefix_cache):
            return
        computed = state.num_computed_tokens
        if self._has_draft:
            computed = min(computed, state.num_draft_computed_tokens)
        full = computed // self.block_size
        self._hash_up_to(state, full)
        for index in range(state.num_registered_blocks, full):
            self.pool.register(state.block_table[index], state.block_hashes[index])
        state.num_registered_blocks = max(full, state.num_registered_blocks)

    def free(self, state: RequestState) -> None:
        """Give everything back. Deep blocks first, so that a prefix outlives its continuations in the cache."""
        for block in reversed(state.block_table):
            self._copies.pop(block, None)
            self.pool.release(block)
        state.block_table = []
        state.num_registered_blocks = 0
        state.num_computed_tokens = state.num_draft_computed_tokens = 0

    def _shared_tail(self, state: RequestState) -> int | None:
        """Where in its block table the request is going to write next, if that block is not its own to change.

        A fork may be the last holder of a block that its parent has filled and registered: that is to be kept as well.
        """
        index = state.num_computed_tokens // self.block_size
        if index >= len(state.block_table):
            return None
        block = state.block_table[index]
        return index if self.pool.references(block) > 1 or self.pool.is_registered(block) else None

    def _cached_prefix(self, state: RequestState) -> list[int]:
        if not (self._prefix_caching and state.request.uses_prefix_cache):
            return []
        full = (len(state.token_ids) - 1) // self.block_size
        self._hash_up_to(state, full)
        blocks: list[int] = []
        for content_hash in state.block_hashes[:full]:
            block = self.pool.lookup(content_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _hash_up_to(self, state: RequestState, num_blocks: int) -> None:
        size = self.block_size
        for index in range(len(state.block_hashes), num_blocks):
            parent = state.block_hashes[-1] if state.block_hashes else state.request.cache_salt.encode()
            tokens = array("q", state.token_ids[index * size : (index + 1) * size])
            state.block_hashes.append(hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest())
