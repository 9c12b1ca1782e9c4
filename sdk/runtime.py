"""Runs the router of a client on an event loop in its own thread, for sync and async callers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ..protocol.errors import OverloadedError
from ..protocol.http.wire import WireRequest, WireResponse
from ..router.config import RouterConfig
from ..router.router import InterpreterExitError, Router
from ..router.server.endpoints import Endpoints
from .read_ahead import ReadAhead

T = TypeVar("T")

CLOSE_TIMEOUT_S = 30.0


class Runtime:
    """Owner of the event loop, the thread and the router, which start with the first request.

    Callers cancel the futures of `handle` and `take` to stop the work. `handle`, `take` and `release` raise
    OverloadedError after `close()`, and in a child of `os.fork()` if the parent had started the thread.
    """

    def __init__(self, config: RouterConfig, make_router: Callable[[RouterConfig], Router]) -> None:
        self.config = config
        self._make_router = make_router
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._endpoints: Endpoints | None = None
        self._closed = False
        self._pid: int | None = None  # id of the process that started the router

    def handle(self, request: WireRequest) -> Future[WireResponse]:
        return self._submit(self._started().handle(request))

    def take(self, body: ReadAhead) -> Future[tuple[bytes, bool]]:
        """Return the ready bytes of a streamed body, and whether it has ended."""
        return self._submit(body.take())

    def release(self, body: ReadAhead) -> Future[None]:
        """Stop and close a streamed body."""
        return self._submit(body.aclose())

    def close(self) -> None:
        """Cancel requests in flight, close the router (engine, sockets, ledger) and end the thread. Idempotent. Does
        nothing in a fork of the process that started the router: the parent owns the sockets and files.
        """
        if self.is_inherited:
            return
        with self._lock:
            self._closed = True
            loop, thread, endpoints = self._loop, self._thread, self._endpoints
            self._loop = self._thread = self._endpoints = None
        if loop is None or thread is None or endpoints is None:
            return
        end = asyncio.run_coroutine_threadsafe(_shut_down(endpoints), loop)
        end.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
        if thread is not threading.current_thread():  # a finalizer may run on the loop's thread itself
            end.result(CLOSE_TIMEOUT_S)
            thread.join(CLOSE_TIMEOUT_S)

    def _started(self) -> Endpoints:
        self._check_process()
        with self._lock:
            if self._closed:
                raise OverloadedError("This client is closed.")
            if self._endpoints is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_run, args=(loop,), name="updraft-router", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # threads cannot start in an atexit handler
                    loop.close()
                    raise InterpreterExitError from error
                self._loop, self._thread = loop, thread
                self._endpoints = Endpoints(self._make_router(self.config))
                self._pid = os.getpid()
            return self._endpoints

    @property
    def is_inherited(self) -> bool:
        """Return whether this process is a fork of the process that started the router."""
        return self._pid not in (None, os.getpid())

    def _check_process(self) -> None:
        """Raise OverloadedError after a fork. Call this before taking the lock, which the fork may have left locked."""
        if self.is_inherited:
            raise OverloadedError(
                "This answer began before os.fork() and stayed with the parent process. Ask again in the child.",
                code="forked",
            )

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        loop = None if self.is_inherited else self._loop
        if loop is None:
            work.close()
            self._check_process()
            raise OverloadedError("This client is closed.")
        return asyncio.run_coroutine_threadsafe(work, loop)


def wait(future: Future[T], timeout_s: float | None) -> T:
    """Return the future's result. If waiting ends early, cancel the work. Raises TimeoutError or CancelledError."""
    try:
        return future.result(timeout_s)
    except BaseException:  # timeout or interrupt: nobody will read the result
        future.cancel()
        raise


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _shut_down(endpoints: Endpoints) -> None:
    await endpoints.router.end_learning()  # a shadow whose connection is cancelled would look like a failed device
    pending = asyncio.all_tasks() - {asyncio.current_task()}
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    await endpoints.close()
