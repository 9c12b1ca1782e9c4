"""The cloud tier over HTTP: any OpenAI-compatible endpoint, with every way it can fail turned into a CloudFailure."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from ...protocol.errors import (
    AuthenticationError,
    InvalidRequestError,
    OverloadedError,
    RateLimitError,
    RequestTimeoutError,
    UpdraftError,
    UpstreamError,
)
from ...protocol.http import sse
from ..request.json_narrowing import parsed, table, tables
from .continuation_check import Continuation, ContinuationVerdict
from .interfaces import CloudFailure

log = logging.getLogger("updraft.router")

_LAST_BYTES_S = 0.2  # that a server may take to end its response after the end mark
MAX_BODY_BYTES = 32 * 2**20  # a completion is kilobytes; more than this is not an answer


@dataclass(frozen=True, slots=True)
class CloudEndpoint:
    """Where a cloud is, and how long an answer may take."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    # Whether it continues an assistant's last message (`continue_final_message`).
    continues: bool = False
    # Seconds without a byte before a request fails.
    timeout_s: float = 60.0
    # Seconds until a connection must stand.
    connect_timeout_s: float = 2.0


class HttpCloudTier:
    """`CloudTier` over one pooled HTTP client. Opens no socket before the first request."""

    def __init__(self, endpoint: CloudEndpoint) -> None:
        key = endpoint.api_key
        self._url = endpoint.url
        self.takes_prediction = True
        self.continues = endpoint.continues
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(endpoint.timeout_s, connect=endpoint.connect_timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            verify=self._url.startswith("https:"),  # plain http needs no TLS context, which takes 0.1 s to make
            follow_redirects=False,  # a redirect would carry the prompt to a host that nobody configured
        )
        self._idle_timeout_s = endpoint.timeout_s

    async def complete(self, path: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        return _completion(await self._whole(path, body, timeout_s))

    async def embed(self, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        answer = _table(await self._whole("embeddings", body, timeout_s))
        if not tables(answer.get("data")):
            raise _nonsense("its answer holds no embeddings")
        return answer

    async def _whole(self, path: str, body: dict[str, Any], timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._post(path, body)
                try:
                    return await _read(response)
                finally:
                    await response.aclose()
        except TimeoutError as error:
            raise _timed_out(timeout_s) from error
        except httpx.HTTPError as error:
            raise _unreachable(error) from error

    async def open(
        self, path: str, body: dict[str, Any], *, timeout_s: float, begun: str | None = None
    ) -> HttpCloudStream:
        try:
            async with asyncio.timeout(timeout_s):
                stream = HttpCloudStream(await self._post(path, body), self._idle_timeout_s)
                try:
                    await stream.wait_for_content()
                    if begun is not None:
                        self._check(await stream.go_on(begun))
                except BaseException:
                    await stream.aclose()
                    raise
        except TimeoutError as error:
            raise _timed_out(timeout_s) from error
        except httpx.HTTPError as error:
            raise _unreachable(error) from error
        return stream

    async def aclose(self) -> None:
        await self._client.aclose()

    def _check(self, verdict: ContinuationVerdict) -> None:
        if verdict == "continues":
            return
        self.continues = False
        log.warning(
            "%s begins answers anew that it is to go on with: no stream is handed to it from here on", self._url
        )
        if verdict == "differs":
            raise _nonsense("it began the answer anew instead of going on with it")

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """An open response with status 200. A server that seems to refuse `prediction` is asked again without; if that
        helps, it is not offered one again.
        """
        if not self.takes_prediction:
            body = {name: value for name, value in body.items() if name != "prediction"}
        request = self._client.build_request(
            "POST",
            f"{self._url}/{path}",
            content=msgspec.json.encode(body),
            headers={"content-type": "application/json"},
        )
        response = await self._client.send(request, stream=True)
        if response.status_code == 200:
            return response
        try:
            raw = await _read(response)
        finally:
            await response.aclose()
        if response.status_code in (400, 422) and "prediction" in body and b"prediction" in raw:
            bare = {name: value for name, value in body.items() if name != "prediction"}
            answered = await self._post(path, bare)  # else it is not the draft that is refused: a server may quote us
            self.takes_prediction = False
            log.warning("%s refuses the prediction field: no drafts for it from here on", self._url)
            return answered
        raise _refused(response, raw)


class HttpCloudStream:
    """`CloudStream` over one open response."""

    def __init__(self, response: httpx.Response, idle_timeout_s: float) -> None:
        self._response = response
        self._idle_timeout_s = idle_timeout_s
        self._chunks: AsyncIterator[bytes] = response.aiter_bytes()
        self._parser = sse.EventParser()
        self._ready: deque[tuple[bytes, dict[str, Any]]] = deque()
        self._finished = False  # a finish_reason was seen: what follows may only be usage

    async def wait_for_content(self) -> None:
        """Read until something of the answer has arrived: up to here, a failure can still become a local answer."""
        if "text/event-stream" not in self._response.headers.get("content-type", ""):
            raise _nonsense("it answered a streamed request with something other than an event stream")
        held: deque[tuple[bytes, dict[str, Any]]] = deque()
        async for event in self:
            held.append(event)
            if _has_content(event[1]):
                break
        else:
            raise _nonsense("its stream ended before any content")
        held.extend(self._ready)
        self._ready = held

    async def go_on(self, begun: str) -> ContinuationVerdict:
        """Read until it is known whether this goes on with `begun`; what it repeats of that is left out."""
        continuation = Continuation(begun)
        verdict: ContinuationVerdict = "unknown"
        async for event in self:
            if (verdict := continuation.take(event)) != "unknown":
                break
        self._ready = continuation.events + self._ready
        return verdict

    def __aiter__(self) -> HttpCloudStream:
        return self

    async def __anext__(self) -> tuple[bytes, dict[str, Any]]:
        while not self._ready:
            if self._parser.done:
                raise StopAsyncIteration
            try:
                async with asyncio.timeout(self._idle_timeout_s):
                    chunk = await anext(self._chunks, None)
            except TimeoutError as error:
                raise _timed_out(self._idle_timeout_s) from error
            except httpx.HTTPError as error:
                raise _cut(str(error) or type(error).__name__) from error
            if chunk is None:
                if self._finished:
                    raise StopAsyncIteration
                raise _cut("no finish reason came")
            try:
                payloads = self._parser.feed(chunk)
            except sse.EventTooLongError as error:
                raise _nonsense("its stream holds an event without an end") from error
            self._ready.extend(self._decode(payload) for payload in payloads)
        return self._ready.popleft()

    async def aclose(self) -> None:
        """After its end mark a stream is read to its end, so that its connection is used again and nothing is left."""
        if self._parser.done:
            with suppress(TimeoutError, httpx.HTTPError):
                async with asyncio.timeout(_LAST_BYTES_S):
                    while await anext(self._chunks, None) is not None:
                        pass
        await self._response.aclose()

    def _decode(self, payload: bytes) -> tuple[bytes, dict[str, Any]]:
        try:
            event = table(parsed(payload))
        except ValueError as error:
            raise _nonsense("its stream holds an event that is not JSON") from error
        if event is not None and event.get("error"):
            reported = table(event["error"]) or {"message": event["error"]}
            error = UpstreamError(f"The cloud's stream failed: {reported.get('message')}")
            raise CloudFailure("its stream reported an error", error)
        choices = None if event is None else tables(event.get("choices"))
        if event is None or choices is None:
            raise _nonsense("its stream holds an event without choices")
        if not all(_is_piece(choice) for choice in choices):
            raise _nonsense("its stream holds a piece that is no part of a message")
        self._finished = self._finished or any(choice.get("finish_reason") for choice in choices)
        return payload.replace(b"\n", b" "), event  # of several lines, one: JSON has none but between its tokens


def _has_content(event: dict[str, Any]) -> bool:
    for choice in event["choices"]:
        delta = table(choice.get("delta")) or {}
        if choice.get("finish_reason") or choice.get("text"):
            return True
        if any(value for name, value in delta.items() if name != "role"):
            return True
    return False


async def _read(response: httpx.Response) -> bytes:
    raw = bytearray()
    async for chunk in response.aiter_bytes():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise _nonsense(f"its answer is larger than {MAX_BODY_BYTES} bytes")
    return bytes(raw)


def _table(raw: bytes) -> dict[str, Any]:
    try:
        return table(parsed(raw)) or {}
    except ValueError as error:
        raise _nonsense("its answer is not JSON") from error


def _completion(raw: bytes) -> dict[str, Any]:
    body = _table(raw)
    choices = tables(body.get("choices"))
    if not choices or not all(_is_choice(choice) for choice in choices):
        raise _nonsense("its answer is not a completion")
    return body


def _is_choice(choice: dict[str, Any]) -> bool:
    """Whether it has a message that says something, if only the empty text. What says nothing would take the place of
    the device's good answer.
    """
    message = table(choice.get("message"))
    if message is None or not _is_content(message) or not isinstance(choice.get("finish_reason"), str | None):
        return False
    calls = message.get("tool_calls")
    if calls is not None and tables(calls) is None:
        return False
    return message.get("content") is not None or any(
        value for name, value in message.items() if name not in ("role", "content")
    )


def _is_piece(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    return delta is None or (table(delta) is not None and _is_content(delta))


def _is_content(message: dict[str, Any]) -> bool:
    """Whether its content is text, parts of one, or left out."""
    content = message.get("content")
    return content is None or isinstance(content, str) or bool(tables(content))


def _refused(response: httpx.Response, raw: bytes) -> CloudFailure:
    """The server said no. Its own words are relayed where they are OpenAI-shaped."""
    status = response.status_code
    with suppress(ValueError):
        body = table(parsed(raw)) or {}
        if (error := table(body.get("error"))) is not None:
            message = str(error.get("message"))
            return CloudFailure(f"it answered {status}", _typed(status, message), status=status, relay=raw)
    return CloudFailure(f"it answered {status}", _typed(status, f"The cloud answered {status}."), status=status)


def _typed(status: int, message: str) -> UpdraftError:
    if status in (401, 403):
        return AuthenticationError(message)
    if status == 429:
        return RateLimitError(message)
    if status == 503:
        return OverloadedError(message)
    return InvalidRequestError(message) if 400 <= status < 500 else UpstreamError(message)


def _timed_out(seconds: float) -> CloudFailure:
    return CloudFailure("it was too slow", RequestTimeoutError(f"The cloud did not answer within {seconds:.1f} s."))


def _unreachable(error: httpx.HTTPError) -> CloudFailure:
    if isinstance(error, (httpx.ReadTimeout, httpx.WriteTimeout)):
        return CloudFailure("it was too slow", RequestTimeoutError("The cloud stopped answering."))
    cause = "it cannot be reached" if isinstance(error, httpx.TransportError) else "its answer is malformed"
    detail = str(error) or type(error).__name__
    reached = not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
    return CloudFailure(cause, UpstreamError(f"The cloud failed: {detail}"), reached=reached)


def _cut(detail: str) -> CloudFailure:
    return CloudFailure("its stream was cut", UpstreamError(f"The cloud's stream was cut before its end: {detail}"))


def _nonsense(what: str) -> CloudFailure:
    return CloudFailure(what, UpstreamError(f"The cloud failed: {what}."))
