"""Block tables: the blocks that hold a request's keys and values, some of them shared with earlier requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from ..types.request_state import RequestState
from .block_pool import NO_BLOCK, BlockPool, PrefixCache


@dataclass(frozen=True, slots=True)
class Window:
    """The attention window of a model whose layers all have a sliding window."""

    # Widest window of all layers in tokens, including the query's own token.
    num_tokens: int
    # Maximum tokens of one request per step.
    max_chunk: int


def most_blocks(num_tokens: int, block_size: int, window: Window | None) -> int:
    """Return the maximum number of blocks that a request holds at once while it grows to `num_tokens`."""
    if window is None:
        return -(-num_tokens // block_size)
    in_reach = window.num_tokens - 1 + window.max_chunk
    # One extra block, because the window may begin inside a block.
    return min(-(-num_tokens // block_size), -(-in_reach // block_size) + 1)


class KVCacheManager:
    """Assigns blocks to requests. Works on block numbers only; the runner maps block tables to memory.

    Full blocks are cached under the prefix that ends in them (`PrefixCache`), so that later requests can reuse them.

    With a `window`, blocks are assigned chunk by chunk, and released once no later query attends to them, so that a
    request holds only the blocks of one window and one chunk. `window` is None if any layer attends to the whole
    sequence: that layer needs every block until the request ends, and all layers share one block table.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, window: Window | None = None
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._prefixes = PrefixCache(self.pool, block_size, gaps=window is not None) if enable_prefix_caching else None
        self.window = window
        self._grown: list[RequestState] = []  # requests that got blocks since `take_grown`
        self._drafted: set[int] = set()  # registered blocks that are filled in the draft model's cache too

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def most_blocks_for(self, num_tokens: int) -> int:
        """Return the maximum number of blocks that a request holds at once while it grows to `num_tokens`."""
        return most_blocks(num_tokens, self.block_size, self.window)

    def admit(self, state: RequestState, reserved: int = 0) -> bool:
        """Assign blocks for a request's known tokens, cached blocks first. If too few are free, return False.

        Keeps `reserved` blocks free. With a window, only the first chunk gets blocks now, but as many blocks as the
        request can ever hold must be free. On success, `num_computed_tokens` is the length of the cached prefix. The
        prefix never includes the last known token, because the logits of this token are needed."""
        cached = self._cached_prefix(state)
        revived = sum(self.pool.references(block) == 0 for block in _allocated_blocks(cached))
        if self._missing(state, cached) + revived + reserved > self.pool.num_free:
            return False
        missing = self._blocks_to_start(state, cached) - len(cached)
        for block in _allocated_blocks(cached):
            self.pool.share(block)
        state.block_table = cached + [self._allocate() for _ in range(missing)]
        state.num_registered_blocks = len(cached)
        state.num_computed_tokens = len(cached) * self.block_size
        state.num_slots = len(state.block_table) * self.block_size
        state.num_drafted_blocks = sum(1 for _ in takewhile(lambda b: b == NO_BLOCK or b in self._drafted, cached))
        state.num_draft_computed_tokens = state.num_drafted_blocks * self.block_size
        return True

    def can_admit(self, state: RequestState, without: Iterable[RequestState] = ()) -> bool:
        """Return whether `admit` would succeed if the requests in `without` had released their blocks."""
        released = Counter(block for other in without for block in _allocated_blocks(other.block_table))
        freed = sum(self.pool.references(block) == holders for block, holders in released.items())
        cached = self._cached_prefix(state)
        revived = sum(self.pool.references(block) == released[block] for block in _allocated_blocks(cached))
        return self._missing(state, cached) + revived <= self.pool.num_free + freed

    def _missing(self, state: RequestState, cached: list[int]) -> int:
        """Return how many blocks the request needs beyond the `cached` ones."""
        to_start = self._blocks_to_start(state, cached) - len(cached)
        return max(to_start, self.most_blocks_for(len(state.token_ids)) - sum(1 for _ in _allocated_blocks(cached)))

    def _blocks_to_start(self, state: RequestState, cached: list[int]) -> int:
        num_tokens = len(state.token_ids)
        if self.window is None:
            return self.blocks_for(num_tokens)
        return self.blocks_for(min(num_tokens, len(cached) * self.block_size + self.window.max_chunk))

    def grow(self, state: RequestState, num_tokens: int) -> bool:
        """Extend the block table to `num_tokens`. If the pool has too few blocks, return False and change nothing."""
        if num_tokens <= state.num_slots:
            return True
        missing = self.blocks_for(num_tokens) - len(state.block_table)
        if missing > self.pool.num_free:
            return False
        state.block_table += [self._allocate() for _ in range(missing)]
        state.num_slots = len(state.block_table) * self.block_size
        self._grown.append(state)
        return True

    def take_grown(self) -> list[RequestState]:
        """Return and clear the requests that `grow` gave blocks. A request may occur twice, or have lost its blocks."""
        grown, self._grown = self._grown, []
        return grown

    def trim(self, state: RequestState) -> None:
        """Release blocks that neither known tokens nor planned steps need, left over from rejected drafts."""
        needed = self.blocks_for(max(len(state.token_ids), state.num_computed_tokens))
        for _ in range(len(state.block_table) - needed):
            self.pool.release(state.block_table.pop())
        state.num_planned_blocks = min(state.num_planned_blocks, len(state.block_table))
        state.num_slots = len(state.block_table) * self.block_size

    def release_out_of_reach(self, states: Iterable[RequestState]) -> None:
        """Release blocks that lie wholly before the window of the next query. Registered blocks stay cached."""
        for state in states if self.window is not None else ():
            index = self._oldest_in_reach(state.num_certain_tokens) - 1
            while index >= 0 and state.block_table[index] != NO_BLOCK:
                self.pool.release(state.block_table[index])
                state.block_table[index] = NO_BLOCK
                index -= 1

    def num_wasted_slots(self, states: Iterable[RequestState]) -> int:
        """Return the number of empty token slots in the blocks of `states`. Shared blocks are full."""
        return sum(state.num_slots - state.num_computed_tokens for state in states)

    def register(self, state: RequestState) -> None:
        """Register blocks that planned steps fill with known tokens, and record which of them the draft model filled.

        Later plans may use these blocks at once, because steps are computed in the order of their plans.
        """
        if self._prefixes is None or not state.request.uses_prefix_cache:
            return
        full = state.num_certain_tokens // self.block_size
        if full > state.num_registered_blocks:
            self._prefixes.register(state.prefix, state.token_ids, state.block_table, state.num_registered_blocks, full)
            state.num_registered_blocks = full
        drafted = min(full, state.num_draft_computed_tokens // self.block_size)
        if drafted > state.num_drafted_blocks:
            self._drafted.update(_allocated_blocks(state.block_table[state.num_drafted_blocks : drafted]))
            state.num_drafted_blocks = drafted

    def free(self, state: RequestState) -> None:
        """Release a request's blocks, last ones first, so that a prefix stays cached longer than its continuations."""
        for block in _allocated_blocks(reversed(state.block_table)):
            self.pool.release(block)
        state.block_table = []
        state.num_registered_blocks = state.num_drafted_blocks = state.num_slots = 0
        state.num_computed_tokens = state.num_draft_computed_tokens = 0

    def _oldest_in_reach(self, position: int) -> int:
        """Return the block table index of the first block that a query at `position` or later can see."""
        if self.window is None:
            return 0
        return max(0, position - self.window.num_tokens + 1) // self.block_size

    def _allocate(self) -> int:
        block = self.pool.allocate()
        if self._prefixes is not None:
            self._prefixes.evicted(block)
            self._drafted.discard(block)
        return block

    def _cached_prefix(self, state: RequestState) -> list[int]:
        """Return the blocks of the longest cached prefix; NO_BLOCK for blocks that no later query attends to."""
        if self._prefixes is None:
            return []
        end = state.num_skippable_tokens // self.block_size
        if self.window is not None:
            return self._prefix_in_reach(self._prefixes.each(state.prefix, state.token_ids, end))
        return self._prefixes.leading(state.prefix, state.token_ids, end)

    def _prefix_in_reach(self, cached: list[int | None]) -> list[int]:
        """Return the longest prefix whose blocks within the window of the next query are all cached."""
        end = index = len(cached)
        blocks: list[int] = []  # the blocks from `end` down to `index`
        while index > self._oldest_in_reach(end * self.block_size):
            index -= 1
            block = cached[index]
            if block is None:
                end, blocks = index, []
            else:
                blocks.append(block)
        return [NO_BLOCK] * index + blocks[::-1]


def _allocated_blocks(blocks: Iterable[int]) -> Iterable[int]:
    return (block for block in blocks if block != NO_BLOCK)
