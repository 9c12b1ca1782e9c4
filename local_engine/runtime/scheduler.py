"""Scheduler: plans the next step, and queues the sequences that wait for cells of the KV cache.

Every sequence has known tokens, and each step computes some tokens that are not computed yet. A sequence that lacks one
token decodes; a sequence that lacks more tokens gets a chunk. Nothing in this module depends on llama.cpp.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .chunk_budget import ChunkBudget
from .prefix_cache import Branch, LocalPrefixCache, Sharing

_HEADROOM = 32


@dataclass(slots=True, eq=False)
class Sequence:
    # The prompt, followed by the answer so far.
    tokens: list[int]
    # Maximum number of tokens, prompt included.
    limit: int
    # Number of leading tokens whose logits are still needed, so that they cannot be taken from the prefix cache.
    scored: int = 0
    # Positions that must be computed again, because their hidden state is missing.
    pending_hidden: list[int] = field(default_factory=list[int])
    # Whether the answer has ended; the sequence then stays only for pending hidden states.
    finished: bool = False
    computed: int = 0
    # Prompt tokens from the prefix cache. None until the sequence is admitted.
    cached: int | None = None
    branch: Branch | None = None

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.computed


@dataclass(slots=True)
class SequenceShare:
    """One sequence's part of a step: `count` tokens from `start` on, with logits for the last token or for all."""

    sequence: Sequence
    start: int
    count: int
    all_outputs: bool

    @property
    def is_caught_up(self) -> bool:
        """Return whether this step computes the last known token, so that a new token can be chosen."""
        return self.start + self.count == len(self.sequence.tokens)

    @property
    def outputs(self) -> int:
        return self.count if self.all_outputs else int(self.is_caught_up)


@dataclass(slots=True)
class HiddenStateProbe:
    """A token to compute again for its hidden state. `scratch`: temporary sequence of the preceding tokens."""

    sequence: Sequence
    position: int
    scratch: Branch


@dataclass(slots=True)
class ScheduledStep:
    """Work of one step, in this order: decoding sequences, probes, chunks of prompts. `decoding`: number of sequences
    that decode in this step or wait to decode."""

    decoding: int
    decodes: list[SequenceShare]
    probes: list[HiddenStateProbe] = field(default_factory=list[HiddenStateProbe])
    chunks: list[SequenceShare] = field(default_factory=list[SequenceShare])

    @property
    def all_outputs(self) -> bool:
        """Return whether every token gets logits; only such a step returns hidden states."""
        return all(share.outputs == share.count for share in self.chunks)

    @property
    def cells(self) -> int:
        """Number of KV cache cells that the step needs."""
        return len(self.decodes) + len(self.probes) + self.chunk_tokens

    @property
    def chunk_tokens(self) -> int:
        return sum(share.count for share in self.chunks)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of a step, and the parts of the cache that sequences can share."""

    # Maximum number of running sequences.
    running: int
    # Maximum number of tokens in a step.
    rows: int
    # Maximum number of tokens in a step that get logits; more than twice `running`.
    outputs: int
    # Whether prompts share steps with decoding sequences and with each other.
    mixes: bool = True
    # Only a step in which every token gets logits returns hidden states. With "parts", probes compute missing states;
    # with "whole", the last prompt token waits for such a step; with "nothing", every token gets logits.
    sharing: Sharing = "parts"


class LocalScheduler:
    """First-come, first-served scheduling with preemption by recomputation.

    Deadlocks are impossible, because the oldest sequence always advances: every sequence fits the cache alone, and a
    step that lacks cells takes them from parked sequences, then from the newest running sequence.
    """

    def __init__(self, cache: LocalPrefixCache, budget: ChunkBudget, limits: SchedulerLimits) -> None:
        self._cache = cache
        self._budget = budget
        self._limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.preemptions = 0
        self._chunks_waited = False
        self._head_waits = False  # the first waiting sequence does not fit, and nothing has changed since
        self._lacks_cells = False  # a step did not fit into the cache, and no step has succeeded since

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def plan(self) -> ScheduledStep:
        """Return the next step, and free the cache cells that it needs. The caller computes it and reports back."""
        self._admit()
        step, chunks_wait = self._plan()
        while not self._cache.ensure_free(step.cells):
            self._drop_scratch(step)
            self._preempt(self.running[-1])
            step, chunks_wait = self._plan()
        self._chunks_waited = chunks_wait
        return step

    def complete(self, step: ScheduledStep) -> None:
        """Record the tokens that a computed step has added to the cache."""
        self._drop_scratch(step)
        self._lacks_cells = False
        if step.chunks:  # the first waiting sequence may be able to share the new tokens
            self._head_waits = False
        for share in (*step.decodes, *step.chunks):
            sequence = share.sequence
            assert sequence.branch is not None
            self._cache.extend(sequence.branch, sequence.tokens[share.start : share.start + share.count])
            sequence.computed = share.start + share.count

    def fail(self, step: ScheduledStep) -> list[Sequence]:
        """Remove and return the sequences of a failed step, because their cache contents are unknown."""
        self._drop_scratch(step)
        affected = [share.sequence for share in (*step.decodes, *step.chunks)]
        affected += [probe.sequence for probe in step.probes if probe.sequence not in affected]
        for sequence in affected:
            self.remove(sequence, keep=False)
        return affected

    def retry(self, step: ScheduledStep) -> bool:
        """Preempt the newest sequence after a step that did not fit the cache. Return False if only one sequence is
        running. No sequence is admitted before a step succeeds, so that retries end."""
        if len(self.running) < 2:
            return False
        self._lacks_cells = True
        self._drop_scratch(step)
        self._preempt(self.running[-1])
        return True

    def remove(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Remove a running or waiting sequence. `keep`: park its tokens for reuse by other sequences."""
        self._head_waits = False
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence, keep=keep)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _admit(self) -> None:
        if self.running and (self._head_waits or self._lacks_cells):
            return
        while self.waiting and len(self.running) < self._limits.running:
            sequence = self.waiting[0]
            branch = self._cache.open([] if sequence.scored else sequence.tokens[:-1])
            if self.running and not self._fits(sequence, branch):
                self._cache.drop(branch)
                self._head_waits = True
                return
            sequence.branch, sequence.computed = branch, branch.length
            sequence.cached = branch.length if sequence.cached is None else sequence.cached
            self.running.append(self.waiting.popleft())

    def _fits(self, sequence: Sequence, branch: Branch) -> bool:
        """Return whether the cache can hold the prompt and the start of its answer, besides all running prompts."""
        reserved_cells = sum(other.num_uncomputed for other in self.running)
        cells = min(len(sequence.tokens) + _HEADROOM, sequence.limit) - branch.length
        return self._cache.available_cells() >= reserved_cells + cells

    def _plan(self) -> tuple[ScheduledStep, bool]:
        """Return the next step for the current state, and whether the step leaves out all prompts."""
        decoding = [sequence for sequence in self.running if sequence.num_uncomputed == 1]
        catching_up = [sequence for sequence in self.running if sequence.num_uncomputed > 1]
        step = ScheduledStep(
            len(decoding), [SequenceShare(sequence, sequence.computed, 1, False) for sequence in decoding]
        )
        ready = [
            sequence
            for sequence in self.running
            if sequence.pending_hidden and sequence.computed > sequence.pending_hidden[0]
        ]
        if ready and not (catching_up and self._chunks_waited):
            # Only steps without prompts return hidden states. Prompts wait for one such step, but not for two in a row.
            step.probes = [self._probe(sequence) for sequence in ready]
            return step, True
        if catching_up and (self._limits.mixes or not decoding or self._chunks_waited):
            step.chunks = self._chunks(catching_up if self._limits.mixes else catching_up[:1], len(decoding))
            if step.chunks and not self._limits.mixes:
                step.decodes = []
            return step, False
        return step, True

    def _chunks(self, catching_up: list[Sequence], decoding: int) -> list[SequenceShare]:
        """Divide the step's budget equally among prompts. The remainder goes to the prompts that lack the most tokens,
        so that prompts end together, or to the oldest prompts if the budget is below one token each."""
        rows = min(self._budget.grant(decoding, len(catching_up)), self._limits.rows - decoding)
        if rows >= len(catching_up):
            catching_up = sorted(catching_up, key=lambda sequence: -sequence.num_uncomputed)
        outputs = self._limits.outputs - decoding - len(catching_up)
        chunks: list[SequenceShare] = []
        for place, sequence in enumerate(catching_up):
            uncomputed = sequence.num_uncomputed - (self._limits.sharing == "whole")
            all_outputs = sequence.computed < sequence.scored or self._limits.sharing == "nothing"
            count = min(-(-rows // (len(catching_up) - place)), outputs if all_outputs else rows)
            if not self._limits.mixes:
                count = _without_single_tokens(count, uncomputed)
            count = min(count, uncomputed)
            if count > 0:
                rows -= count
                outputs -= count if all_outputs else 0
                chunks.append(SequenceShare(sequence, sequence.computed, count, all_outputs))
        return chunks

    def _probe(self, sequence: Sequence) -> HiddenStateProbe:
        assert sequence.branch is not None
        position = sequence.pending_hidden[0]
        return HiddenStateProbe(sequence, position, self._cache.fork(sequence.branch, position))

    def _drop_scratch(self, step: ScheduledStep) -> None:
        for probe in step.probes:
            self._cache.drop(probe.scratch)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence, keep=True)
        self.waiting.appendleft(sequence)
        self._head_waits = False
        self.preemptions += 1

    def _release(self, sequence: Sequence, *, keep: bool) -> None:
        branch, sequence.branch, sequence.computed = sequence.branch, None, 0
        if branch is not None and keep:
            self._cache.park(branch)
        elif branch is not None:
            self._cache.drop(branch)


def _without_single_tokens(count: int, uncomputed: int) -> int:
    """Return a chunk size near `count` so that no chunk has a single token, which might be rounded differently."""
    count = max(2, count) if count else 0
    if uncomputed - count != 1:
        return count
    return uncomputed if count == 2 else count - 1
