"""One router for all clients of a process that have equal settings: a second client loads no second model."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass

from ..protocol.errors import OverloadedError
from ..protocol.http.wire import WireRequest, WireResponse
from ..router.config import RouterConfig
from ..router.router import Router
from .read_ahead import ReadAhead
from .runtime import Runtime


@dataclass(slots=True, eq=False)
class _Shared:
    """A runtime, and how many clients use it."""

    runtime: Runtime
    users: int = 0


class RuntimePool:
    """Runtimes by their settings, counted by users. A child of `os.fork()` finds it empty: it opens its own."""

    def __init__(self, make_router: Callable[[RouterConfig], Router] = Router) -> None:
        self._make_router = make_router
        self._forget()

    def acquire(self, config: RouterConfig) -> Runtime:
        """The runtime of these settings, made where there is none. `give_back` it."""
        if self._pid != os.getpid():  # a thread that is not in this child may have had the lock
            self._forget()
        with self._lock:
            found = next((each for each in self._shared if each.runtime.config == config), None)
            if found is None:
                found = _Shared(Runtime(config, self._make_router))
                self._shared.append(found)
            found.users += 1
            return found.runtime

    def give_back(self, runtime: Runtime) -> None:
        """One user less; the last one closes it. Nothing for one of the parent process."""
        if self._pid != os.getpid():
            return
        with self._lock:
            found = next((each for each in self._shared if each.runtime is runtime), None)
            if found is None:
                return
            found.users -= 1
            if found.users:
                return
            self._shared.remove(found)
        runtime.close()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # garbage collection may close a client while this thread holds it
        self._shared: list[_Shared] = []


_POOL = RuntimePool()  # the process's: clients that know nothing of each other are to find one router


class RuntimeLease:
    """A client's part of a runtime. Closing it ends what this client began, and nothing of others.

    `handle` and the streams raise OverloadedError after `close()`.
    """

    def __init__(self, config: RouterConfig, pool: RuntimePool = _POOL) -> None:
        self.config = config
        self._pool = pool
        self._runtime: Runtime | None = None
        self._closed = False
        self._answers = set[Future[WireResponse]]()
        self._streams = set[LeasedStream]()

    def handle(self, request: WireRequest) -> Future[WireResponse]:
        answer = self._current().handle(request)
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)
        return answer

    def stream(self, chunks: AsyncIterator[bytes]) -> LeasedStream:
        """The body of an answer, to be read and released."""
        stream = LeasedStream(self, self._current(), chunks)
        self._streams.add(stream)
        return stream

    def forget(self, stream: LeasedStream) -> None:
        self._streams.discard(stream)

    def close(self) -> None:
        """Idempotent. The last lease of a runtime closes that too."""
        self._closed = True
        runtime, self._runtime = self._runtime, None
        if runtime is None or runtime.is_of_the_parent:
            return
        for answer in self._answers.copy():
            answer.cancel()
        for stream in self._streams.copy():
            stream.release()
        self._pool.give_back(runtime)

    def check_open(self) -> None:
        if self._closed:
            raise OverloadedError("This client is closed.")

    def _current(self) -> Runtime:
        self.check_open()
        if self._runtime is None or self._runtime.is_of_the_parent:
            self._runtime = self._pool.acquire(self.config)
        return self._runtime


class LeasedStream:
    """A streamed body. It stays with the runtime that began it, also where a fork gets another one."""

    def __init__(self, lease: RuntimeLease, runtime: Runtime, chunks: AsyncIterator[bytes]) -> None:
        self._lease, self._runtime, self._body = lease, runtime, ReadAhead(chunks)

    def take(self) -> Future[tuple[bytes, bool]]:
        """As `Runtime.take`."""
        self._lease.check_open()
        return self._runtime.take(self._body)

    def end(self) -> None:
        """It was read to its end: nothing is left to release."""
        self._lease.forget(self)

    def release(self) -> Future[None] | None:
        """Begin to stop the stream; None if its runtime is gone, and every stream with it."""
        self._lease.forget(self)
        try:
            return self._runtime.release(self._body)
        except OverloadedError:
            return None
