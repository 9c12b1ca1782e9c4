"""Number of compute threads to use while other processes need the processors too.

The threads of llama.cpp and of torch's OpenMP spin at a barrier after every operation. If one thread shares its
processor, all others wait for it. With two threads on two processors, one of them busy, llama.cpp is about half as fast
as with one thread, and small models of the cloud engine a tenth as fast. Fewer threads help (decision 022).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

_INTERVAL_S = 0.2
# Share of one processor that other processes may use before a thread is given up.
_TOLERATED = 0.4
# Below this share of one processor over a long interval, this process was paused rather than computing.
_COMPUTING = 0.4


@dataclass(frozen=True, slots=True)
class ProcessorUsage:
    """Time totals in seconds, since an arbitrary start."""

    # Wall-clock time.
    wall: float
    # Busy time of all processors that this process may use.
    busy: float
    # Processor time of this process.
    own: float


def usage() -> ProcessorUsage:
    """Return the current totals. Time stolen by a hypervisor counts as busy."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    busy = 0.0
    for index, processor in enumerate(psutil.cpu_times(percpu=True)):
        if allowed is None or index in allowed:
            times = processor._asdict()
            # Linux counts the time of virtual machines in `user` and `nice`, too, so it is not added a second time.
            unused = ("idle", "iowait", "guest", "guest_nice")
            busy += sum(seconds for name, seconds in times.items() if name not in unused)
    return ProcessorUsage(time.monotonic(), busy, time.process_time())


class ThreadGovernor:
    """Reduces compute threads while other processes keep processors busy. Not thread-safe."""

    def __init__(
        self, most: int, *, processors: int | None = None, measure: Callable[[], ProcessorUsage] = usage
    ) -> None:
        """`most`: threads on an idle machine. `processors`: number this process may use; None detects it."""
        self._most = self._threads = most
        self._processors = processors or _processors()
        self._measure = measure
        self._last: ProcessorUsage | None = None
        self._due = 0.0

    def threads(self) -> int:
        """Return the number of threads for the next step. Measures the machine at most five times a second."""
        if self._most == 1:
            return 1
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _INTERVAL_S
            self._measure_load()
        return self._threads

    def _measure_load(self) -> None:
        last, self._last = self._last, self._measure()
        if last is None or self._last.wall <= last.wall:
            return
        wall, own = self._last.wall - last.wall, self._last.own - last.own
        if wall > 10 * _INTERVAL_S and own < _COMPUTING * wall:
            return  # the process has paused, so the last measurement is too old
        other_load = (self._last.busy - last.busy - own) / wall
        self._threads = max(1, min(self._most, int(self._processors - max(0.0, other_load) + _TOLERATED)))


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
