"""Block tables: which blocks hold a request's keys and values, and which it can take over from earlier requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from ..types.request_state import RequestState
from .block_pool import NO_BLOCK, BlockPool
from .prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Window:
    """The tokens that a model looks back which has a sliding window in every layer."""

    # The widest window, the query's own token included.
    num_tokens: int
    # The most tokens that a step computes.
    max_chunk: int


def most_blocks(num_tokens: int, block_size: int, window: Window | None) -> int:
    """Blocks that a request which grows to this many tokens ever holds at once."""
    if window is None:
        return -(-num_tokens // block_size)
    in_reach = window.num_tokens - 1 + window.max_chunk
    # One block more, as the window may begin inside a block.
    return min(-(-num_tokens // block_size), -(-in_reach // block_size) + 1)


class KVCacheManager:
    """Hands blocks to requests. Knows nothing of tensors; the runner turns block tables into memory.

    Full blocks are found again by the prefix that ends in them (`PrefixCache`), and need not be computed again.

    Under a `window` a request gives back the blocks that none of its queries will see again, and takes blocks chunk by
    chunk instead of all at the start: however long it is, it never holds more than window and chunk need. One layer
    without a window is enough for all blocks to be needed to the end, because all layers share one block table.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, window: Window | None = None
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._prefixes = PrefixCache(self.pool, block_size, gaps=window is not None) if prefix_caching else None
        self._window = window
        self._drafted: set[int] = set()  # registered blocks whose draft half is there, too
        self._copies: dict[int, int] = {}  # block -> the block whose content it is to get

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def most_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request which grows to this many tokens ever holds at once."""
        return most_blocks(num_tokens, self.block_size, self._window)

    def admit(self, state: RequestState) -> bool:
        """Give a request blocks for its known tokens, cached ones first, or nothing at all.

        For all of them, or for the first chunk of them where there is a window; there must be room for what they will
        hold at most. On success `num_computed_tokens` covers the cached prefix. The last known token is always computed
        anew: its logits are needed.
        """
        cached = self._cached_prefix(state)
        if not self._has_room(state, cached):
            return False
        missing = self._blocks_to_start(state, cached) - len(cached)
        for block in _held(cached):
            self.pool.share(block)
        state.block_table = cached + [self._allocate() for _ in range(missing)]
        state.num_registered_blocks = len(cached)
        state.num_computed_tokens = len(cached) * self.block_size
        state.num_own_slots = len(state.block_table) * self.block_size
        state.num_drafted_blocks = sum(1 for _ in takewhile(lambda b: b == NO_BLOCK or b in self._drafted, cached))
        state.num_draft_computed_tokens = state.num_drafted_blocks * self.block_size
        return True

    def can_admit(self, states: Sequence[RequestState], without: Iterable[RequestState] = ()) -> bool:
        """Whether `admit` would succeed for all if those `without` whom had given their blocks back.

        Of several it is supposed that they share nothing.
        """
        released = Counter(block for other in without for block in _held(other.block_table))
        freed = sum(self.pool.references(block) == holders for block, holders in released.items())
        if len(states) > 1:
            wanted = sum(self.most_blocks_for(len(state.token_ids)) for state in states)
            return wanted <= self.pool.num_free + freed
        (state,) = states
        cached = self._cached_prefix(state)
        revived = sum(self.pool.references(block) == released[block] for block in _held(cached))
        return self._missing(state, cached) + revived <= self.pool.num_free + freed

    def _has_room(self, state: RequestState, cached: list[int]) -> bool:
        revived = sum(self.pool.references(block) == 0 for block in _held(cached))
        return self._missing(state, cached) + revived <= self.pool.num_free

    def _missing(self, state: RequestState, cached: list[int]) -> int:
        """Blocks that it needs beside the `cached` ones."""
        to_start = self._blocks_to_start(state, cached) - len(cached)
        return max(to_start, self.most_blocks_for(len(state.token_ids)) - sum(1 for _ in _held(cached)))

    def _blocks_to_start(self, state: RequestState, cached: list[int]) -> int:
        known = len(state.token_ids)
        if self._window is None:
            return self.blocks_for(known)
        return self.blocks_for(min(known, len(cached) * self.block_size + self._window.max_chunk))

    def grow(self, state: RequestState, num_tokens: int) -> bool:
        """Extend the block table to hold `num_tokens`, or change nothing and say False.

        A block that is about to be written but is shared with a fork is replaced by a copy first. One that a fork has
        filled and left is no longer found by what the fork wrote.
        """
        if num_tokens <= state.num_own_slots:
            return True
        missing = self.blocks_for(num_tokens) - len(state.block_table)
        tail = state.num_computed_tokens // self.block_size
        written = tail < len(state.block_table)
        shared = written and self.pool.references(state.block_table[tail]) > 1
        if max(missing, 0) + shared > self.pool.num_free:
            return False
        if shared:
            source = state.block_table[tail]
            state.block_table[tail] = self._allocate()
            self._copies[state.block_table[tail]] = source
            self.pool.release(source)
        elif written and self._prefixes is not None:
            self._prefixes.forget(state.block_table[tail])
        for _ in range(missing):
            state.block_table.append(self._allocate())
        state.num_own_slots = len(state.block_table) * self.block_size
        return True

    def fork(self, parent: RequestState, child: RequestState) -> None:
        """Give `child` the blocks of what it has in common with `parent`, its computed tokens; nothing is copied."""
        blocks = parent.block_table[: self.blocks_for(child.num_computed_tokens)]
        for block in _held(blocks):
            self.pool.share(block)
        child.block_table = list(blocks)
        parent.num_own_slots = child.num_own_slots = 0
        full = child.num_computed_tokens // self.block_size
        child.prefix.hashes = parent.prefix.hashes[:full]
        child.num_registered_blocks = min(parent.num_registered_blocks, full)
        child.num_drafted_blocks = min(parent.num_drafted_blocks, full)

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, target) blocks to copy before the next pass; all sources are to be read before any is written."""
        copies = [(source, target) for target, source in self._copies.items()]
        self._copies.clear()
        return copies

    def trim(self, state: RequestState) -> None:
        """Give back blocks beyond the known tokens, left over from refuted drafts."""
        for _ in range(len(state.block_table) - self.blocks_for(len(state.token_ids))):
            self.pool.release(state.block_table.pop())
            state.num_own_slots = min(state.num_own_slots, len(state.block_table) * self.block_size)

    def release_out_of_reach(self, states: Iterable[RequestState]) -> None:
        """Give back blocks that lie wholly behind the window of the next query. Those registered stay findable."""
        if self._window is not None:
            for state in states:
                self._release_out_of_reach(state)

    def _release_out_of_reach(self, state: RequestState) -> None:
        index = self._oldest_in_reach(state.num_computed_tokens) - 1
        while index >= 0 and state.block_table[index] != NO_BLOCK:
            self.pool.release(state.block_table[index])
            state.block_table[index] = NO_BLOCK
            index -= 1

    def num_wasted_slots(self, states: Iterable[RequestState]) -> int:
        """Token slots in the blocks of `states` that hold nothing yet; those of a shared block count once."""
        own, shared = 0, dict[int, int]()
        for state in states:
            if state.num_own_slots:
                own += state.num_own_slots - state.num_computed_tokens
                continue
            for index, block in enumerate(state.block_table):
                empty = min(max((index + 1) * self.block_size - state.num_computed_tokens, 0), self.block_size)
                shared[block] = min(shared.get(block, empty), empty)
        return own + sum(shared.values())

    def register(self, state: RequestState) -> None:
        """Make blocks that became full findable for later requests, and remember which the draft model filled, too."""
        if self._prefixes is None or not state.request.uses_prefix_cache:
            return
        full = state.num_computed_tokens // self.block_size
        if full > state.num_registered_blocks:
            self._prefixes.register(state.prefix, state.token_ids, state.block_table, state.num_registered_blocks, full)
            state.num_registered_blocks = full
        drafted = min(full, state.num_draft_computed_tokens // self.block_size)
        if drafted > state.num_drafted_blocks:
            self._drafted.update(_held(state.block_table[state.num_drafted_blocks : drafted]))
            state.num_drafted_blocks = drafted

    def free(self, state: RequestState) -> None:
        """Give everything back. Deep blocks first, so that a prefix outlives its continuations in the cache."""
        for block in _held(reversed(state.block_table)):
            self._copies.pop(block, None)
            self.pool.release(block)
        state.block_table = []
        state.num_registered_blocks = state.num_drafted_blocks = state.num_own_slots = 0
        state.num_computed_tokens = state.num_draft_computed_tokens = 0

    def _oldest_in_reach(self, position: int) -> int:
        """The index in a block table of the first block that a query at `position`, or any later one, can see."""
        if self._window is None:
            return 0
        return max(0, position - self._window.num_tokens + 1) // self.block_size

    def _allocate(self) -> int:
        block = self.pool.allocate()
        if self._prefixes is not None:
            self._prefixes.evicted(block)
            self._drafted.discard(block)
        return block

    def _cached_prefix(self, state: RequestState) -> list[int]:
        """The blocks of the longest cached prefix: of those that the next query can see, all must be there."""
        if self._prefixes is None:
            return []
        end = state.num_skippable_tokens // self.block_size
        if self._window is not None:
            return self._prefix_in_reach(self._prefixes.each(state.prefix, state.token_ids, end))
        return self._prefixes.leading(state.prefix, state.token_ids, end)

    def _prefix_in_reach(self, found: list[int | None]) -> list[int]:
        """Under a window, the longest prefix whose end has all blocks that the next query sees."""
        end = index = len(found)
        blocks: list[int] = []  # from `index` to `end`
        while index > self._oldest_in_reach(end * self.block_size):
            index -= 1
            block = found[index]
            if block is None:
                end, blocks = index, []
            else:
                blocks.append(block)
        return [NO_BLOCK] * index + blocks[::-1]


def _held(blocks: Iterable[int]) -> Iterable[int]:
    return (block for block in blocks if block != NO_BLOCK)
