"""After a model could not be loaded, it is not tried at each request: its file has to change, or some time to pass."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...protocol.errors import UpdraftError

_FIRST_S, _LONGEST_S = 15.0, 900.0


class LoadPause:
    """The pause after a failure, twice as long after each. `version`: differs once the model's file has changed."""

    def __init__(self, version: Callable[[], object] = lambda: None) -> None:
        self._version = version
        self._failed: object = None  # the version that could not be loaded
        self._error: UpdraftError | None = None
        self._length_s = _FIRST_S
        self._until = 0.0

    def begin(self, error: UpdraftError) -> None:
        self._error, self._failed = error, self._version()
        self._until = time.monotonic() + self._length_s
        self._length_s = min(2 * self._length_s, _LONGEST_S)

    @property
    def error(self) -> UpdraftError | None:
        """The last failure, without its traceback, which would grow each time it is raised; None: try to load."""
        over = self._error is None or time.monotonic() >= self._until or self._version() != self._failed
        return None if over or self._error is None else self._error.with_traceback(None)
