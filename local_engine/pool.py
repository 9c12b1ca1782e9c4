"""Several models at once: loaded when asked for, kept for a while, and unloaded when others need their memory.

The pool knows nothing of llama.cpp: it is told how to find a candidate, and how much memory there is.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ..protocol.errors import EngineError, OverloadedError


class Closable(Protocol):
    def close(self) -> None: ...


M = TypeVar("M", bound=Closable)
M_co = TypeVar("M_co", bound=Closable, covariant=True)


class Candidate(Protocol[M_co]):
    """A model that could be loaded. `need`: bytes of memory it will take, mapped files included."""

    @property
    def need(self) -> int: ...
    def check(self, room: int) -> None:
        """Raises ModelTooLargeError if it does not fit into `room` bytes."""
        ...

    def load(self) -> M_co: ...


class Memory(Protocol):
    """`room`: bytes that loads may take now, as the system sees it; `allocated`: bytes of this process that are no
    pages of files."""

    def room(self) -> int: ...
    def allocated(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Held:
    """A model of the pool. `users`: how many use it now; `idle_s`: seconds since the last one left."""

    name: str
    need: int
    users: int
    idle_s: float


@dataclass(slots=True)
class _Entry(Generic[M]):
    """A model that is being loaded (`model` is None) or there. `allocated`: what the load was seen to allocate."""

    users: int = 1
    need: int = 0
    allocated: int = 0
    used_at: float = 0.0
    model: M | None = None
    error: BaseException | None = None

    @property
    def idle(self) -> bool:
        return self.model is not None and self.users == 0


class ModelPool(Generic[M]):
    """Models by name. Thread-safe; `use` for threads, `use_async` for event loops. A model in use is never unloaded."""

    def __init__(
        self,
        find: Callable[[str], Candidate[M]],
        memory: Memory,
        *,
        keep_alive_s: float | None = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`find` raises what makes a name unusable. `keep_alive_s`: how long an unused model stays; None: until its
        memory is needed."""
        self._find = find
        self._memory = memory
        self._keep_alive_s = keep_alive_s
        self._clock = clock
        self._changed = threading.Condition()
        self._loads = threading.Lock()
        self._entries: dict[str, _Entry[M]] = {}
        self._keeper: threading.Thread | None = None
        self._closed = False

    @contextmanager
    def use(self, name: str) -> Iterator[M]:
        """The model, loaded if it is not; it stays at least until the block ends.

        However many ask for it at once, it is loaded once. Raises what `find` and `load` raise, ModelTooLargeError for
        what cannot fit, OverloadedError for what does not fit beside the models in use, EngineError after `close`.
        """
        entry, model = self._take(name)
        try:
            yield model
        finally:
            self._release(name, entry)

    @asynccontextmanager
    async def use_async(self, name: str) -> AsyncIterator[M]:
        """As `use`, without blocking the event loop."""
        taking = asyncio.ensure_future(asyncio.to_thread(self._take, name))
        try:
            entry, model = await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(lambda taken: self._give_up(name, taken))
            raise
        try:
            yield model
        finally:
            self._release(name, entry)

    def held(self) -> list[Held]:
        """What is loaded, the least recently used first."""
        with self._changed:
            now = self._clock()
            there = [(name, entry) for name, entry in self._entries.items() if entry.model is not None]
            there.sort(key=lambda item: item[1].used_at)
            return [
                Held(name, entry.need, entry.users, 0.0 if entry.users else now - entry.used_at)
                for name, entry in there
            ]

    def unload(self, name: str) -> bool:
        """Free an unused model now; false if it is not loaded. Raises OverloadedError if it is in use."""
        with self._changed:
            entry = self._entries.get(name)
            if entry is None:
                return False
            if not entry.idle:
                raise OverloadedError(f"The model {name} is in use: it is unloaded when its last request is done.")
            self._drop(name)
            return True

    def expire(self) -> float | None:
        """Unload what was unused for the keep-alive time; seconds until the next will be, None if none is idle."""
        if self._keep_alive_s is None:
            return None
        with self._changed:
            now = self._clock()
            left = {
                name: entry.used_at + self._keep_alive_s - now for name, entry in self._entries.items() if entry.idle
            }
            for name in [name for name, seconds in left.items() if seconds <= 0]:
                self._drop(name)
            return min((seconds for seconds in left.values() if seconds > 0), default=None)

    def close(self) -> None:
        """Take no more requests and unload: what is in use goes with its last user. Idempotent."""
        with self._changed:
            self._closed = True
            for name in [name for name, entry in self._entries.items() if entry.idle]:
                self._drop(name)
            self._changed.notify_all()
        if self._keeper is not None:
            self._keeper.join()

    def _take(self, name: str) -> tuple[_Entry[M], M]:
        with self._changed:
            while True:
                self._refuse_closed()
                entry = self._entries.get(name)
                if entry is None:
                    break
                if entry.model is not None:
                    entry.users += 1
                    return entry, entry.model
                self._changed.wait_for(lambda waited=entry: waited.model is not None or waited.error is not None)
                if entry.error is not None:
                    raise entry.error
            entry = self._entries[name] = _Entry[M]()
        return entry, self._load(name, entry)

    def _load(self, name: str, entry: _Entry[M]) -> M:
        """One load at a time, so that what it allocates can be told; `entry` is in the table and says so to others."""
        try:
            with self._loads:
                candidate = self._find(name)
                with self._changed:
                    self._refuse_closed()
                    self._make_room(name, candidate)
                    entry.need = candidate.need
                before = self._memory.allocated()
                model = candidate.load()
                allocated = self._memory.allocated() - before
        except BaseException as error:
            with self._changed:
                del self._entries[name]
                entry.error = error if isinstance(error, Exception) else EngineError(f"Loading {name} was interrupted.")
                self._changed.notify_all()
            raise
        with self._changed:
            entry.allocated = min(max(0, allocated), entry.need)
            entry.model, entry.used_at = model, self._clock()
            self._start_keeper()
            self._changed.notify_all()
        return model

    def _make_room(self, name: str, candidate: Candidate[M]) -> None:
        """Unload the least recently used until the candidate fits; if it cannot, nothing is unloaded."""
        idle = sorted((entry.used_at, other) for other, entry in self._entries.items() if entry.idle)
        freed = sum(self._entries[other].need for _, other in idle)
        if candidate.need <= self._room() + freed:
            for _, other in idle:
                if candidate.need <= self._room():
                    break
                self._drop(other)
            freed = 0
        if candidate.need <= self._room():
            return
        busy = sorted(other for other, entry in self._entries.items() if other != name and not entry.idle)
        if busy:
            raise OverloadedError(
                f"{name} needs {candidate.need / 1e6:,.1f} MB of memory, {max(0, self._room() + freed) / 1e6:,.1f} MB "
                f"can be freed now, and {', '.join(busy)} {'is' if len(busy) == 1 else 'are'} in use: try again later.",
                code="memory_in_use",
            )
        candidate.check(self._room() + freed)

    def _room(self) -> int:
        """What loads may take: the system counts mapped weights, and caches nobody wrote to yet, as free."""
        return self._memory.room() - sum(entry.need - entry.allocated for entry in self._entries.values())

    def _release(self, name: str, entry: _Entry[M]) -> None:
        with self._changed:
            entry.users -= 1
            entry.used_at = self._clock()
            if entry.idle and (self._closed or self._keep_alive_s == 0):
                self._drop(name)
            self._changed.notify_all()

    def _give_up(self, name: str, taken: asyncio.Future[tuple[_Entry[M], M]]) -> None:
        """Nobody waits for it any more, but it was taken."""
        if not taken.cancelled() and taken.exception() is None:
            self._release(name, taken.result()[0])

    def _drop(self, name: str) -> None:
        entry = self._entries.pop(name)
        if entry.model is not None:
            entry.model.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError("The model pool is closed.")

    def _start_keeper(self) -> None:
        if self._keeper is None and self._keep_alive_s and not self._closed:
            self._keeper = threading.Thread(target=self._keep, name="updraft-keep-alive", daemon=True)
            self._keeper.start()

    def _keep(self) -> None:
        """The thread that unloads what was not used for long."""
        with self._changed:
            while not self._closed:
                self._changed.wait(self.expire())
