"""Streamed answer of a cloud over HTTP, with every event validated and normalized as it arrives."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx

from ...accounting.reported_usage import ReportedUsage
from ...protocol.http import sse
from ...protocol.http.lenient_json import json_bytes, object_of, table, tables
from .answer_shapes import Continuation, ContinuationVerdict, StreamedChoices, has_content, is_piece
from .connection import CloudEndpoint
from .failures import cut, invalid_answer, timed_out

_NO_STREAM = "the server answered a streamed request with something other than an event stream"
_LAST_BYTES_S = 0.2  # seconds that a server has to end its response after the end mark


class HttpCloudStream(AsyncIterator[tuple[bytes, dict[str, Any]]]):
    """`CloudStream` over one open response of a cloud."""

    def __init__(self, response: httpx.Response, endpoint: CloudEndpoint, callers_key: str | None = None) -> None:
        """Read `response`. `callers_key`: the key sent with the request, if it is not the key in the settings."""
        self._callers_key = callers_key
        self._response = response
        self._endpoint = endpoint
        self._url = endpoint.url
        self._translator = endpoint.provider.events()
        self._chunks: AsyncIterator[bytes] = response.aiter_bytes()
        self._parser = sse.EventParser()
        self._choices = StreamedChoices()
        self._usage = ReportedUsage(has_completion=False)  # of all events so far
        self._payloads: deque[bytes] = deque()  # received but not yet decoded events
        self._ready: deque[tuple[bytes, dict[str, Any]]] = deque()
        self._kind: str = response.headers.get("content-type", "").lower()
        self._began = False  # whether an event has arrived
        self._finished = False  # whether a finish_reason has arrived, so that the stream may end

    async def wait_for_content(self) -> None:
        """Read until the answer has content. Before that, a local answer can still replace a failed stream."""
        if self._kind.startswith(("application/json", "text/html")):
            raise invalid_answer(self._url, _NO_STREAM)
        held: deque[tuple[bytes, dict[str, Any]]] = deque()
        async for event in self:
            held.append(event)
            if has_content(event[1]):
                break
        else:
            raise invalid_answer(self._url, "the stream ended before any content")
        held.extend(self._ready)
        self._ready = held

    async def check_continuation(self, begun: str) -> ContinuationVerdict:
        """Read until it is known whether the stream continues `begun`, and drop a repetition of `begun`."""
        continuation = Continuation(begun)
        verdict: ContinuationVerdict = "unknown"
        async for event in self:
            if (verdict := continuation.take(event)) != "unknown":
                break
        self._ready = continuation.events + self._ready
        return verdict

    async def __anext__(self) -> tuple[bytes, dict[str, Any]]:
        while not self._ready:
            if self._payloads:
                self._ready.extend(self._read(self._payloads.popleft()))
                continue
            if self._parser.done:
                if (finish := self._choices.finish()) is None:
                    raise StopAsyncIteration
                return json_bytes(finish), finish
            try:
                async with asyncio.timeout(self._endpoint.timeout_s):
                    chunk = await anext(self._chunks, None)
            except TimeoutError as error:
                raise timed_out(self._url, self._endpoint.timeout_s) from error
            except httpx.HTTPError as error:
                raise cut(self._url, str(error) or type(error).__name__) from error
            if chunk is None:
                if self._finished:
                    raise StopAsyncIteration
                if not (self._began or self._kind.startswith("text/event-stream")):
                    raise invalid_answer(self._url, _NO_STREAM)
                raise cut(self._url, "no finish reason arrived")
            try:
                self._payloads.extend(self._parser.feed(chunk))
            except sse.EventTooLongError as error:
                raise invalid_answer(self._url, "the stream has an event that does not end") from error
            self._began = self._began or bool(self._payloads)
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Close the stream. After the end mark, first read the rest, so that the connection can be reused."""
        if self._parser.done:
            with suppress(TimeoutError, httpx.HTTPError):
                async with asyncio.timeout(_LAST_BYTES_S):
                    while await anext(self._chunks, None) is not None:
                        pass
        await self._response.aclose()

    def _read(self, payload: bytes) -> list[tuple[bytes, dict[str, Any]]]:
        try:
            event = table(self._endpoint.provider.read(payload))
        except ValueError as error:
            raise invalid_answer(self._url, "the stream has an event that is not JSON") from error
        if event is not None and event.get("error"):
            raise self._endpoint.provider.reported(
                self._url, self._endpoint.redactor(self._callers_key).json(event["error"])
            )
        if event is None:
            raise invalid_answer(self._url, "the stream has an event that is not an object")
        if self._translator is None:
            return [self._checked(payload, event)]
        return [self._checked(json_bytes(chunk), chunk) for chunk in self._translator(event)]

    def _checked(self, payload: bytes, event: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
        if event.get("choices") is None:  # a keep-alive event, or on some servers the usage
            event["choices"] = []
            payload = json_bytes(event)
        choices = tables(event["choices"])
        if choices is None:
            raise invalid_answer(self._url, "the stream has an event with invalid choices")
        if not all(is_piece(choice) for choice in choices):
            raise invalid_answer(self._url, "the stream has a choice that is not part of a message")
        self._finished = self._finished or any(choice.get("finish_reason") for choice in choices)
        is_changed = self._choices.normalize(event)
        for choice in choices:
            is_changed |= self._endpoint.thoughts.read(object_of(choice.get("delta")))
        if b"sage" in payload and (usage := ReportedUsage.of(event)):
            self._usage = usage.after(self._usage)
            given = event.get("usage")
            if self._usage.prompt_tokens and (shown := self._usage.standard(given)) != given:
                event["usage"], is_changed = shown, True
        payload = json_bytes(event) if is_changed else payload
        return payload.replace(b"\n", b" "), event  # put the JSON on one line, as SSE requires
