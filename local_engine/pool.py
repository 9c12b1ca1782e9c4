"""Pool of models: loaded on first use, kept for a while, and unloaded when another model needs the memory.

The pool does not depend on llama.cpp: its callers supply the candidates and the memory readings.
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
    """A model that could be loaded. `need`: bytes of memory that the model will take, mapped files included."""

    @property
    def need(self) -> int: ...
    def check(self, room: int) -> None:
        """Raises ModelTooLargeError if the model does not fit in `room` bytes."""
        ...

    def load(self) -> M_co: ...


class Memory(Protocol):
    """Memory readings. `room`: bytes now available for loads, as the system reports them; `allocated`: bytes of this
    process other than mapped file pages."""

    def room(self) -> int: ...
    def allocated(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Held:
    """A loaded model. `users`: current users; `idle_s`: seconds since the last user left."""

    name: str
    need: int
    users: int
    idle_s: float


@dataclass(slots=True, eq=False)
class _Entry(Generic[M]):
    """A model that is loaded, or still loading (`model` is None)."""

    # Callers using or waiting for the model, plus the loader.
    users: int = 0
    need: int = 0
    # Bytes that the load allocated, as measured.
    allocated: int = 0
    used_at: float = 0.0
    model: M | None = None
    # Result of the load: the model or an error.
    loaded: Future[M] = field(default_factory=Future[M])

    @property
    def idle(self) -> bool:
        return self.model is not None and self.users == 0


class ModelPool(Generic[M]):
    """Models by name. Thread-safe: `use` for threads, `use_async` for event loops. A model in use is never unloaded."""

    def __init__(
        self,
        find: Callable[[str], PoolCandidate[M]],
        memory: Memory,
        *,
        keep_alive_s: float | None = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`find` raises an error for an unusable name. `keep_alive_s`: seconds that an unused model stays loaded; None:
        until its memory is needed."""
        self._find = find
        self._memory = memory
        self._keep_alive_s = keep_alive_s
        self._clock = clock
        self._changed = threading.Condition()  # guards the fields below; models are loaded and closed outside the lock
        self._entries: dict[str, _Entry[M]] = {}
        self._closing: list[_Entry[M]] = []  # removed from the table, but still in memory
        self._loads = threading.Lock()
        # For `use_async`. Separate executors, because a load waits for pending unloads.
        self._loading = ThreadPoolExecutor(1, "updraft-load")
        self._unloading = ThreadPoolExecutor(1, "updraft-unload")
        self._keeper: threading.Thread | None = None
        self._closed = False

    @contextmanager
    def use(self, name: str) -> Iterator[M]:
        """Yield the model, loading it if necessary. The model stays loaded at least until the block ends.

        Concurrent callers share one load. Raises the errors of `find` and `load`, ModelTooLargeError if the model
        cannot fit, OverloadedError if it does not fit beside the models in use, EngineError after `close`.
        """
        entry, is_first = self._ask(name)
        try:
            yield self._load(name, entry) if is_first else entry.loaded.result()
        finally:
            self._close(self._leave(name, entry))

    @asynccontextmanager
    async def use_async(self, name: str) -> AsyncIterator[M]:
        """Do the same as `use` without blocking the event loop or a thread of its executor."""
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
        """Return the loaded models, least recently used first."""
        with self._changed:
            now = self._clock()
            there = [(name, entry) for name, entry in self._entries.items() if entry.model is not None]
            there.sort(key=lambda item: item[1].used_at)
            return [
                Held(name, entry.need, entry.users, 0.0 if entry.users else now - entry.used_at)
                for name, entry in there
            ]

    def unload(self, name: str) -> bool:
        """Free an unused model now; False if it is not loaded. Raises OverloadedError if the model is in use."""
        with self._changed:
            entry = self._entries.get(name)
            if entry is None:
                return False
            if not entry.idle:
                raise OverloadedError(f"The model {name} is in use: unload it after its last request is done.")
            leaving = self._drop([name])
        self._close(leaving)
        return True

    def expire(self) -> float | None:
        """Unload expired models; return the seconds until the next one expires, None if no model is idle."""
        with self._changed:
            leaving, seconds = self._expired()
        self._close(leaving)
        return seconds

    def close(self) -> None:
        """Reject new requests and unload all idle models; models in use unload after their last user. Idempotent."""
        with self._changed:
            self._closed = True
            leaving = self._drop([name for name, entry in self._entries.items() if entry.idle])
            self._changed.notify_all()
        self._close(leaving)
        if self._keeper is not None:
            self._keeper.join()

    def _ask(self, name: str) -> tuple[_Entry[M], bool]:
        """Return the model's entry, counting the caller as a user, and whether the caller must load it. Never waits."""
        with self._changed:
            self._refuse_closed()
            entry = self._entries.get(name)
            is_first = entry is None
            if entry is None:
                entry = self._entries[name] = _Entry[M](users=1)
            entry.users += 1
            return entry, is_first

    def _leave(self, name: str, entry: _Entry[M]) -> list[_Entry[M]]:
        """Remove one user; return the entries to close as a result."""
        with self._changed:
            entry.users -= 1
            entry.used_at = self._clock()
            self._changed.notify_all()
            return self._drop([name] if entry.idle and (self._closed or self._keep_alive_s == 0) else [])

    def _load(self, name: str, entry: _Entry[M]) -> M:
        """Load the model. Loads run one at a time, so that each allocation can be measured."""
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
        """Unload the least recently used models until the candidate fits; unload nothing if it cannot fit."""
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
        """Return the least recently used idle models that together free `lacking` bytes; empty if all are too few."""
        names: list[str] = []
        for _, name in sorted((entry.used_at, name) for name, entry in self._entries.items() if entry.idle):
            if lacking <= 0:
                break
            names.append(name)
            lacking -= self._entries[name].need
        return names if lacking <= 0 else []

    def _refuse(self, name: str, candidate: PoolCandidate[M]) -> None:
        """Raises OverloadedError if models in use take the memory, otherwise the candidate's error."""
        freed = sum(entry.need for entry in self._entries.values() if entry.idle)
        busy = sorted(other for other, entry in self._entries.items() if other != name and not entry.idle)
        if busy:
            raise OverloadedError(
                f"{name} needs {candidate.need / 1e6:,.1f} MB of memory; {max(0, self._room() + freed) / 1e6:,.1f} MB "
                f"can be freed now. {', '.join(busy)} {'is' if len(busy) == 1 else 'are'} in use: try again later.",
                code="memory_in_use",
            )
        candidate.check(self._room() + freed)

    def _room(self) -> int:
        """Return the free bytes. The system counts mapped weights and untouched caches as free, so subtract them."""
        return self._memory.room() - sum(entry.need - entry.allocated for entry in self._entries.values())

    def _drop(self, names: list[str]) -> list[_Entry[M]]:
        """Remove these models from the table; the caller closes them after releasing the lock."""
        leaving = [self._entries.pop(name) for name in names]
        self._closing += leaving
        return leaving

    def _close(self, leaving: list[_Entry[M]]) -> None:
        """Close these models. Call without the lock: closing waits for the running step and frees gigabytes."""
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
        """Unload expired models until the pool closes."""
        while not self._closed:
            with self._changed:
                leaving, seconds = self._expired()
                if not leaving and not self._closed:
                    self._changed.wait(seconds)
            self._close(leaving)

    def _expired(self) -> tuple[list[_Entry[M]], float | None]:
        """Drop the expired models; return them and the seconds until the next one expires."""
        if self._keep_alive_s is None:
            return [], None
        now = self._clock()
        left = {name: entry.used_at + self._keep_alive_s - now for name, entry in self._entries.items() if entry.idle}
        leaving = self._drop([name for name, seconds in left.items() if seconds <= 0])
        return leaving, min((seconds for seconds in left.values() if seconds > 0), default=None)
