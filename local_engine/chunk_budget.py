"""How many tokens of prompts a step may take while others decode: from what steps were seen to cost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from statistics import median, median_low

#: The part of what readers are promised that a usual step takes: the rest is for steps that are slow for other reasons.
CAUTION = 0.875
_FIRST_CHUNK = 2
_MOST_GROWTH = 4
_PLAIN_EVERY, _FORGET_EVERY = 64, 400  # steps with prompts


def promised_slowdown(decoding: int, catching_up: int) -> float:
    """How many times its usual length a gap between tokens may have while prompts are computed: the share of the
    machine that `decoding` of all the requests have a right to, and twice its length in any case."""
    return max(2.0, 1 + catching_up / decoding)


@dataclass(slots=True)
class _Load:
    """Steps with one number of decoding sequences: seconds without prompts, and by chunk the last ones with."""

    plain_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=9))
    mixed_s: dict[int, deque[float]] = field(default_factory=dict[int, deque[float]])
    since_plain: int = 0
    since_forgotten: int = 0

    @property
    def plain(self) -> float:
        return median(self.plain_s)

    def add(self, chunk: int, seconds: float) -> None:
        if chunk == 0:
            self.plain_s.append(seconds)
            self.since_plain = 0
            return
        self.mixed_s.setdefault(chunk, deque(maxlen=3)).append(seconds)
        self.since_plain += 1
        self.since_forgotten += 1

    def largest(self, seconds: float, base: float) -> int:
        """The largest chunk that should take at most `seconds`, if none takes `base`: from the measured ones around it.

        One slow step is no proof: a chunk that smaller ones speak for is tried twice before it counts as too large.
        """
        below, cost = 0, base
        for chunk, costs in sorted(self.mixed_s.items()):
            found = median_low(costs)
            if found > seconds:
                if len(costs) == 1 and _reach(below, cost - base, seconds - base) >= chunk:
                    return chunk
                between = below + int((chunk - below) * (seconds - cost) / (found - cost))
                return max(1, min(between, chunk - 1))
            below, cost = chunk, max(cost, found)
        return _reach(below, cost - base, seconds - base)

    def forget_larger_than(self, chunk: int) -> None:
        self.mixed_s = {known: costs for known, costs in self.mixed_s.items() if known <= chunk}
        self.since_forgotten = 0


def _reach(chunk: int, seconds: float, most: float) -> int:
    """The chunk that `most` seconds should be enough for, where none larger than `chunk`, which takes `seconds`, is
    known. Costs grow ever more slowly with the chunk, so that this is rather too little than too much."""
    if chunk == 0:
        return _FIRST_CHUNK
    return int(max(chunk, min(chunk * _MOST_GROWTH, chunk * most / seconds if seconds > 0 else inf)))


class ChunkBudget:
    """Learns for every number of decoding sequences what chunks cost, and grants the largest that readers can bear.

    What a step costs is no straight line (kernels work on groups of rows), differs from machine to machine, and changes
    with whoever else wants the processor. So steps are measured: without prompts now and then, with chunks as they
    come. What was too large is not tried again for 400 steps, so that hardly a reader's gap in a hundred is an
    experiment.
    """

    def __init__(self, most: int, *, apart: bool = False) -> None:
        """`most`: tokens in a step where nobody else waits for one. `apart`: prompts have steps of their own, so that
        a reader waits for two."""
        self._most = most
        self._apart = apart
        self._loads: dict[int, _Load] = {}

    def grant(self, decoding: int, catching_up: int = 1) -> int:
        """Prompt tokens of `catching_up` sequences together that may join `decoding` rows in the next step; 0: a step
        without is to be measured first."""
        if decoding == 0:
            return self._most
        load = self._loads.get(decoding)
        if load is None or not load.plain_s or load.since_plain >= _PLAIN_EVERY:
            return 0
        plain = load.plain
        if not load.mixed_s:
            self._guess(load, decoding)
        seconds = CAUTION * promised_slowdown(decoding, catching_up) * plain
        chunk = load.largest(seconds - plain, 0.0) if self._apart else load.largest(seconds, plain)
        if load.since_forgotten >= _FORGET_EVERY:
            load.forget_larger_than(chunk)
        return min(chunk, self._most)

    def _guess(self, load: _Load, decoding: int) -> None:
        """What chunks cost fewer decoding sequences more than a step without, they cost more of them at most."""
        known = [fewer for fewer, other in self._loads.items() if fewer < decoding and other.mixed_s and other.plain_s]
        if known:
            other = self._loads[max(known)]
            load.mixed_s = {
                chunk: deque([load.plain + median_low(costs) - other.plain], maxlen=3)
                for chunk, costs in other.mixed_s.items()
            }

    def measured(self, decoding: int, chunk: int, seconds: float) -> None:
        """A step with `chunk` prompt tokens, for which `decoding` sequences waited, took `seconds`."""
        if decoding:
            self._loads.setdefault(decoding, _Load()).add(chunk, seconds)
