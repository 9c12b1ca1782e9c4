"""Several models at once: loaded when asked for, kept for a while, and unloaded when others need their memory.

The pool knows nothing of llama.cpp: it is told how to find a candidate, and how much memory there is.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ..protocol.errors import EngineError, OverloadedError
from .runtime.mailbox import arrived


class Closable(Protocol):
    def close(self) -> None: ...


M = TypeVar("M", bound=Closable)
M_co = TypeVar("M_co", bound=Closable, covariant=True)


class PoolCandidate(Protocol[M_co]):
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


@dataclass(slots=True, eq=False)
class _Entry(Generic[M]):
    """A model that is being loaded (`model` is None) or there."""

    # Who asked for it, and the one who loads it.
    users: int = 0
    need: int = 0
    # Bytes that the load was measured to allocate.
    allocated: int = 0
    used_at: float = 0.0
    model: M | None = None
    # The model, or why there is none.
    loaded: Future[M] = field(default_factory=Future[M])

    @property
    def idle(self) -> bool:
        return self.model is not None and self.users == 0


class ModelPool(Generic[M]):
    """Models by name. Thread-safe; `use` for threads, `use_async` for event loops. A model in use is never unloaded."""

    def __init__(
        self,
        find: Callable[[str], PoolCandidate[M]],
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
        self._changed = threading.Condition()  # guards what follows; models are loaded and closed without it
        self._entries: dict[str, _Entry[M]] = {}
        self._closing: list[_Entry[M]] = []  # out of the table, but still in memory
        self._loads = threading.Lock()
        # Of event loops. A load waits for what is being closed, so that these may not wait for each other.
        self._loading = ThreadPoolExecutor(1, "updraft-load")
        self._unloading = ThreadPoolExecutor(1, "updraft-unload")
        self._keeper: threading.Thread | None = None
        self._closed = False

    @contextmanager
    def use(self, name: str) -> Iterator[M]:
        """The model, loaded if it is not; it stays at least until the block ends.

        However many ask for it at once, it is loaded once. Raises what `find` and `load` raise, ModelTooLargeError for
        what cannot fit, OverloadedError for what does not fit beside the models in use, EngineError after `close`.
        """
        entry, is_first = self._ask(name)
        try:
            yield self._load(name, entry) if is_first else entry.loaded.result()
        finally:
            self._close(self._leave(name, entry))

    @asynccontextmanager
    async def use_async(self, name: str) -> AsyncIterator[M]:
        """As `use`, without blocking the event loop or a thread of its executor."""
        entry, is_first = self._ask(name)
        try:
            if is_first:
                self._loading.submit(self._load, name, entry)
            yield await arrived(entry.loaded)
        finally:
            leaving = self._leave(name, entry)
            if leaving:
                loop = asyncio.get_running_loop()
                await asyncio.shield(loop.run_in_executor(self._unloading, self._close, leaving))

    def held(self) -> list[Held]:
        """The loaded models, the least recently used first."""
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
            leaving = self._drop([name])
        self._close(leaving)
        return True

    def expire(self) -> float | None:
        """Unload what was unused for the keep-alive time; seconds until the next will be, None if none is idle."""
        with self._changed:
            leaving, seconds = self._expired()
        self._close(leaving)
        return seconds

    def close(self) -> None:
        """Take no more requests and unload: what is in use goes with its last user. Idempotent."""
        with self._changed:
            self._closed = True
            leaving = self._drop([name for name, entry in self._entries.items() if entry.idle])
            self._changed.notify_all()
        self._close(leaving)
        if self._keeper is not None:
            self._keeper.join()

    def _ask(self, name: str) -> tuple[_Entry[M], bool]:
        """The model's entry, which its caller uses from now on, and whether they have to load it. Never waits."""
        with self._changed:
            self._refuse_closed()
            entry = self._entries.get(name)
            is_first = entry is None
            if entry is None:
                entry = self._entries[name] = _Entry[M](users=1)
            entry.users += 1
            return entry, is_first

    def _leave(self, name: str, entry: _Entry[M]) -> list[_Entry[M]]:
        """One user less; what is to be closed for that."""
        with self._changed:
            entry.users -= 1
            entry.used_at = self._clock()
            self._changed.notify_all()
            return self._drop([name] if entry.idle and (self._closed or self._keep_alive_s == 0) else [])

    def _load(self, name: str, entry: _Entry[M]) -> M:
        """One load at a time, so that what it allocates can be told; `entry` is in the table and says so to others."""
        try:
            with self._loads:
                candidate = self._find(name)
                self._make_room(name, entry, candidate)
                before = self._memory.allocated()
                model = candidate.load()
                allocated = self._memory.allocated() - before
        except BaseException as error:
            with self._changed:
                del self._entries[name]
            failure = error if isinstance(error, Exception) else EngineError(f"Loading {name} was interrupted.")
            entry.loaded.set_exception(failure)
            raise
        with self._changed:
            entry.allocated = min(max(0, allocated), entry.need)
            entry.model = model
            self._start_keeper()
        leaving = self._leave(name, entry)
        entry.loaded.set_result(model)
        self._close(leaving)
        return model

    def _make_room(self, name: str, entry: _Entry[M], candidate: PoolCandidate[M]) -> None:
        """Unload the least recently used until the candidate fits; if it cannot, nothing is unloaded."""
        fits = False
        while not fits:
            with self._changed:
                self._changed.wait_for(lambda: not self._closing)
                self._refuse_closed()
                lacking = candidate.need - self._room()
                leaving = self._drop(self._enough(lacking))
                fits = not leaving
                if fits and lacking > 0:
                    self._refuse(name, candidate)
                entry.need = candidate.need if fits else 0
            self._close(leaving)

    def _enough(self, lacking: int) -> list[str]:
        """The least recently used that together take so many bytes; none if all would not be enough."""
        names: list[str] = []
        for _, name in sorted((entry.used_at, name) for name, entry in self._entries.items() if entry.idle):
            if lacking <= 0:
                break
            names.append(name)
            lacking -= self._entries[name].need
        return names if lacking <= 0 else []

    def _refuse(self, name: str, candidate: PoolCandidate[M]) -> None:
        """Raises OverloadedError if models in use are in the way, else what the candidate says."""
        freed = sum(entry.need for entry in self._entries.values() if entry.idle)
        busy = sorted(other for other, entry in self._entries.items() if other != name and not entry.idle)
        if busy:
            raise OverloadedError(
                f"{name} needs {candidate.need / 1e6:,.1f} MB of memory, {max(0, self._room() + freed) / 1e6:,.1f} MB "
                f"can be freed now, and {', '.join(busy)} {'is' if len(busy) == 1 else 'are'} in use: try again later.",
                code="memory_in_use",
            )
        candidate.check(self._room() + freed)

    def _room(self) -> int:
        """Bytes that loads may take: the system counts mapped weights, and caches nobody wrote to yet, as free."""
        return self._memory.room() - sum(entry.need - entry.allocated for entry in self._entries.values())

    def _drop(self, names: list[str]) -> list[_Entry[M]]:
        """Take these out of the table; they are to be closed once the lock is free."""
        leaving = [self._entries.pop(name) for name in names]
        self._closing += leaving
        return leaving

    def _close(self, leaving: list[_Entry[M]]) -> None:
        """Without the lock: a model waits for its running step, and frees gigabytes."""
        with ExitStack() as each:
            for entry in leaving:
                each.callback(self._close_one, entry)

    def _close_one(self, entry: _Entry[M]) -> None:
        assert entry.model is not None
        try:
            entry.model.close()
        finally:
            with self._changed:
                self._closing.remove(entry)
                self._changed.notify_all()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError("The model pool is closed.")

    def _start_keeper(self) -> None:
        if self._keeper is None and self._keep_alive_s and not self._closed:
            self._keeper = threading.Thread(target=self._keep, name="updraft-keep-alive", daemon=True)
            self._keeper.start()

    def _keep(self) -> None:
        """The thread that unloads what was not used for long."""
        while not self._closed:
            with self._changed:
                leaving, seconds = self._expired()
                if not leaving and not self._closed:
                    self._changed.wait(seconds)
            self._close(leaving)

    def _expired(self) -> tuple[list[_Entry[M]], float | None]:
        """The models to be closed by now, and the seconds until more will be."""
        if self._keep_alive_s is None:
            return [], None
        now = self._clock()
        left = {name: entry.used_at + self._keep_alive_s - now for name, entry in self._entries.items() if entry.idle}
        leaving = self._drop([name for name, seconds in left.items() if seconds <= 0])
        return leaving, min((seconds for seconds in left.values() if seconds > 0), default=None)
