"""Who may use the one llama.cpp context now."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..protocol.errors import EngineError

_PATIENCE_S = 0.5
_POLL_S = 0.05


class Turns:
    """Runs take the context one after the other, in any threads.

    A run keeps its turn between steps, so that nobody evicts its KV cache, until it is finished. But a run that makes
    no step for half a second while another waits loses its turn: an abandoned run or a slow reader never blocks the
    device, and may go on later at the price of a new prefill.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: object | None = None
        self._busy = False
        self._last_step = 0.0
        self._closed = False

    @contextmanager
    def step(self, holder: object, cancelled: threading.Event) -> Iterator[bool]:
        """Hold the context for one step; yields false, without it, if `cancelled` came first.

        Raises EngineError after `close`.
        """
        with self._changed:
            while not self._closed and not cancelled.is_set() and not self._free_for(holder):
                self._changed.wait(_POLL_S)
            if self._closed:
                raise EngineError("The local engine is closed.")
            granted = not cancelled.is_set()
            if granted:
                self._holder, self._busy = holder, True
        try:
            yield granted
        finally:
            if granted:
                with self._changed:
                    self._busy, self._last_step = False, time.monotonic()
                    self._changed.notify_all()

    def leave(self, holder: object) -> None:
        """`holder` is finished; the next may start at once."""
        with self._changed:
            if self._holder is holder:
                self._holder = None
                self._changed.notify_all()

    def close(self) -> None:
        """Refuse further steps and return when none is running."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while self._busy:
                self._changed.wait(_POLL_S)

    def _free_for(self, holder: object) -> bool:
        if self._busy:
            return False
        idle = time.monotonic() - self._last_step
        return self._holder is None or self._holder is holder or idle > _PATIENCE_S
