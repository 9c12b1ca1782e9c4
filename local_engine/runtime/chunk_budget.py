"""Budget of prompt tokens per step while other sequences decode, based on measured step times."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median, median_low

# Steps with prompts until a step without prompts is measured, and until chunks that were too large are retried.
_PLAIN_EVERY, _EXPIRE_EVERY = 64, 400
_SAMPLES = 3  # number of measurements to keep per chunk size
_QUIET_STEPS = 64
_STEPS_OF_NOISE = 128  # number of recent step times to keep; less than 1 % of steps are slower than all of them
_MIN_NOISE, _USUAL_NOISE, _MAX_NOISE = 1.05, 1.15, 1.4
_PROMISED, _TARGET = 2.0, 1.8  # slowdowns; the target is below the promised limit to allow for unforeseen delays


def target_slowdown(decoding: int, catching_up: int) -> float:
    """Return the longest acceptable gap between tokens during prefill, as a multiple of the usual gap.

    If all requests share the machine equally, the multiple is 1 + `catching_up` (requests in prefill) / `decoding`.
    Return this multiple if above 2, else 1.8, so that hardly one gap in a hundred is longer than two usual gaps."""
    share = 1 + catching_up / decoding
    return share if share > _PROMISED else _TARGET


@dataclass(slots=True)
class _Load:
    """Measured step times for one number of decoding sequences and one number of threads."""

    decoding: int
    # Number of decoding sequences that share a step with a chunk of a prompt; 0 if chunks run in separate steps.
    own_rows: int
    # Times of the last steps without prompts.
    plain_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=9))
    # Times of the last steps before the current prompts arrived.
    quiet_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=_QUIET_STEPS))
    # By chunk size: times of the last steps with such a chunk, relative to a step without prompts.
    mixed: dict[int, deque[float]] = field(default_factory=dict[int, deque[float]])
    since_plain: int = 0
    since_expiry: int = 0

    @property
    def plain(self) -> float:
        return median(self.plain_s)

    @property
    def before_s(self) -> float:
        """Usual step time before the prompts arrived; the median hides slow moments of the machine."""
        return median(self.quiet_s)

    def usual_s(self, chunk: int) -> float | None:
        """Return the usual seconds of a step with this chunk; None if unknown. A step without prompts (`chunk` 0) that
        follows a step with prompts counts as unknown, because it runs only to measure the time."""
        if chunk:
            samples = self.mixed.get(chunk, ())
            return self.plain * median(samples) if len(samples) == _SAMPLES else None
        return self.plain if len(self.plain_s) >= _SAMPLES and not self.since_plain else None

    def add(self, chunk: int, seconds: float) -> None:
        if chunk == 0:
            self.plain_s.append(seconds)
            if self.since_plain == 0:  # the previous step had no prompt, either
                self.quiet_s.append(seconds)
            self.since_plain = 0
        elif self.plain_s:
            self.mixed.setdefault(chunk, deque(maxlen=_SAMPLES)).append(seconds / self.plain)
            self.since_plain += 1
            self.since_expiry += 1

    def largest(self, most: float, slowest: float) -> int:
        """Return the largest chunk whose step should usually take at most `most` times a step without prompts, and
        never more than `slowest` times.

        A row costs no more in a larger step than in a smaller step, so measured chunks bound the cost of larger chunks.
        Between two measured chunks, the cost is interpolated linearly. A chunk that smaller chunks predict to fit is
        tried twice before it counts as too large, because one step may be slow by chance. A chunk whose steps all stay
        within `slowest` never counts as too large, because `slowest` allows for other delays.
        """
        rows, cost = self.own_rows, 1.0 if self.own_rows else 0.0
        if most <= cost:
            return 1
        for chunk, costs in sorted(self.mixed.items()):
            usual, more = median_low(costs), self.own_rows + chunk
            if usual > most and max(costs) > slowest:
                if len(costs) == 1 and self._reach(rows, cost, most) >= chunk:
                    return chunk
                between = rows + (more - rows) * (most - cost) / (usual - cost) - self.own_rows
                return max(1, min(int(between), chunk - 1))
            rows, cost = more, min(max(cost, usual), most)
        return self._reach(rows, cost, most)

    def _reach(self, rows: int, cost: float, most: float) -> int:
        """Return the largest chunk with a cost of at most `most`, given that `rows` rows together cost `cost`."""
        if not rows:
            rows, cost = self.decoding, 1.0
        return max(1, int(rows * (most / cost)) - self.own_rows)

    def expire(self, chunk: int) -> None:
        """Distrust old measurements: forget chunks smaller than the current `chunk`, and keep one measurement of each
        larger chunk, so that one more slow step confirms it."""
        self.mixed = {
            size: deque(list(costs)[-1:] if size > chunk else costs, maxlen=_SAMPLES)
            for size, costs in self.mixed.items()
            if size >= chunk
        }
        self.quiet_s = deque([self.plain], maxlen=_QUIET_STEPS)
        self.since_expiry = 0


class ChunkBudget:
    """Decides how many prompt tokens (a chunk) a step computes, so that gaps between answer tokens stay acceptable.

    Step cost is not linear (a few rows may be as cheap as one, because kernels work on groups of rows), differs between
    machines, and changes with other load. So the budget measures every step with a chunk, and now and then a step
    without prompts for comparison. The limit is a multiple of the gap before the prompts arrived, because prompts fill
    the cache and thereby slow the steps without prompts, too. A chunk that was too large is tried once more after 400
    steps, so that hardly one gap in a hundred is long because of such a trial. The limit applies to the slowest gaps,
    so the budget allows for delays that have other causes.
    """

    def __init__(self, most: int, *, separate_steps: bool = False) -> None:
        """`most`: maximum prompt tokens per step. `separate_steps`: prompts run in separate steps, so that a gap
        between answer tokens consists of one step with a prompt and one without."""
        self._most = most
        self._separate_steps = separate_steps
        self._threads = 1
        self._loads: dict[tuple[int, int], _Load] = {}
        self._slowness: deque[float] = deque(maxlen=_STEPS_OF_NOISE)  # recent step times divided by usual step times

    def grant(self, decoding: int, catching_up: int = 1) -> int:
        """Return how many prompt tokens of `catching_up` sequences together may join `decoding` sequences in a step.
        0 means: run a step without prompts first, to measure its time."""
        if decoding == 0:
            return self._most
        load = self._loads.get((decoding, self._threads))
        if load is None or not load.plain_s or load.since_plain >= _PLAIN_EVERY:
            return 0
        usual = min(1.0, load.before_s / load.plain)
        slowest = target_slowdown(decoding, catching_up) * usual
        waited = 1 if self._separate_steps else 0  # a gap between tokens then also includes a step without prompts
        chunk = load.largest(slowest / self._noise() - waited, slowest - waited)
        if load.since_expiry >= _EXPIRE_EVERY:
            load.expire(chunk)
        return min(chunk, self._most)

    def measured(self, decoding: int, chunk: int, seconds: float, threads: int = 1) -> None:
        """Record the `seconds` of a step with `chunk` prompt tokens, in which `decoding` sequences decoded or waited.

        The next step is expected to run with the same number of `threads`.
        """
        self._threads = threads
        if not decoding:
            return
        load = self._loads.get((decoding, threads))
        if load is None:
            load = self._loads[decoding, threads] = _Load(decoding, 0 if self._separate_steps else decoding)
        usual = load.usual_s(chunk)
        if usual is not None:
            self._slowness.append(seconds / usual)
        load.add(chunk, seconds)

    def _noise(self) -> float:
        """Return the slowest recent step's time divided by its usual time, limited so that some chunk always fits."""
        if len(self._slowness) < _STEPS_OF_NOISE // 4:
            return _USUAL_NOISE
        return min(max(*self._slowness, _MIN_NOISE), _MAX_NOISE)
