"""One router for all clients of a process with equal settings, so that a model is loaded once."""

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
class _SharedRuntime:
    """A runtime with the number of its clients."""

    runtime: Runtime
    users: int = 0


class RuntimePool:
    """Reference-counted runtimes, one per distinct config. A child of `os.fork()` starts with an empty pool."""

    def __init__(self, make_router: Callable[[RouterConfig], Router] = Router) -> None:
        self._make_router = make_router
        self._forget()

    def acquire(self, config: RouterConfig) -> Runtime:
        """Return the runtime for `config`, created if needed. Release the runtime with `give_back`."""
        if self._pid != os.getpid():  # after a fork: a thread of the parent may hold the lock
            self._forget()
        with self._lock:
            shared = next((each for each in self._shared if each.runtime.config == config), None)
            if shared is None:
                shared = _SharedRuntime(Runtime(config, self._make_router))
                self._shared.append(shared)
            shared.users += 1
            return shared.runtime

    def give_back(self, runtime: Runtime) -> None:
        """Release a runtime; the last release closes it. Does nothing for a runtime of the parent process."""
        if self._pid != os.getpid():
            return
        with self._lock:
            shared = next((each for each in self._shared if each.runtime is runtime), None)
            if shared is None:
                return
            shared.users -= 1
            if shared.users:
                return
            self._shared.remove(shared)
        runtime.close()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # reentrant, as garbage collection may close a client in a locked section
        self._shared: list[_SharedRuntime] = []


_POOL = RuntimePool()  # one pool per process, so that unrelated clients share one router


class RuntimeLease:
    """A client's share of a runtime. Closing it ends only the requests of this client.

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
        """Return the body of an answer as a stream, which the caller reads and releases."""
        stream = LeasedStream(self, self._current(), chunks)
        self._streams.add(stream)
        return stream

    def forget(self, stream: LeasedStream) -> None:
        self._streams.discard(stream)

    def close(self) -> None:
        """End this client's requests. Idempotent. Closing the last lease of a runtime closes the runtime."""
        self._closed = True
        runtime, self._runtime = self._runtime, None
        if runtime is None or runtime.is_inherited:
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
        if self._runtime is None or self._runtime.is_inherited:
            self._runtime = self._pool.acquire(self.config)
        return self._runtime


class LeasedStream:
    """A streamed body. It belongs to the runtime that began the stream, even if a fork opens another runtime."""

    def __init__(self, lease: RuntimeLease, runtime: Runtime, chunks: AsyncIterator[bytes]) -> None:
        self._lease, self._runtime, self._body = lease, runtime, ReadAhead(chunks)

    def take(self) -> Future[tuple[bytes, bool]]:
        self._lease.check_open()
        return self._runtime.take(self._body)

    def end(self) -> None:
        """Forget the stream, which was read to its end and needs no release."""
        self._lease.forget(self)

    def release(self) -> Future[None] | None:
        """Begin to stop the stream. Return None if the runtime and its streams are already gone."""
        self._lease.forget(self)
        try:
            return self._runtime.release(self._body)
        except OverloadedError:
            return None
