"""The load generator of `updraft bench gateway`: connections that send a request as soon as the last is answered."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_WHOLE = b'{"model":"stub","messages":[{"role":"user","content":"Say hello."}]}'
_STREAM = b'{"model":"stub","stream":true,"messages":[{"role":"user","content":"Say hello."}]}'


@dataclass(slots=True)
class LoadResult:
    """The figures of one run of requests."""

    # Seconds of each request, from its first byte out to its last byte in.
    latencies: list[float] = field(default_factory=list[float])
    # Events of streams.
    frames: int = 0
    # Answers that were not 200, or broke off.
    failures: int = 0
    # Seconds of the whole run.
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.seconds

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] * 1e3 if ordered else float("nan")


class _Client(asyncio.Protocol):
    def __init__(self, request: bytes, load: LoadResult, until: float, done: asyncio.Future[None]) -> None:
        self._request, self._load, self._until, self._done = request, load, until, done
        self._buffer = bytearray()
        self._length = -1  # of the answer; 0 for chunks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._length < 0:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            del self._buffer[: end + 4]
            self._load.failures += not head.startswith(b"http/1.1 200")
            self._length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
            data = bytes(self._buffer)
        if self._length:
            ended = len(self._buffer) >= self._length
        else:
            self._load.frames += data.count(b"data: ")
            ended = self._buffer.endswith(b"0\r\n\r\n")
            del self._buffer[:-5]
        if ended:
            self._load.latencies.append(time.perf_counter() - self._started)
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self._done.done():
            self._load.failures += 1
            self._done.set_result(None)

    def _send(self) -> None:
        self._buffer.clear()
        self._length = -1
        self._started = time.perf_counter()
        if self._started >= self._until:
            self._done.set_result(None)
            self._transport.close()
            return
        self._transport.write(self._request)


def request_for(url: str, key: str, *, stream: bool) -> bytes:
    body = _STREAM if stream else _WHOLE
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def drive(  # noqa: PLR0913
    url: str, key: str, concurrency: int, seconds: float, *, stream: bool = False, load: LoadResult | None = None
) -> LoadResult:
    """`concurrency` connections for `seconds`; each finishes the request that it began. `load` grows meanwhile."""
    loop, request = asyncio.get_running_loop(), request_for(url, key, stream=stream)
    load = LoadResult() if load is None else load
    address, began = urlsplit(url), time.perf_counter()
    ends: list[asyncio.Future[None]] = []
    for _ in range(concurrency):
        done: asyncio.Future[None] = loop.create_future()
        ends.append(done)
        await loop.create_connection(
            lambda done=done: _Client(request, load, began + seconds, done), address.hostname or "", address.port or 80
        )
    await asyncio.gather(*ends)
    load.seconds = time.perf_counter() - began
    return load
