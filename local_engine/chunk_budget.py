"""How many tokens of prompts a step may take while others decode: from what steps were seen to cost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from statistics import median

#: A step with prompts in it may usually take this many times as long as one without. A reader is promised that hardly a
#: gap in a hundred is longer than twice the usual one: the rest is for steps that are slow for other reasons.
MOST_SLOWDOWN = 1.75
_ROOM_TO_GROW = 1.5
_FIRST_CHUNK = 2
_TRIALS = 3
_REFRESH_STEPS = 400


@dataclass(slots=True)
class _Load:
    """What is known of steps with one number of decoding sequences: their seconds without prompts, the chunk that joins
    them now, how much slower it made the last steps, and the least chunk that was found too large."""

    plain_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=9))
    chunk: int = _FIRST_CHUNK
    slowdowns: list[float] = field(default_factory=list[float])
    too_large: float = inf
    mixed_steps: int = 0

    def adapt(self, most: int) -> None:
        """The chunk that follows from a few trials with this one; a single one may be slow for other reasons."""
        slowdown = median(self.slowdowns)
        self.slowdowns.clear()
        if slowdown > MOST_SLOWDOWN:
            self.too_large = self.chunk
            self.chunk = max(1, min(self.chunk - 1, int(self.chunk * MOST_SLOWDOWN / slowdown)))
        elif slowdown < _ROOM_TO_GROW:
            self.chunk = max(1, int(min(self.chunk + max(1, self.chunk // 8), self.too_large - 1, most)))


class ChunkBudget:
    """A controller per number of decoding sequences: the chunk grows while steps are fast enough, else it shrinks.

    What a step costs is no straight line (kernels work on groups of rows), differs from machine to machine, and changes
    with whoever else wants the processor. So nothing is modelled: steps without prompts are measured, and the chunk
    follows the ratio of the two. What was too large is not tried again for 400 steps, so that hardly a reader's gap
    in a hundred is an experiment; then a step without prompts is measured again, too.
    """

    def __init__(self, most: int, *, apart: bool = False) -> None:
        """`most`: tokens in a step where nobody else waits for one. `apart`: prompts have steps of their own, so that
        a reader waits for two."""
        self._most = most
        self._apart = apart
        self._loads: dict[int, _Load] = {}

    def grant(self, decoding: int) -> int:
        """Prompt tokens that may join `decoding` rows in the next step; 0: a step without is to be measured first."""
        if decoding == 0:
            return self._most
        load = self._loads.get(decoding)
        if load is None or not load.plain_s or load.mixed_steps >= _REFRESH_STEPS:
            return 0
        return load.chunk

    def measured(self, decoding: int, chunk: int, seconds: float) -> None:
        """A step with `chunk` prompt tokens, for which `decoding` sequences waited, took `seconds`."""
        if decoding == 0:
            return
        load = self._loads.setdefault(decoding, _Load())
        if chunk == 0:
            load.plain_s.append(seconds)
            if load.mixed_steps >= _REFRESH_STEPS:
                load.mixed_steps, load.too_large = 0, inf
            return
        load.mixed_steps += 1
        if not load.plain_s or chunk < load.chunk:
            return  # a prompt's last bit says nothing about full chunks
        load.slowdowns.append(seconds / median(load.plain_s) + self._apart)
        if len(load.slowdowns) == _TRIALS:
            load.adapt(self._most)
