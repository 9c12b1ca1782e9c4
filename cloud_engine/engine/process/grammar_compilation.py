"""Compilation of constraints in a separate thread, because compiling may take longer than a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from ....text.grammars.state import GrammarState
from ..types.request import GenerationRequest


class GrammarJob(Future[GrammarState | None]):
    """The future result of compiling a request's constraint: a grammar or an error."""

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__()
        self.request = request


class GrammarJobs:
    """Compiles the constraints of requests one by one in a thread, which then calls `done` with the request's id.

    All methods must be called from one thread. The worker is a daemon thread, so it never delays the process's exit.
    """

    def __init__(
        self, prepare: Callable[[GenerationRequest], GrammarState | None], done: Callable[[str], None]
    ) -> None:
        self._prepare = prepare
        self._done = done
        self._open: dict[str, GrammarJob] = {}
        self._queue: SimpleQueue[GrammarJob | None] = SimpleQueue()
        self._closed = False
        self._thread: threading.Thread | None = None

    def begin(self, request: GenerationRequest) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="updraft-grammar", daemon=True)
            self._thread.start()
        preparation = self._open[request.request_id] = GrammarJob(request)
        self._queue.put(preparation)

    def cancel(self, request_id: str) -> None:
        """Cancel the job of a request, started or not; do nothing if the id is unknown."""
        if preparation := self._open.pop(request_id, None):
            preparation.cancel()

    def take(self, request_id: str) -> GrammarJob | None:
        """Remove and return a finished job. Return None for a cancelled job, even if a new job has the same id."""
        preparation = self._open.get(request_id)
        return self._open.pop(request_id) if preparation and preparation.done() else None

    def close(self) -> None:
        """Cancel all jobs and end the thread, without waiting for the current job."""
        self._closed = True
        for request_id in list(self._open):
            self.cancel(request_id)
        self._queue.put(None)

    def _work(self) -> None:
        while (preparation := self._queue.get()) is not None:
            if not preparation.set_running_or_notify_cancel():
                continue
            try:
                preparation.set_result(self._prepare(preparation.request))
            except BaseException as error:  # noqa: BLE001 - raised again by `result`
                preparation.set_exception(error)
            if not self._closed:
                self._done(preparation.request.request_id)
