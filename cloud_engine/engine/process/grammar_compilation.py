"""Constraints are compiled beside the step loop, as that may take longer than a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from ....text.grammars.state import GrammarState
from ..types.request import GenerationRequest


class Preparation(Future[GrammarState | None]):
    """The result of preparing one request: its grammar, or why there is none."""

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__()
        self.request = request


class Preparations:
    """Prepares requests in a thread, one after the other. `done`, called there, gets the id of each as it is over.

    All else is for one thread. The thread is a daemon: whatever it is at, it holds up nobody's exit.
    """

    def __init__(
        self, prepare: Callable[[GenerationRequest], GrammarState | None], done: Callable[[str], None]
    ) -> None:
        self._prepare = prepare
        self._done = done
        self._open: dict[str, Preparation] = {}
        self._queue: SimpleQueue[Preparation | None] = SimpleQueue()
        self._closed = False
        self._thread: threading.Thread | None = None

    def begin(self, request: GenerationRequest) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="updraft-grammar", daemon=True)
            self._thread.start()
        preparation = self._open[request.request_id] = Preparation(request)
        self._queue.put(preparation)

    def cancel(self, request_id: str) -> None:
        """Stop a preparation, begun or not. One that is not here (any more) is no error."""
        if preparation := self._open.pop(request_id, None):
            preparation.cancel()

    def take(self, request_id: str) -> Preparation | None:
        """One that is over. None if it was cancelled meanwhile, even if another has its id by now."""
        preparation = self._open.get(request_id)
        return self._open.pop(request_id) if preparation and preparation.done() else None

    def close(self) -> None:
        """Without waiting for what has begun."""
        self._closed = True
        for request_id in list(self._open):
            self.cancel(request_id)
        self._queue.put(None)

    def _work(self) -> None:
        while (preparation := self._queue.get()) is not None:
            if preparation.set_running_or_notify_cancel():
                self._finish(preparation)

    def _finish(self, preparation: Preparation) -> None:
        try:
            preparation.set_result(self._prepare(preparation.request))
        except BaseException as error:  # noqa: BLE001 - for whoever takes it
            preparation.set_exception(error)
        if not self._closed:
            self._done(preparation.request.request_id)
