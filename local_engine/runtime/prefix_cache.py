"""Prefix cache: which tokens are in the cells of the KV cache, and which of them the next prompt can reuse.

The data structure is a radix tree. A segment is a run of tokens in its own cells, a path from the root is the content
of one sequence, and sequences with a common prefix share its segments. Finished sequences stay (are parked) until their
cells are needed. The cache does not depend on llama.cpp: it changes the real cells through `KVMemory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

#: Part of a sequence that a new prompt can reuse: any prefix, only the whole (for recurrent models), or nothing.
Sharing = Literal["parts", "whole", "nothing"]


class KVMemory(Protocol):
    """The real KV cache, whose cells llama.cpp manages."""

    def share(self, source: int, target: int, length: int) -> None:
        """Make the empty sequence `target` share the first `length` tokens of `source`."""
        ...

    def remove(self, sequence: int) -> None:
        """Empty a sequence; cells that no other sequence holds become free."""
        ...


class Branch:
    """One sequence of the KV cache: `length` tokens, on the path that ends with segment `tail`."""

    __slots__ = ("id", "length", "tail")

    def __init__(self, sequence: int, length: int, tail: _Segment) -> None:
        self.id = sequence
        self.length = length
        self.tail = tail

    def tokens(self) -> list[int]:
        return [token for segment in reversed(list(self.tail.path())) for token in segment.tokens]


class _Segment:
    """Tokens in cells that the sequences `holders` share. Only a segment with one holder and no children may grow."""

    __slots__ = ("children", "holders", "parent", "tokens")

    def __init__(self, parent: _Segment | None, tokens: list[int], holders: set[int]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.holders = holders
        self.children: list[_Segment] = []

    def path(self) -> Iterator[_Segment]:
        """Yield this segment and its ancestors, up to the root, which holds no tokens."""
        segment: _Segment | None = self
        while segment is not None:
            yield segment
            segment = segment.parent

    def split(self, length: int) -> _Segment:
        """Move the first `length` tokens into a new parent segment, and return the parent."""
        assert self.parent is not None
        upper = _Segment(self.parent, self.tokens[:length], set(self.holders))
        self.parent.children[self.parent.children.index(self)] = upper
        upper.children.append(self)
        self.parent, self.tokens = upper, self.tokens[length:]
        return upper


class LocalPrefixCache:
    """Assigns cells and ids of a KV cache to sequences. Not thread-safe.

    Sharing needs two more ids than the number of sequences that run at once.
    With `sharing` "whole", a prompt can reuse a parked sequence only if the whole sequence is a prefix of the prompt.
    With "parts", a common prefix of fewer than `shortest` tokens is computed again.
    """

    def __init__(
        self, memory: KVMemory, *, cells: int, sequences: int, sharing: Sharing = "parts", shortest: int = 1
    ) -> None:
        self._memory = memory
        self._cells = cells
        self._sharing: Sharing = sharing
        self._shortest = shortest
        self._ids = list(range(sequences - 1, -1, -1))
        self._root = _Segment(None, [], set())
        self._branches: dict[int, Branch] = {}
        self._parked: dict[int, Branch] = {}  # least recently used first
        self._used = 0

    @property
    def free_cells(self) -> int:
        return self._cells - self._used

    def available_cells(self) -> int:
        """Return the number of free cells plus cells that only parked sequences hold."""
        occupied, parked, to_visit = 0, self._parked.keys(), list(self._root.children)
        while to_visit:
            segment = to_visit.pop()
            if not segment.holders <= parked:
                occupied += len(segment.tokens)
                to_visit += segment.children
        return self._cells - occupied

    def open(self, tokens: Sequence[int]) -> Branch:
        """Return a new sequence that shares the longest known prefix of `tokens`; the prefix may be empty."""
        segment, inside, length = self._find(tokens)
        if self._sharing == "parts" and length < self._shortest:
            segment, inside, length = self._root, 0, 0
        source = self._source(segment, length) if length else None
        if source in self._parked:
            self._parked[source] = self._parked.pop(source)
        return self._branch_off(segment, inside, length, source)

    def fork(self, branch: Branch, length: int) -> Branch:
        """Return a new sequence that shares the first `length` tokens of `branch`."""
        segment, above = branch.tail, branch.length - len(branch.tail.tokens)
        while above >= length and segment.parent is not None:
            segment = segment.parent
            above -= len(segment.tokens)
        return self._branch_off(segment, length - above, length, branch.id)

    def extend(self, branch: Branch, tokens: Sequence[int]) -> None:
        """Append computed `tokens` to `branch`, in cells of its own. Call `ensure_free` before."""
        tail = branch.tail
        if tail.parent is None or tail.children or len(tail.holders) > 1:
            tail = _Segment(tail, [], {branch.id})
            branch.tail.children.append(tail)
            branch.tail = tail
        tail.tokens += tokens
        branch.length += len(tokens)
        self._used += len(tokens)

    def park(self, branch: Branch) -> None:
        """Keep the tokens of a finished sequence until their cells are needed."""
        if branch.length == 0 or self._is_doubled(branch):
            self.drop(branch)
        else:
            self._parked[branch.id] = branch

    def drop(self, branch: Branch) -> None:
        """Remove a running or parked sequence, and free the cells that no other sequence shares."""
        self._memory.remove(branch.id)
        for segment in branch.tail.path():
            segment.holders.discard(branch.id)
            if not segment.holders and segment.parent is not None:
                segment.parent.children.remove(segment)
                self._used -= len(segment.tokens)
        self._parked.pop(branch.id, None)
        del self._branches[branch.id]
        self._ids.append(branch.id)

    def ensure_free(self, cells: int) -> bool:
        """Drop parked sequences, least recently used first, until `cells` are free. Return False if too few remain."""
        while self.free_cells < cells and self._parked:
            self.drop(next(iter(self._parked.values())))
        return self.free_cells >= cells

    def _find(self, tokens: Sequence[int]) -> tuple[_Segment, int, int]:
        """Return the segment in which the longest usable match ends, the offset in it, and the match length."""
        best = (self._root, 0, 0)
        if self._sharing == "nothing":
            return best
        for segment, inside, length in self._matches(tokens):
            whole = inside == len(segment.tokens) and any(
                holder in self._parked and self._branches[holder].tail is segment for holder in segment.holders
            )
            if length > best[2] and (whole or self._sharing == "parts"):
                best = (segment, inside, length)
        return best

    def _matches(self, tokens: Sequence[int]) -> Iterator[tuple[_Segment, int, int]]:
        """Yield every segment on a matching path, its number of matching tokens, and the length of the match so far."""
        to_visit = [(child, 0) for child in self._root.children]
        while to_visit:
            segment, above = to_visit.pop()
            inside = _common(segment.tokens, tokens, above)
            yield segment, inside, above + inside
            if inside == len(segment.tokens):
                to_visit += [(child, above + inside) for child in segment.children]

    def _source(self, segment: _Segment, length: int) -> int:
        """Return a sequence whose first `length` tokens can be shared, preferably a parked sequence."""
        holders = sorted(segment.holders, key=lambda holder: holder not in self._parked)
        if self._sharing == "parts":
            return holders[0]
        return next(holder for holder in holders if self._branches[holder].length == length)

    def _branch_off(self, segment: _Segment, inside: int, length: int, source: int | None) -> Branch:
        """Return a new sequence with the first `length` tokens of `source`; they end `inside` tokens into `segment`."""
        if not self._ids:  # drops the oldest parked sequence, never `source`, which was just used
            self.drop(next(iter(self._parked.values())))
        branch = Branch(self._ids.pop(), length, self._root)
        self._branches[branch.id] = branch
        if length and source is not None:
            self._memory.share(source, branch.id, length)
            branch.tail = segment if inside == len(segment.tokens) else segment.split(inside)
            for shared in branch.tail.path():
                if shared.parent is not None:
                    shared.holders.add(branch.id)
        return branch

    def _is_doubled(self, branch: Branch) -> bool:
        """Return whether other sequences hold the same tokens, in the same cells or in other cells."""
        if self._sharing != "parts":
            return False
        if len(branch.tail.holders) > 1:
            return True
        matches = self._matches(branch.tokens())
        return any(length == branch.length and segment is not branch.tail for segment, _, length in matches)


def _common(held: Sequence[int], tokens: Sequence[int], start: int) -> int:
    """Return the length of the common prefix of `held` and `tokens[start:]`."""
    limit = min(len(held), len(tokens) - start)
    if held[:limit] == tokens[start : start + limit]:
        return limit
    return next(i for i in range(limit) if held[i] != tokens[start + i])
