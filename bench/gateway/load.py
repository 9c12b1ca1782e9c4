"""Load generator of `updraft bench gateway`: closed loop (one request after another) or open loop (a fixed rate)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_WHOLE = b'{"model":"stub","messages":[{"role":"user","content":"Say hello."}]}'
_MAX_OPEN = 2000
_STREAM = b'{"model":"stub","stream":true,"messages":[{"role":"user","content":"Say hello."}]}'


@dataclass(slots=True)
class LoadResult:
    # Seconds from the first byte sent (open loop: from the due time) to the last byte received, by answered request.
    latencies: list[float] = field(default_factory=list[float])
    # Latency in seconds of requests that were refused with 429 or 503.
    refused: list[float] = field(default_factory=list[float])
    # Number of stream events.
    frames: int = 0
    # Number of answers with another error status, plus the number of broken connections.
    failures: int = 0
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.seconds


def percentile_ms(seconds: list[float], share: float) -> float:
    ordered = sorted(seconds)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] * 1e3 if ordered else float("nan")


class _Client(asyncio.Protocol):
    """One connection. Calls `on_answer` when it can send the next request, and `on_lost` when it is closed."""

    def __init__(
        self, load: LoadResult, on_answer: Callable[[_Client], None], on_lost: Callable[[_Client], None]
    ) -> None:
        self._load, self._on_answer, self._on_lost = load, on_answer, on_lost
        self._buffer = bytearray()
        self._length = -1  # content length of the answer; 0 for a chunked answer
        self._status = b""
        self._is_asked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, request: bytes, since: float) -> None:
        self._buffer.clear()
        self._length, self._since, self._is_asked = -1, since, True
        self._transport.write(request)

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._length < 0:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            del self._buffer[: end + 4]
            self._status = head[9:12]
            self._length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
            data = bytes(self._buffer)
        if self._length:
            ended = len(self._buffer) >= self._length
        else:
            self._load.frames += data.count(b"data: ")
            ended = self._buffer.endswith(b"0\r\n\r\n")
            del self._buffer[:-5]
        if ended:
            is_refused = self._status in (b"429", b"503")
            (self._load.refused if is_refused else self._load.latencies).append(time.perf_counter() - self._since)
            self._load.failures += not is_refused and self._status != b"200"
            self._is_asked = False
            self._on_answer(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._load.failures += self._is_asked
        self._on_lost(self)


def request_for(url: str, key: str, *, stream: bool, tokens: int = 0) -> bytes:
    """Build the request. `tokens`: length of the answer; 0 lets the stub choose."""
    body = _STREAM if stream else _WHOLE
    body = body[:-1] + b',"max_tokens":%d}' % tokens if tokens else body
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def drive(
    url: str, request: bytes, concurrency: int, seconds: float, *, load: LoadResult | None = None
) -> LoadResult:
    """Keep `concurrency` connections busy for `seconds`, then finish their last requests. `load` is updated live."""
    loop = asyncio.get_running_loop()
    load = LoadResult() if load is None else load
    began, ended, left = time.perf_counter(), loop.create_future(), concurrency

    def send_next(client: _Client) -> None:
        if (now := time.perf_counter()) < began + seconds:
            client.send(request, now)
        else:
            client.close()

    def count_down(_client: _Client) -> None:
        nonlocal left
        left -= 1
        if not left:
            ended.set_result(None)

    for _ in range(concurrency):
        send_next(await _connected(url, load, send_next, count_down))
    await ended
    load.seconds = time.perf_counter() - began
    return load


async def offer(url: str, key: str, per_second: float, seconds: float, warm_s: float) -> LoadResult:
    """Send requests at a fixed rate regardless of their latency, each on a free or a new connection.

    If too many are in flight, a due request waits, which counts as latency. Only answers in the `seconds` after the
    first `warm_s` count. Requests still open at the end are abandoned.
    """
    request, load, began = request_for(url, key, stream=False), LoadResult(), time.perf_counter()
    clients: set[_Client] = set()
    free: list[_Client] = []
    answered = asyncio.Event()
    warm_until = 0.0

    def take_back(client: _Client) -> None:
        free.append(client)
        answered.set()

    def forget(client: _Client) -> None:
        clients.discard(client)
        if client in free:
            free.remove(client)
        answered.set()

    for number in range(int(per_second * (warm_s + seconds))):
        due = began + number / per_second
        if (wait_s := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        if not warm_until and due >= began + warm_s:
            load.latencies.clear()
            load.refused.clear()
            warm_until = time.perf_counter()
        while not free and len(clients) >= _MAX_OPEN:
            answered.clear()
            await answered.wait()
        if not free:
            client = await _connected(url, load, take_back, forget)
            clients.add(client)
        else:
            client = free.pop()
        client.send(request, due)
    load.seconds = time.perf_counter() - warm_until
    within = deepcopy(load)
    for client in clients:
        client.close()
    await asyncio.sleep(0)  # lets the connections close
    return within


async def _connected(
    url: str, load: LoadResult, on_answer: Callable[[_Client], None], on_lost: Callable[[_Client], None]
) -> _Client:
    address = urlsplit(url)
    loop, port = asyncio.get_running_loop(), address.port or 80
    connection = await loop.create_connection(lambda: _Client(load, on_answer, on_lost), address.hostname or "", port)
    return connection[1]
