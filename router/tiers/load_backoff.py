"""Pause after a failed attempt to load a model. A change of the model's file ends the pause early."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...protocol.errors import UpdraftError

_FIRST_S, _LONGEST_S = 15.0, 900.0


class LoadBackoff:
    """Pause after a load failure, doubled each time. `version`: returns a value that changes with the file."""

    def __init__(self, version: Callable[[], object] = lambda: None) -> None:
        self._version = version
        self._failed: object = None  # file version that failed to load
        self._error: UpdraftError | None = None
        self._length_s = _FIRST_S
        self._until = 0.0

    def begin(self, error: UpdraftError) -> None:
        self._error, self._failed = error, self._version()
        self._until = time.monotonic() + self._length_s
        self._length_s = min(2 * self._length_s, _LONGEST_S)

    @property
    def error(self) -> UpdraftError | None:
        """Last failure, or None if loading may be tried again. Its traceback is removed, as each raise extends it."""
        over = self._error is None or time.monotonic() >= self._until or self._version() != self._failed
        return None if over or self._error is None else self._error.with_traceback(None)
