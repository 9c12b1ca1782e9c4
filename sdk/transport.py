"""The router as an httpx transport, for the httpx module that the installed `openai` uses.

openai 3 uses httpx2, older releases httpx. Both modules have the same interface, so the adapters take the module as an
argument; only base classes and exception types come from it.
"""

from __future__ import annotations

import asyncio
import importlib
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any, TypeVar

import anyio

from ..protocol.errors import CloudUnreachableError, RequestTimeoutError, UpdraftError
from ..protocol.http.lenient_json import json_of, object_of
from ..protocol.http.wire import WireRequest, WireResponse
from ..protocol.telemetry.tracing import callers_headers
from ..router.responses.completion import failure
from .caller_keys import CallerKeys
from .runtime import wait
from .runtime_pool import RuntimeLease

T = TypeVar("T")

IDENTIFYING = CallerKeys()
RETRIES = "updraft_retries"  # httpx request extension with the number of retries left to the router
GRACE_S = 1.0  # seconds to wait beyond the deadline, so that the router can report the timeout first


def httpx_of_openai() -> Any:
    """Return the module that `openai.DefaultHttpxClient` uses: `httpx2` or `httpx`."""
    import openai

    for base in openai.DefaultHttpxClient.__mro__:
        name = base.__module__.partition(".")[0]
        if name in ("httpx", "httpx2"):
            return importlib.import_module(name)
    raise ImportError(
        f"openai {openai.__version__} is built on an unknown HTTP library; updraft supports httpx and httpx2."
    )


def sync_transport(httpx: Any, lease: RuntimeLease, keys: CallerKeys = IDENTIFYING) -> Any:
    """Return an `httpx.BaseTransport` that sends requests to the router. Closing or deleting it ends the lease."""
    bridge = _Bridge(httpx, keys)

    class Body(httpx.SyncByteStream):
        def __init__(self, chunks: AsyncIterator[bytes], request: Any) -> None:
            self._stream, self._request = lease.stream(chunks), request
            self._forget = weakref.finalize(self, self._stream.release)  # also stops a stream that is dropped unclosed

        def __iter__(self) -> Iterator[bytes]:
            ended = False
            while not ended:
                chunks, ended = bridge.call(self._stream.take, self._request)
                if ended and self._forget.detach() is not None:
                    self._stream.end()  # before the last chunk, because the caller may close the stream after it
                yield chunks

        def close(self) -> None:
            if self._forget.detach() is not None and (released := self._stream.release()) is not None:
                released.result()

    class Transport(httpx.BaseTransport):
        def handle_request(self, request: Any) -> Any:
            wire = bridge.wire(request, request.read())
            if isinstance(wire, WireResponse):
                return bridge.response(wire, request, Body)
            response = bridge.call(lambda: lease.handle(wire), request, GRACE_S)
            return bridge.response(response, request, Body)

        def close(self) -> None:
            lease.close()

    return _owning(Transport(), lease)


def async_transport(httpx: Any, lease: RuntimeLease, keys: CallerKeys = IDENTIFYING) -> Any:
    """Return an `httpx.AsyncBaseTransport`, usable from any event loop; see `sync_transport`."""
    bridge = _Bridge(httpx, keys)

    class Body(httpx.AsyncByteStream):
        def __init__(self, chunks: AsyncIterator[bytes], request: Any) -> None:
            self._stream, self._request = lease.stream(chunks), request
            self._forget = weakref.finalize(self, self._stream.release)  # also stops a stream that is dropped unclosed

        async def __aiter__(self) -> AsyncIterator[bytes]:
            ended = False
            while not ended:
                chunks, ended = await bridge.acall(self._stream.take, self._request)
                if ended and self._forget.detach() is not None:
                    self._stream.end()  # before the last chunk, because the caller may close the stream after it
                yield chunks

        async def aclose(self) -> None:
            if self._forget.detach() is not None and (released := self._stream.release()) is not None:
                await _finished(released)

    class Transport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: Any) -> Any:
            wire = bridge.wire(request, await request.aread())
            if isinstance(wire, WireResponse):
                return bridge.response(wire, request, Body)
            response = await bridge.acall(lambda: lease.handle(wire), request, GRACE_S)
            return bridge.response(response, request, Body)

        async def aclose(self) -> None:
            await anyio.to_thread.run_sync(lease.close)

    return _owning(Transport(), lease)


def _owning(transport: Any, lease: RuntimeLease) -> Any:
    weakref.finalize(transport, lease.close)
    return transport


class _Bridge:
    """Conversion of requests, responses, timeouts and errors for both transports."""

    def __init__(self, httpx: Any, keys: CallerKeys) -> None:
        self._httpx = httpx
        self._keys = keys

    def wire(self, request: Any, body: bytes) -> WireRequest | WireResponse:
        """Return the request for the router, or an error response if the request's key or URL is refused."""
        headers = {name.lower(): value for name, value in request.headers.items()} | dict(callers_headers())
        authorizations: list[str] = request.headers.get_list("authorization")
        if authorizations:
            headers["authorization"] = authorizations[-1]
        try:
            self._keys.check_url(request.url)
            key = self._keys.named_in(headers, authorizations)
        except UpdraftError as error:
            return failure(error)
        if key is not None:
            headers["authorization"] = f"Bearer {key}"  # the router tells callers apart by this header
        query, path = request.url.query.decode(), request.url.path
        made = WireRequest(request.method, path, headers, body, _timeout_s(request), query, cloud_key=key)
        return replace(made, retries=request.extensions.get(RETRIES, made.retries))

    def call(self, begin: Callable[[], Future[T]], request: Any, grace_s: float = 0.0) -> T:
        try:
            return wait(begin(), _extended(_timeout_s(request), grace_s))
        except Exception as error:
            raise self._translated(error, request) from error

    async def acall(self, begin: Callable[[], Future[T]], request: Any, grace_s: float = 0.0) -> T:
        try:
            with anyio.fail_after(_extended(_timeout_s(request), grace_s)):
                return await _finished(begin())
        except Exception as error:
            raise self._translated(error, request) from error

    def response(self, answer: WireResponse, request: Any, body: Callable[[AsyncIterator[bytes], Any], Any]) -> Any:
        headers: Mapping[str, str] = answer.headers
        if not isinstance(answer.body, bytes):
            return self._httpx.Response(answer.status, headers=headers, stream=body(answer.body, request))
        error = object_of(object_of(json_of(answer.body)).get("error")) if answer.status in (502, 504) else {}
        timed_out = error.get("code") == RequestTimeoutError.default_code
        if timed_out and headers.get("x-should-retry") == "true":  # the device has done no work, so openai may retry
            raise self._httpx.ReadTimeout(str(error["message"]), request=request)
        if timed_out or error.get("code") == CloudUnreachableError.default_code:
            raise self._failure(str(error["message"]), request, timeout=timed_out)
        # Return bytes as a stream too, because openai's with_streaming_response expects an open response.
        return self._httpx.Response(answer.status, headers=headers, stream=self._httpx.ByteStream(answer.body))

    def _translated(self, error: Exception, request: Any) -> Exception:
        if isinstance(error, TimeoutError):
            return self._failure("The router did not answer within the client's timeout.", request, timeout=True)
        if isinstance(error, (CancelledError, UpdraftError)):
            return self._failure(str(error) or "The client was closed.", request)
        return error

    def _failure(self, message: str, request: Any, *, timeout: bool = False) -> Exception:
        """Return an error that openai's client passes on without a retry, which would repeat local work.

        openai releases that use httpx only know httpx's exceptions, so they may retry.
        """
        if self._httpx.__name__ != "httpx2":
            return (self._httpx.ReadTimeout if timeout else self._httpx.ConnectError)(message, request=request)
        import openai

        if timeout:
            return openai.APITimeoutError(request=request)
        return openai.APIConnectionError(message=message, request=request)


def _timeout_s(request: Any) -> float | None:
    """Return httpx's read timeout. It limits the wait for the start of the answer, and the pause between two chunks."""
    return request.extensions.get("timeout", {}).get("read")


def _extended(timeout_s: float | None, grace_s: float) -> float | None:
    return None if timeout_s is None else timeout_s + grace_s


async def _finished(future: Future[T]) -> T:
    """Wait for a future of the router, under asyncio or trio. If waiting ends early, cancel the future."""
    done = anyio.Event()
    try:
        notify: Callable[..., object] = asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        notify = importlib.import_module("trio").lowlevel.current_trio_token().run_sync_soon
    future.add_done_callback(lambda _: notify(done.set))
    try:
        await done.wait()
        return future.result()
    finally:
        future.cancel()
