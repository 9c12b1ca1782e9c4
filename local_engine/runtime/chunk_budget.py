"""The prompt tokens that a step may take while others decode: by the measured cost of steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median, median_low

_PLAIN_EVERY, _DOUBT_EVERY = 64, 400  # steps with prompts
_SAMPLES = 3  # of a chunk's cost
_QUIET_STEPS = 64
_STEPS_OF_NOISE = 128  # fewer than one step in a hundred is slower than the slowest of so many before it
_MIN_NOISE, _USUAL_NOISE, _MAX_NOISE = 1.05, 1.15, 1.4
_PROMISED, _TARGET = 2.0, 1.8  # for some of the slowest gaps are slow for reasons that nobody foresees


def target_slowdown(decoding: int, catching_up: int) -> float:
    """The longest gap between tokens while prompts are computed, over the usual one: by the share of the
    machine that is due to `decoding` of all the requests. If that is less, by the promise that hardly one gap in a
    hundred is longer than twice the usual."""
    share = 1 + catching_up / decoding
    return share if share > _PROMISED else _TARGET


@dataclass(slots=True)
class _Load:
    """The times of steps with one number of decoding sequences and of threads."""

    decoding: int
    # Rows of the decoding sequences in a step with a chunk; none if chunks have steps of their own.
    own_rows: int
    # Of the last steps without prompts.
    plain_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=9))
    # Of the last steps before the prompts came that are being computed.
    quiet_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=_QUIET_STEPS))
    # By chunk, how many times as long the last steps with it took.
    mixed: dict[int, deque[float]] = field(default_factory=dict[int, deque[float]])
    since_plain: int = 0
    since_doubt: int = 0

    @property
    def plain(self) -> float:
        return median(self.plain_s)

    @property
    def before_s(self) -> float:
        """A step's usual length before the prompts came; over a second or so, for machines have slow moments."""
        return median(self.quiet_s)

    def usual_s(self, chunk: int) -> float | None:
        """Seconds that such a step usually takes; None where that is not known. Among steps with prompts one without is
        there to see what is usual by now."""
        if chunk:
            known = self.mixed.get(chunk, ())
            return self.plain * median(known) if len(known) == _SAMPLES else None
        return self.plain if len(self.plain_s) >= _SAMPLES and not self.since_plain else None

    def add(self, chunk: int, seconds: float) -> None:
        if chunk == 0:
            self.plain_s.append(seconds)
            if self.since_plain == 0:  # no prompt in the step before, either
                self.quiet_s.append(seconds)
            self.since_plain = 0
        elif self.plain_s:
            self.mixed.setdefault(chunk, deque(maxlen=_SAMPLES)).append(seconds / self.plain)
            self.since_plain += 1
            self.since_doubt += 1

    def largest(self, most: float, slowest: float) -> int:
        """The largest chunk whose step should usually take at most `most` times as long as one without, and never
        longer than `slowest` times: from the measured ones around it.

        A row costs no more in a larger step than in a smaller one. That bounds what is larger than all that was
        measured; between two measured chunks the cost is taken as a line. One slow step is no proof: a chunk that
        smaller ones speak for is tried twice before it counts as too large. Nor are slow steps that readers can bear:
        the difference between `most` and `slowest` is there for them.
        """
        rows, cost = self.own_rows, 1.0 if self.own_rows else 0.0
        if most <= cost:
            return 1
        for chunk, costs in sorted(self.mixed.items()):
            found, more = median_low(costs), self.own_rows + chunk
            if found > most and max(costs) > slowest:
                if len(costs) == 1 and self._reach(rows, cost, most) >= chunk:
                    return chunk
                between = rows + (more - rows) * (most - cost) / (found - cost) - self.own_rows
                return max(1, min(int(between), chunk - 1))
            rows, cost = more, min(max(cost, found), most)
        return self._reach(rows, cost, most)

    def _reach(self, rows: int, cost: float, most: float) -> int:
        """The chunk that `most` is enough for, if `rows` rows together take `cost`."""
        if not rows:
            rows, cost = self.decoding, 1.0
        return max(1, int(rows * (most / cost)) - self.own_rows)

    def doubt(self, chunk: int) -> None:
        """Other chunks than this one, which is in use, were measured long ago: forget smaller ones, and let one more
        slow step confirm larger ones."""
        self.mixed = {
            known: deque(list(costs)[-1:] if known > chunk else costs, maxlen=_SAMPLES)
            for known, costs in self.mixed.items()
            if known >= chunk
        }
        self.quiet_s = deque([self.plain], maxlen=_QUIET_STEPS)
        self.since_doubt = 0


class ChunkBudget:
    """Learns for every number of decoding sequences what chunks cost, and grants the largest that readers can bear.

    What a step costs is no straight line (a few rows may be as cheap as one, kernels work on groups of rows), differs
    from machine to machine, and changes with whoever else wants the processor. So steps are measured: without prompts
    now and then, with chunks as they come, in units of a step without. Readers are promised multiples of the gap that
    they had before the prompts came: those make the steps without them longer, too, as the cache fills. What was too
    large is tried again after 400 steps, once, so that hardly a reader's gap in a hundred is an experiment. And as the
    promise is about the slowest gaps, what steps are slower than usual for other reasons is taken off beforehand.
    """

    def __init__(self, most: int, *, apart: bool = False) -> None:
        """`most`: tokens in a step where nobody else waits for one. `apart`: prompts have steps of their own, so that
        a reader waits for two."""
        self._most = most
        self._apart = apart
        self._threads = 1
        self._loads: dict[tuple[int, int], _Load] = {}
        self._slowness: deque[float] = deque(maxlen=_STEPS_OF_NOISE)  # of the last steps, over what they usually take

    def grant(self, decoding: int, catching_up: int = 1) -> int:
        """Prompt tokens of `catching_up` sequences together that may join `decoding` rows in the next step; 0: a step
        without is to be measured first."""
        if decoding == 0:
            return self._most
        load = self._loads.get((decoding, self._threads))
        if load is None or not load.plain_s or load.since_plain >= _PLAIN_EVERY:
            return 0
        usual = min(1.0, load.before_s / load.plain)
        slowest = target_slowdown(decoding, catching_up) * usual
        waited = 1 if self._apart else 0  # for a step of their own
        chunk = load.largest(slowest / self._noise() - waited, slowest - waited)
        if load.since_doubt >= _DOUBT_EVERY:
            load.doubt(chunk)
        return min(chunk, self._most)

    def measured(self, decoding: int, chunk: int, seconds: float, threads: int = 1) -> None:
        """A step of `threads` with `chunk` prompt tokens, for which `decoding` sequences waited, took `seconds`.

        The next one is expected to have as many threads."""
        self._threads = threads
        if not decoding:
            return
        load = self._loads.get((decoding, threads))
        if load is None:
            load = self._loads[decoding, threads] = _Load(decoding, 0 if self._apart else decoding)
        usual = load.usual_s(chunk)
        if usual is not None:
            self._slowness.append(seconds / usual)
        load.add(chunk, seconds)

    def _noise(self) -> float:
        """The length of the slowest steps over the usual. Where they take far longer, no chunk would do."""
        if len(self._slowness) < _STEPS_OF_NOISE // 4:
            return _USUAL_NOISE
        return min(max(*self._slowness, _MIN_NOISE), _MAX_NOISE)
