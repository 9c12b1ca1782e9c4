"""The circuit breaker of a cloud or a node: failures open it, a recovery half-opens it, one good answer closes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

State = Literal["closed", "half-open", "open"]
#: `pass`: the breaker is closed. `trial`: the request decides whether the breaker closes.
Admission = Literal["pass", "trial", "refused"]

_MAX_REMEMBERED = 64  # failed requests


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """The parameters of a breaker."""

    # Distinct requests in a row that fail before the breaker opens.
    failures_to_open: int
    # Length of the first recovery, in seconds, or in good probes where `by_probes`. It doubles with each trip in a row.
    recovery: float
    # Longest recovery, in the same unit.
    max_recovery: float
    # Whether good probes end a recovery, and not time.
    by_probes: bool = False
    # Seconds after which a failure no longer counts.
    window_s: float = float("inf")


class Breaker:
    """A state machine without I/O. Requests are identified by digests, and no prompt is stored.

    Closed: every request passes. Open: no request passes. Half-open: one request passes as a trial. `trips` counts how
    often the breaker opened. `clock` gives seconds that never go back.
    """

    def __init__(self, rules: BreakerRules, clock: Callable[[], float] = time.monotonic) -> None:
        self.state: State = "closed"
        self.reason = ""
        self.trips = 0
        self._rules = rules
        self._clock = clock
        self._trips_in_a_row = 0  # without a good answer between them
        self._failures: dict[object, float] = {}  # since the last good answer, with their times
        self._recovery = 0.0
        self._opened_at = 0.0
        self._on_trial = False

    @classmethod
    def unproven(cls, rules: BreakerRules) -> Breaker:
        """An open breaker that the first good probe closes."""
        breaker = cls(rules)
        breaker.state, breaker.reason, breaker._recovery = "open", "it has not answered yet", 1
        return breaker

    @property
    def needs_trial(self) -> bool:
        return self.state == "half-open"

    @property
    def seconds_left(self) -> float:
        """Time until the next trial, for recoveries that are timed."""
        return max(0.0, self._opened_at + self._recovery - self._clock())

    def admit(self) -> Admission:
        """Whether a request may be sent now. `succeeded`, `failed` or `leave_trial` must end a trial."""
        if self.state == "open" and not self._rules.by_probes and self.seconds_left <= 0:
            self.state = "half-open"
        if self.state == "closed":
            return "pass"
        if self.state == "open" or self._on_trial:
            return "refused"
        self._on_trial = True
        return "trial"

    def leave_trial(self) -> None:
        """The trial ended without a result: the next request is the trial."""
        self._on_trial = False

    def succeeded(self) -> None:
        """A request got an answer."""
        self._failures.clear()
        self._trips_in_a_row, self._on_trial = 0, False
        if self.state == "half-open" or not self._rules.by_probes:
            self.state, self.reason = "closed", ""

    def failed(self, reason: str, request: bytes | None = None, *, answered: bool = False) -> bool:
        """Count a request that failed, after its retries. True: the failure opened the breaker.

        `request`: its digest. A request counts once, however often it is repeated, and reopens no half-open breaker.
        None: the failure does not depend on the request. `answered`: the server said so itself, and may well answer the
        next request, which is the trial.
        """
        self._on_trial = False
        now, key = self._clock(), object() if request is None else request
        if self.state == "open" or key in self._failures:
            return False
        if len(self._failures) >= _MAX_REMEMBERED:
            del self._failures[next(iter(self._failures))]
        self._failures[key] = now
        recent = sum(at > now - self._rules.window_s for at in self._failures.values())
        opened = (self.needs_trial or recent >= self._rules.failures_to_open) and self.trip(reason)
        if opened and answered:
            self._recovery = 0.0
        return opened

    def trip(self, reason: str) -> bool:
        """Open at once, or begin the recovery anew. False: the breaker was open already."""
        opened = self.state != "open"
        if opened:
            self.trips += 1
            self._trips_in_a_row += 1
        self.state, self.reason, self._on_trial = "open", reason, False
        doublings = min(max(0, self._trips_in_a_row - 1), 32)
        self._recovery = min(self._rules.max_recovery, self._rules.recovery * 2**doublings)
        self._opened_at = self._clock()
        return opened

    def probed(self) -> bool:
        """Count a good probe. True: it ended the recovery."""
        if self.state != "open":
            return False
        self._recovery -= 1
        if self._recovery > 0:
            return False
        self.state, self.reason = ("half-open" if self.trips else "closed"), ""
        return True
