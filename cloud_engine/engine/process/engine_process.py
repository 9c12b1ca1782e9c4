"""An engine in its own process, so that HTTP work never delays a step and a crash leaves the server running."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

from ....protocol.errors import EngineDownError, EngineError, RequestFailedError, UpdraftError
from ..stats import EngineStats
from .client import EngineClient
from .core_process import CoreProcess
from .messages import Close, Command, DownReport, Load, LoadProgress, ReadyReport, down_report

RESTART_BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Seconds to wait before each consecutive restart; when all are used, the engine stays down. A core that served for
more than `STABLE_S` seconds resets the count."""
STABLE_S = 60.0

_log = logging.getLogger("updraft.engine")


class EngineProcess(EngineClient):
    """An engine in a core process, which a thread watches. Leaving the `with` block ends the process.

    When the core dies, all requests in flight fail with an EngineDownError that names the cause. With `restart`, a new
    core is started instead, and continues the requests. Call `wait_ready` before `start`."""

    def __init__(self, load: Load, *, restart: bool = False) -> None:
        super().__init__()
        self._load = load
        self._restart = restart
        self._restarts = 0
        self._ready_at: float | None = None
        self._closing = threading.Event()
        self._awake = threading.Event()  # cleared while the core is ended for a sleep of level 2
        self._awake.set()
        self._core = CoreProcess(load)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._stop()
            self._thread.join()
        self._core.close()

    def wait_ready(self, progress: Callable[[int, int], None] = lambda _done, _total: None) -> ReadyReport:
        """Wait until the core has loaded its model. Raises the error of the core, most likely ModelLoadError."""
        for report in self._core.reports():
            match report:
                case LoadProgress(done, total):
                    progress(done, total)
                case ReadyReport():
                    self._ready_at = time.monotonic()
                    return report
                case DownReport(error):
                    raise error
                case _:
                    raise TypeError(f"Unexpected report of a loading core: {type(report).__name__}.")
        raise EngineError("The engine core ended without a report.")

    def stats(self) -> EngineStats:
        return replace(super().stats(), restarts=self._restarts)

    def _send(self, command: Command) -> None:
        self._core.send(command)

    def _begin_transition(self, level: int, *, asleep: bool) -> None:
        if level == 1:
            super()._begin_transition(level, asleep=asleep)
        elif asleep:
            self._awake.clear()
            self._send(Close())
        else:
            self._awake.set()

    def _stop(self) -> None:
        self._closing.set()
        self._awake.set()
        self._core.stop()

    def _lose_core(self, failure: UpdraftError, cause: str) -> None:
        """Refuse new requests, and prepare the requests in flight for the next core. Runs in the event loop."""
        self._refusal, self._stats = failure, EngineStats()
        self.sleep_level, self._is_running = 0, False
        unfinished = filter(self._is_unfinished, self._in_flight)
        lost = [request_id for request_id in unfinished if not self._recovery.holds(request_id)]
        begun = [request_id for request_id in lost if self._in_flight[request_id].num_new_tokens]
        waiting = [request_id for request_id in lost if not self._in_flight[request_id].num_new_tokens]
        if lost:
            error = RequestFailedError(f"The engine failed on this request alone ({cause}): change the request.")
            self._recover(lost, begun + waiting[: self._load.config.max_num_seqs], error)

    # The methods below run in the watching thread.

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # noqa: BLE001 - without its watcher the engine is lost: fail all requests
            _log.exception("Watching the engine core failed; the engine is down.")
            self._call_soon(self._refuse, _failure_of(down_report(error).error, restarting=False))
        self._core.close()

    def _watch(self) -> None:
        """Follow the core and restart it after crashes, until the engine is closed or restarts are used up."""
        crashes = suspects = 0
        while True:
            error = self._follow()
            if self._closing.is_set():
                return
            if not self._awake.is_set():
                self._core.close()
                self._call_soon(self._end_transition)
                self._awake.wait()
                if self._closing.is_set():
                    return
                self._core, self._ready_at = CoreProcess(self._load), None
                continue
            stable = self._ready_at is not None and time.monotonic() - self._ready_at > STABLE_S
            suspects, before = len(self._recovery.trial), suspects
            is_trial = 0 < suspects < before  # the search for a culprit advances
            crashes = 1 if stable else crashes + (not is_trial)
            restarting = self._restart and crashes <= len(RESTART_BACKOFF_S)
            failure = _failure_of(error, restarting=restarting)
            _log.error("%s", failure.message)
            if restarting:
                self._call_soon(self._lose_core, failure, error.message.rstrip("."))
            else:
                self._call_soon(self._refuse, failure)
            self._core.close()
            if not restarting or self._closing.wait(RESTART_BACKOFF_S[crashes - 1]):
                return
            self._core, self._ready_at = CoreProcess(self._load), None
            self._restarts += 1
            if self._closing.is_set():  # closed during the restart, so `_stop` stopped only the old core
                return

    def _follow(self) -> UpdraftError:
        """Pass the core's reports on to the event loop; return the error with which the core ended."""
        for report in self._core.reports():
            match report:
                case LoadProgress():
                    pass
                case ReadyReport():
                    self._ready_at = time.monotonic()
                    self._call_soon(self._serve)
                case DownReport(error):
                    return error
                case _:
                    self._call_soon(self._receive, report)
        raise EngineError("The engine core's reports ended without a Down report.")


def _failure_of(error: UpdraftError, *, restarting: bool) -> EngineDownError:
    cause = error.message.rstrip(".")
    if restarting:
        return EngineDownError(f"The engine is restarting: {cause}. Retry in a moment.", code="engine_restarting")
    return EngineDownError(f"The engine is down: {cause}. Send the request to another node, and restart this one.")
