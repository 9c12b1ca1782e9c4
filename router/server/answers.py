"""The stored answers behind the endpoints, and the responses that are being made in the background."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...protocol.dialects.responses_events import ResponseEvents
from ...protocol.errors import ConfigurationError, NotFoundError, OverloadedError, StorageError, UnsupportedFeatureError
from ...protocol.http.foreign import object_of
from ..config import RouterConfig
from ..storage.answer_store import AnswerStore, StoredAnswer

log = logging.getLogger("updraft.router")
T = TypeVar("T")

MAX_BACKGROUND = 100  # responses at a time
_NOT_STORED = "store: this answer could not be stored"
_ENDED = ("completed", "incomplete", "failed", "cancelled")


@dataclass(slots=True)
class BackgroundResponse:
    """A response in the making. `response` and `events` grow."""

    # Digest of the caller's key.
    owner: str
    response: dict[str, Any]
    # The items that it answers.
    input: list[dict[str, Any]]
    # Whether it was asked for as a stream, which can be followed later.
    streamed: bool
    events: list[bytes] = field(default_factory=list[bytes])
    task: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, events: list[bytes]) -> None:
        self.events += events
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def fail(self, error: dict[str, Any]) -> None:
        self.add(ResponseEvents(self.response, len(self.events)).fail(error))

    async def cancel(self) -> None:
        """Stop it, unless it is complete and only being stored. Wait until that is done."""
        if self.task is not None:
            if not is_ended(self.response):
                self.task.cancel()
            await asyncio.wait([self.task])

    async def follow(self, after: int) -> AsyncGenerator[bytes]:
        """The events behind the one numbered `after`, as they come."""
        position = after + 1
        while True:
            changed, over = self._changed, self.task is None or self.task.done()
            if position < len(self.events):
                position, events = len(self.events), self.events[max(position, 0) :]
                yield b"".join(events)
            elif over:
                return
            else:
                await changed.wait()


class AnswerService:
    """The store opens with `start`, or the first call that needs it. `close()` ends what runs in the background."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._store: AnswerStore | None = None
        self._opening = threading.Lock()
        self._running: dict[str, BackgroundResponse] = {}

    @property
    def enabled(self) -> bool:
        return self._config.store is not None

    def wanted(self, param: str) -> None:
        """Raises UnsupportedFeatureError where nothing is kept and `param` wants that."""
        if not self.enabled:
            raise UnsupportedFeatureError(
                f"{param}: this router keeps no answers. Set store = true in its settings, or leave it out.",
                param=param,
            )

    async def start(self) -> None:
        """Open the store now, where there is one. Idempotent. Without it requests go on, and the log says why.

        Raises ConfigurationError if the file holds something else.
        """
        if self.enabled:
            try:
                await self.use(lambda _: None)
            except StorageError as error:
                log.warning("Answers cannot be stored. %s", error.message)

    async def use(self, work: Callable[[AnswerStore], T]) -> T:
        """The result of `work`, off the event loop. Raises NotFoundError where nothing is kept, and as `work`."""
        return await asyncio.to_thread(self._use, work)

    async def keep(self, answer: StoredAnswer) -> bool:
        """Store an answer. A failure is logged and returns False, for the caller has a use for the answer anyway."""
        try:
            await self.use(lambda store: store.put(answer))
        except (sqlite3.Error, ConfigurationError, ValueError) as error:
            log.error("the answer %r cannot be stored: %s", answer.id, error)
            return False
        return True

    def begin(self, running: BackgroundResponse, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` in the background. Raises OverloadedError."""
        if len(self._running) >= MAX_BACKGROUND:
            work.close()
            raise OverloadedError(f"{MAX_BACKGROUND} responses run in the background: wait for one of them.")
        answer_id: str = running.response["id"]
        self._running[answer_id] = running

        def over(_: asyncio.Task[None]) -> None:
            self._running.pop(answer_id, None)
            running.add([])

        running.task = asyncio.create_task(work)
        running.task.add_done_callback(over)

    def running(self, owner: str, answer_id: str) -> BackgroundResponse | None:
        found = self._running.get(answer_id)
        return found if found is not None and found.owner == owner else None

    async def close(self) -> None:
        await asyncio.gather(*(running.cancel() for running in list(self._running.values())))
        if self._store is not None:
            self._store.close()

    def _use(self, work: Callable[[AnswerStore], T]) -> T:
        path = self._config.store
        if path is None:
            raise NotFoundError("This router keeps no answers. Set store = true in its settings.", code="store_off")
        with self._opening:
            if self._store is None:
                self._store = AnswerStore(path, days=self._config.store_days, most=self._config.store_answers)
        return work(self._store)


def not_stored(answer: dict[str, Any]) -> dict[str, Any]:
    """Return `answer` with a note that it could not be stored."""
    about = object_of(answer.get("updraft"))
    return {**answer, "updraft": {**about, "notes": [*(about.get("notes") or ()), _NOT_STORED]}}


def is_ended(response: dict[str, Any]) -> bool:
    """Whether a response is as it stays."""
    return response["status"] in _ENDED
