"""Stored answers for the endpoints, and responses in progress in the background."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...protocol.dialects.chat_chunks import with_notes
from ...protocol.dialects.responses_events import ResponseEvents
from ...protocol.errors import ConfigurationError, NotFoundError, OverloadedError, StorageError, UnsupportedFeatureError
from ...protocol.http.wire import PrivacyMark
from ..config import RouterConfig
from ..storage.answer_store import AnswerStore, StoredAnswer

log = logging.getLogger("updraft.router")
T = TypeVar("T")

MAX_BACKGROUND = 100  # maximum number of responses in progress in the background
_NOT_STORED = "store: this answer could not be stored"
_ENDED = ("completed", "incomplete", "failed", "cancelled")


@dataclass(slots=True)
class BackgroundResponse:
    """A response being generated in the background; `response` and `events` grow meanwhile."""

    # Digest of the caller's API key.
    owner: str
    response: dict[str, Any]
    # Conversation items that the response answers.
    input: list[dict[str, Any]]
    # Whether the request asked for a stream, so that later requests can follow the events.
    streamed: bool
    events: list[bytes] = field(default_factory=list[bytes])
    # Mark of the request.
    mark: PrivacyMark = field(default_factory=PrivacyMark)
    task: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, events: list[bytes]) -> None:
        self.events += events
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def fail(self, error: dict[str, Any]) -> None:
        self.add(ResponseEvents(self.response, len(self.events)).fail(error))

    async def cancel(self) -> None:
        """Cancel the task, and wait for its end. A task that only stores a finished response is not cancelled."""
        if self.task is not None:
            if not is_ended(self.response):
                self.task.cancel()
            await asyncio.wait([self.task])

    async def follow(self, after: int) -> AsyncGenerator[bytes]:
        """Yield the events after number `after` as they arrive, until the response ends."""
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
    """Answer store and background responses. The store opens in `start` or on first use."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._store: AnswerStore | None = None
        self._opening = threading.Lock()
        self._running: dict[str, BackgroundResponse] = {}

    @property
    def enabled(self) -> bool:
        return self._config.store is not None

    def wanted(self, param: str) -> None:
        """Raise UnsupportedFeatureError if the router stores no answers. `param`: field that needs stored answers."""
        if not self.enabled:
            raise UnsupportedFeatureError(
                f"{param}: this router stores no answers. Set store = true in its settings, or omit the field.",
                param=param,
            )

    async def start(self) -> None:
        """Open the answer store now, if one is configured. Idempotent. Warns if the store cannot be opened. Raises
        ConfigurationError if the file is not an answer store."""
        if self.enabled:
            try:
                await self.use(lambda _: None)
            except StorageError as error:
                log.warning("answers will not be stored: %s", error.message)

    async def use(self, work: Callable[[AnswerStore], T]) -> T:
        """Return the result of `work` on the store, in a thread. Raises NotFoundError if the store is off."""
        return await asyncio.to_thread(self._use, work)

    async def keep(self, answer: StoredAnswer) -> bool:
        """Store an answer. On failure log the error and return False, since the caller can still send the answer."""
        try:
            await self.use(lambda store: store.put(answer))
        except (sqlite3.Error, ConfigurationError, ValueError) as error:
            log.error("cannot store answer %r: %s", answer.id, error)
            return False
        return True

    def begin(self, running: BackgroundResponse, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a background task. Raises OverloadedError if `MAX_BACKGROUND` responses are running."""
        if len(self._running) >= MAX_BACKGROUND:
            work.close()
            raise OverloadedError(f"{MAX_BACKGROUND} background responses are running. Wait for one to finish.")
        answer_id: str = running.response["id"]
        self._running[answer_id] = running

        def over(_: asyncio.Task[None]) -> None:
            self._running.pop(answer_id, None)
            running.add([])

        running.task = asyncio.create_task(work)
        running.task.add_done_callback(over)

    def running(self, owner: str, answer_id: str) -> BackgroundResponse | None:
        response = self._running.get(answer_id)
        return response if response is not None and response.owner == owner else None

    async def close(self) -> None:
        await asyncio.gather(*(running.cancel() for running in list(self._running.values())))
        if self._store is not None:
            self._store.close()

    def _use(self, work: Callable[[AnswerStore], T]) -> T:
        path = self._config.store
        if path is None:
            raise NotFoundError("This router stores no answers. Set store = true in its settings.", code="store_off")
        with self._opening:
            if self._store is None:
                self._store = AnswerStore(path, days=self._config.store_days, most=self._config.store_answers)
        return work(self._store)


def not_stored(answer: dict[str, Any]) -> dict[str, Any]:
    """Return `answer` with a note that it could not be stored."""
    return with_notes(answer, _NOT_STORED)


def is_ended(response: dict[str, Any]) -> bool:
    """Return whether the response has a final status."""
    return response["status"] in _ENDED
