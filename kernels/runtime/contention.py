"""How many threads compute, while other processes want the processors too.

The threads of llama.cpp, and of torch's OpenMP, meet after every operation and spin until the last one is there. If one
of them has to share its processor, all wait for it, spinning: with two threads on two processors, one of them busy,
llama.cpp was seen to give about half of what one thread gives, small models of the cloud engine a tenth. How eagerly
they poll changes little of that (decision 022); fewer threads do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

_INTERVAL_S = 0.2
# A neighbour who gets less than this of a processor, while we use all, is not worth a thread.
_TOLERATED = 0.4
# Of a processor: what this process uses at least while it computes.
_COMPUTING = 0.4


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds since some beginning. `wall`: of the clock; `busy`: of all processors that this process may use; `own`:
    of this process on them."""

    wall: float
    busy: float
    own: float


def usage() -> Usage:
    """As it is now. Time that a hypervisor took away counts as busy."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    busy = 0.0
    for index, processor in enumerate(psutil.cpu_times(percpu=True)):
        if allowed is None or index in allowed:
            found = processor._asdict()
            # Linux counts the time of guests twice.
            unused = ("idle", "iowait", "guest", "guest_nice")
            busy += sum(seconds for name, seconds in found.items() if name not in unused)
    return Usage(time.monotonic(), busy, time.process_time())


class ThreadGovernor:
    """Leaves the processors that others keep busy to them. One thread at a time."""

    def __init__(self, most: int, *, processors: int | None = None, measure: Callable[[], Usage] = usage) -> None:
        """`most`: threads on an idle machine. `processors`: those this process may use, None to ask."""
        self._most = self._threads = most
        self._processors = processors or _processors()
        self._measure = measure
        self._last: Usage | None = None
        self._due = 0.0

    def threads(self) -> int:
        """How many to use for the next step. Looks at the machine five times a second at most."""
        if self._most == 1:
            return 1
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _INTERVAL_S
            self._look()
        return self._threads

    def _look(self) -> None:
        last, self._last = self._last, self._measure()
        if last is None or self._last.wall <= last.wall:
            return
        wall, own = self._last.wall - last.wall, self._last.own - last.own
        if wall > 10 * _INTERVAL_S and own < _COMPUTING * wall:
            return  # a pause, not a long step: the last look says nothing about now
        others = (self._last.busy - last.busy - own) / wall
        self._threads = max(1, min(self._most, int(self._processors - max(0.0, others) + _TOLERATED)))


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
