"""Cloud tier over HTTP: any provider, with every failure mapped to a CloudFailure."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Any, TypeVar

import httpx
import msgspec

from ...protocol.dialects.chat_chunks import without_order
from ...protocol.errors import ConfigurationError, InvalidRequestError
from ...protocol.http.forwarding import NOTHING, Forwarding, NativeRequest, header_bytes
from ...protocol.http.lenient_json import object_of
from ...protocol.safety.bounded_cache import BoundedCache
from ...protocol.structured import ignored
from .answer_shapes import ContinuationVerdict, completion_in, embeddings_in, models_in, normalize
from .connection import LOCATION, CloudEndpoint, HttpCloudStream, open_client
from .failures import CloudCalls, CloudFailure, invalid_answer, misconfigured, timed_out, unreachable
from .interfaces import ChargedForwarding, CloudContent, Content, Delivery
from .providers.provider import ProviderCall, with_query
from .refused_hints import hint_keys, refused_by, without

log = logging.getLogger("updraft.router")

MAX_BODY_BYTES = 32 * 2**20  # maximum size of an answer; completions usually have kilobytes
_MAX_ERROR_BYTES = 2**20
_RATE_LIMIT = re.compile(r"x-ratelimit-[a-z0-9-]{1,60}:[\x20-\x7e]{1,100}")
_CONTENT = ("messages", "system", "contents", "systemInstruction", "prompt", "input", "tools", "user")
_KEY_HEADERS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
_MODELS_TIMEOUT_S = 2.0
_MAX_REFUSED = 1000  # maximum number of refused hints to remember
_MAX_NAMED = 20  # maximum number of models to list in an error message
_MODELS_EVERY_S = 60.0  # seconds before a cloud without an Updraft model is asked again for its list of models

T = TypeVar("T")


class HttpCloudTier:
    """A cloud over one pooled HTTP client, which connects with the first request. If the environment sets an unusable
    proxy or certificate, every request fails with an error that says so. All methods raise only CloudFailure.

    `continues`: whether the cloud can continue the assistant's last message; false after it has restarted a message.
    `body`: the decoded request. `forwarded`: headers and key of the caller. `timeout_s`: limit for all tries together.
    """

    def __init__(self, endpoint: CloudEndpoint) -> None:
        self.continues = endpoint.continues
        self.is_failing = False  # whether the last request went to another cloud instead
        self._endpoint = endpoint
        self._url = endpoint.url
        self._provider = endpoint.provider
        self._calls = CloudCalls(endpoint.url, endpoint.timeout_s)
        self._drafts_refused = False
        self._refused_hints = BoundedCache[bytes, bool](_MAX_REFUSED)  # by `hint_keys`
        self._node_models: frozenset[str] = frozenset()
        self._ask_for_models_at = 0.0
        self._models_lock = asyncio.Lock()  # lets concurrent callers share one request for the list of models
        self._client: httpx.AsyncClient | ConfigurationError
        try:
            self._client = open_client(endpoint)
        except ConfigurationError as error:
            self._client = error
            log.warning("%s", error.message)

    async def complete(
        self, path: str, body: dict[str, Any], *, timeout_s: float, forwarded: Forwarding = NOTHING
    ) -> dict[str, Any]:
        """Return the whole, validated answer to a request that does not stream."""

        async def read(response: httpx.Response) -> dict[str, Any]:
            redact, is_text = self._endpoint.redactor(forwarded.api_key).json, path == "completions"
            answer = completion_in(await self._read_whole(response), self._url, self._provider, redact, is_text=is_text)
            for choice in answer["choices"]:
                normalize(choice, body)
                self._endpoint.thoughts.read(object_of(choice.get("message")))
            return answer

        return await self._ask(path, body, read, timeout_s, forwarded)

    async def embed(self, body: dict[str, Any], *, timeout_s: float, forwarded: Forwarding = NOTHING) -> dict[str, Any]:
        """Return the validated answer to an embeddings request."""

        async def read(response: httpx.Response) -> dict[str, Any]:
            return embeddings_in(await self._read_whole(response), self._url, body.get("encoding_format"))

        return await self._ask("embeddings", body, read, timeout_s, forwarded)

    async def pass_on(self, path: str, content: Content, *, timeout_s: float, forwarded: Forwarding) -> CloudContent:
        """Return the cloud's answer to `content` unparsed. Server-sent events are passed on as they arrive."""

        async def read(response: httpx.Response) -> CloudContent:
            kind = response.headers.get("content-type", "")
            if kind.startswith("text/event-stream"):
                return CloudContent(kind, _chunks(response, self._url))
            return CloudContent(kind, await self._read_whole(response))

        return await self._ask(path, content, read, timeout_s, forwarded)

    async def open(
        self,
        path: str,
        body: dict[str, Any],
        *,
        timeout_s: float,
        begun: str | None = None,
        forwarded: Forwarding = NOTHING,
    ) -> HttpCloudStream:
        """Return a stream whose first content has arrived. `begun`: text of the last message, to be continued. A
        repetition of all of `begun` is removed. Raises CloudFailure if the stream restarts the message differently."""

        async def read(response: httpx.Response) -> HttpCloudStream:
            stream = HttpCloudStream(response, self._endpoint, forwarded.api_key, request=body)
            try:
                await stream.wait_for_content()
                if begun is not None:
                    self._check(await stream.check_continuation(begun))
            except BaseException:
                await stream.aclose()
                raise
            return stream

        return await self._ask(path, body, read, timeout_s, forwarded)

    async def takes_drafts(self, model: str, *, timeout_s: float, forwarded: Forwarding = NOTHING) -> bool:
        """Return whether to send drafts to `model` as `prediction`. Some clouds charge for these. Never raises."""
        can = self._provider.capabilities
        if self._drafts_refused or self._calls.is_open or not can.predictions:
            return False
        if self._endpoint.send_drafts or not can.lists_models:
            return self._endpoint.send_drafts
        async with self._models_lock:
            if model not in self._node_models and time.monotonic() >= self._ask_for_models_at:
                with suppress(CloudFailure, httpx.HTTPError, TimeoutError):  # other servers have no list
                    async with asyncio.timeout(min(_MODELS_TIMEOUT_S, timeout_s)):
                        self._node_models = models_in(await self._models(forwarded), owner="updraft")
                self._ask_for_models_at = time.monotonic() + _MODELS_EVERY_S
        return model in self._node_models

    def native_body(self, path: str, body: dict[str, Any], forwarded: Forwarding) -> dict[str, Any] | None:
        """Return the body that the cloud receives if the caller wrote the request for the cloud's own API, else None: a
        translation has no text that `body` lacks."""
        if self._native(forwarded) is None:
            return None
        with suppress(CloudFailure):  # sending fails too
            return self._call(path, body, forwarded).body
        return None

    def refuse_drafts(self) -> None:
        """Send no more drafts, because the cloud refused the `prediction` field."""
        self._drafts_refused = True
        log.warning("%s refuses the prediction field; no more drafts are sent to it", self._url)

    async def aclose(self) -> None:
        await self._calls.aclose()
        if isinstance(self._client, httpx.AsyncClient):
            await self._client.aclose()

    async def _ask(  # noqa: PLR0913
        self,
        path: str,
        given: dict[str, Any] | Content,
        read: Callable[[httpx.Response], Awaitable[T]],
        timeout_s: float,
        caller: Forwarding,
        *,
        refused: frozenset[str] = frozenset(),
    ) -> T:
        """Send a request, with retries within `timeout_s`, and return the result of `read` on the open response. A
        request given as Content is sent as it is, others are translated. If the cloud refuses a hint, the request is
        repeated without it. `refused`: hints to leave out. Raises CloudFailure."""
        is_content = isinstance(given, Content)
        body = {"model": given.model, "data": given.data} if is_content else given
        hints = {} if is_content else hint_keys(body, caller)
        refused |= {hint for hint, key in hints.items() if self._refused_hints.get(key)}
        body, forwarded = without(refused, body, caller) if refused else (body, caller)
        call = self._call(path, body, forwarded)
        if isinstance(forwarded, ChargedForwarding):
            forwarded.call_notes.extend(f"{hint}: left out, because the model refuses it" for hint in sorted(refused))
        content = given if is_content else json_content(call.body)
        until = time.monotonic() + timeout_s
        delivery = forwarded.delivery if isinstance(forwarded, ChargedForwarding) else Delivery()

        async def once() -> T:
            delivery.has_begun = False
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    return await read(await self._send("POST", call.path, content, forwarded, delivery))
            except TimeoutError as error:
                raise timed_out(self._url, timeout_s, reached=delivery.has_begun) from error
            except httpx.HTTPError as error:
                raise unreachable(self._url, error, reached=delivery.has_begun) from error

        try:
            book = forwarded.book if isinstance(forwarded, ChargedForwarding) else None
            return await self._calls.ask(once, until, lambda: _digest(call), book, forwarded.retries)
        except CloudFailure as failure:
            more = refused_by(failure) & hints.keys() - refused
            if not more:
                await self._explain(failure, str(call.body.get("model")), until, forwarded)
                raise
        answer = await self._ask(path, given, read, until - time.monotonic(), caller, refused=refused | more)
        for hint in more:
            self._refused_hints.put(hints[hint], True)
        return answer

    async def _explain(self, failure: CloudFailure, requested: str, until: float, forwarded: Forwarding) -> None:
        """Add the URL, and to an unknown-model error the cloud's known models, if the cloud lists them in time."""
        failure.url = self._url
        if not (failure.is_model_not_found and self._provider.capabilities.lists_models):
            return
        with suppress(CloudFailure, httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(min(_MODELS_TIMEOUT_S, until - time.monotonic())):
                there = sorted(models_in(await self._models(forwarded)))
            if there and requested not in there:
                known = ", ".join(name[:100] for name in there[:_MAX_NAMED])
                failure.add(f"{self._url} has no model {requested[:100]!r}. Known models: {known}.")

    def _call(self, path: str, body: dict[str, Any], forwarded: Forwarding) -> ProviderCall:
        """Translate a request for the provider. Raises CloudFailure if the provider does not support it."""
        native, query = self._native(forwarded), self._endpoint.query_with(forwarded.api_key)
        if isinstance(forwarded, ChargedForwarding) and self._provider.hints is not None:
            own = () if native is None else tuple(native.fields)
            forwarded.hints[:] = ignored(body, (*self._provider.hints, *own))
        sent = body if self._provider.capabilities.deltas else without_order(body)
        try:
            call = self._provider.call(path, self._endpoint.thoughts.written(sent), query)
            if native is not None:
                call = self._provider.with_native(call, body, native)
        except InvalidRequestError as error:
            raise misconfigured(error) from error
        if isinstance(forwarded, ChargedForwarding):
            forwarded.call_notes[:] = call.notes
            forwarded.native_fields[:] = () if native is None else call.body
        return call

    def _native(self, forwarded: Forwarding) -> NativeRequest | None:
        """Return the caller's own request if it is written for this cloud's API."""
        native = forwarded.native
        return native if native is not None and native.provider == self._provider.name else None

    async def _models(self, forwarded: Forwarding) -> bytes:
        path = with_query("models", self._endpoint.query_with(forwarded.api_key))
        return await self._read_whole(
            await self._send("GET", path, None, Forwarding(api_key=forwarded.api_key), Delivery())
        )

    async def _read_whole(self, response: httpx.Response) -> bytes:
        raw = await _read(response, MAX_BODY_BYTES)
        if len(raw) > MAX_BODY_BYTES:
            raise invalid_answer(self._url, f"the answer exceeds {MAX_BODY_BYTES} bytes")
        return raw

    async def _send(
        self, method: str, path: str, content: Content | None, forwarded: Forwarding, delivery: Delivery
    ) -> httpx.Response:
        """Send a request and return the open response. Raises CloudFailure for any status but 200."""
        if isinstance(self._client, ConfigurationError):
            raise misconfigured(self._client)
        given = dict(forwarded.headers)
        if (native := self._native(forwarded)) is not None:
            given |= native.headers
        headers = [
            (name.encode(), header_bytes(value)) for name, value in given.items() if name not in self._client.headers
        ]
        if content is not None:
            headers.append((b"content-type", header_bytes(content.kind)))
        request = self._client.build_request(
            method,
            f"{self._url}/{forwarded.target(path)}",
            content=None if content is None else content.data,
            headers=headers,
            extensions={"trace": delivery.trace},
        )
        if forwarded.api_key is not None:
            for name in _KEY_HEADERS:
                request.headers.pop(name, None)
            request.headers.update(self._provider.headers(forwarded.api_key))
        response = await self._client.send(request, stream=True)
        if isinstance(forwarded, ChargedForwarding):
            forwarded.rate_limits.clear()
            forwarded.rate_limits.update(x for x in response.headers.items() if _RATE_LIMIT.fullmatch(":".join(x)))
        if response.status_code == 200:
            return response
        raw = b""
        with suppress(httpx.HTTPError):  # if the body cannot be read, the status is enough
            raw = await _read(response, _MAX_ERROR_BYTES)
        reason = self._endpoint.redacted_error(raw, forwarded.api_key)
        headers = {**response.headers, "location": response.headers.get(LOCATION, "")}
        raise self._provider.refused(self._url, response.status_code, headers, reason)

    def _check(self, verdict: ContinuationVerdict) -> None:
        if verdict == "continues":
            return
        self.continues = False
        log.warning("%s restarts answers instead of continuing them; no more streams are handed over to it", self._url)
        if verdict == "differs":
            raise invalid_answer(self._url, "the server restarted the answer instead of continuing it")


def _digest(call: ProviderCall) -> bytes:
    """Return a digest of user and prompt. Requests that differ only in other fields, such as temperature, are equal."""
    same = {name: call.body[name] for name in _CONTENT if name in call.body} or call.body
    return blake2b(call.path.encode() + msgspec.json.encode(same), digest_size=16).digest()


def json_content(body: dict[str, Any]) -> Content:
    return Content(msgspec.json.encode(body), "application/json", str(body.get("model")))


async def _chunks(response: httpx.Response, url: str) -> AsyncGenerator[bytes]:
    try:
        async for chunk in response.aiter_bytes():
            yield chunk
    except httpx.HTTPError as error:
        raise unreachable(url, error) from error
    finally:
        await response.aclose()


async def _read(response: httpx.Response, most: int) -> bytes:
    """Read the body, but stop soon after `most` bytes. Close the response."""
    raw = bytearray()
    try:
        async for chunk in response.aiter_bytes():
            raw += chunk
            if len(raw) > most:
                break
    finally:
        await response.aclose()
    return bytes(raw)
