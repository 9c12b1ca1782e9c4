"""A supervisor that runs several worker processes on one port, and restarts workers that die."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable

from ...protocol.errors import ConfigurationError, UpdraftError
from ...protocol.safety.system import KILL, fork

_POLL_S = 0.1
_SHUTDOWN_S = 10.0  # seconds from the end of a worker's drain to SIGKILL
_MIN_LIFETIME_S = 2.0  # seconds; a worker that dies sooner counts as failed to start
_MAX_EARLY_EXITS = 5
_log = logging.getLogger("updraft.gateway")


class Supervisor:
    """Forks `workers` processes that each call `work(number)`, until SIGTERM, SIGINT or, if asked, the parent's exit.

    The supervisor has no threads and serves no requests, to keep it simple and robust.
    """

    def __init__(self, workers: int, work: Callable[[int], None], drain_s: float, *, exit_with_parent: bool) -> None:
        self._workers = workers
        self._work = work
        self._drain_s = drain_s
        self._parent = os.getppid() if exit_with_parent else None
        self._started: dict[int, tuple[int, float]] = {}
        self._quick_deaths = 0
        self._stopping = False

    def run(self) -> None:
        """Run until stopped. Raises ConfigurationError if workers keep dying right after their start."""
        previous = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            for number in range(self._workers):
                self._start(number)
            while not self._stopping:
                time.sleep(_POLL_S)  # signals interrupt the sleep
                self._replace_dead()
                if self._parent is not None and os.getppid() != self._parent:
                    break
        finally:
            self._end_all()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _stop(self, _signal: int, _frame: object) -> None:
        self._stopping = True

    def _start(self, number: int) -> None:
        if process := fork():
            self._started[process] = (number, time.monotonic())
            return
        code = 1
        try:
            for each in (signal.SIGTERM, signal.SIGINT):
                signal.signal(each, signal.SIG_DFL)
            self._work(number)
            code = 0
        except UpdraftError as error:
            _log.error("Worker %d cannot start: %s", number, error.message)
        except BaseException:  # noqa: BLE001 - the process ends here
            _log.exception("Worker %d failed", number)
        finally:
            os._exit(code)  # skips the supervisor's cleanup handlers

    def _replace_dead(self) -> None:
        while self._started and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            process, status = ended
            if process not in self._started:
                continue
            number, since = self._started.pop(process)
            code = os.waitstatus_to_exitcode(status)
            cause = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            is_quick = time.monotonic() - since < _MIN_LIFETIME_S
            self._quick_deaths = self._quick_deaths + 1 if is_quick else 0
            if self._quick_deaths >= _MAX_EARLY_EXITS:
                raise ConfigurationError(
                    f"{_MAX_EARLY_EXITS} workers in a row died within {_MIN_LIFETIME_S:g} s of their start, the last "
                    f"{cause}: the gateway stops instead of restarting them forever. See the log above for the cause."
                )
            if not self._stopping:
                _log.warning("Worker %d died %s: restarting it", number, cause)
                self._start(number)

    def _end_all(self) -> None:
        self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + self._drain_s + _SHUTDOWN_S
        while self._started:
            process, _ = os.waitpid(-1, os.WNOHANG)
            self._started.pop(process, None)
            if time.monotonic() > deadline:
                self._signal_all(KILL)
            time.sleep(0 if process else 0.02)

    def _signal_all(self, number: int) -> None:
        for process in self._started:
            os.kill(process, number)
