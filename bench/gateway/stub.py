"""Stub of a node for `updraft bench gateway`, a process that does as little per request as HTTP allows."""

from __future__ import annotations

import argparse
import asyncio
import heapq
import re
import sys

import msgspec

_HEAD_FIELDS = {"id": "chatcmpl-stub", "created": 1, "model": "stub"}
_WHOLE = {
    **_HEAD_FIELDS,
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
}
_MAX_TOKENS = re.compile(rb'"max_tokens":(\d+)')
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n\r\n"


def _whole(payload: object) -> bytes:
    body = msgspec.json.encode(payload)
    return _HEAD % (b"application/json", b"content-length: %d" % len(body)) + body


def _chunk(payload: object) -> bytes:
    data = b"data: %b\n\n" % (payload if isinstance(payload, bytes) else msgspec.json.encode(payload))
    return b"%x\r\n%b\r\n" % (len(data), data)


def _delta(text: str, finish: str | None = None) -> dict[str, object]:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
    return {**_HEAD_FIELDS, "object": "chat.completion.chunk", "choices": [choice]}


_ANSWER = _whole(_WHOLE)
_MODELS = _whole({"object": "list", "data": [{"id": "stub", "object": "model", "created": 1, "owned_by": "stub"}]})
_STREAM = _HEAD % (b"text/event-stream", b"transfer-encoding: chunked")
_FRAME = _chunk(_delta(" word"))
_END = _chunk(_delta("", "stop")) + _chunk({**_delta(""), "choices": [], "usage": _WHOLE["usage"]})
_END += _chunk(b"[DONE]") + b"0\r\n\r\n"


class _Slots:
    """Slots that answer one request each at a time, in `delay_s` seconds, so that the node's capacity is known."""

    def __init__(self, count: int, delay_s: float) -> None:
        self._free_at = [0.0] * count
        self._delay_s = delay_s

    def answers_at(self, now: float) -> float:
        """Return the time at which a request that arrives at `now` is answered, by the first slot that becomes free."""
        at = max(now, self._free_at[0]) + self._delay_s
        heapq.heapreplace(self._free_at, at)
        return at


class _Stub(asyncio.Protocol):
    def __init__(self, frames: int, interval_s: float, slots: _Slots | None) -> None:
        self._frames, self._interval_s, self._slots = frames, interval_s, slots
        self._loop = asyncio.get_running_loop()
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, _, body = self._buffer.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        if b"\r\n\r\n" not in self._buffer or len(body) < length:
            return
        self._buffer = b""
        if head.startswith(b"GET"):
            self._transport.write(_MODELS)
        elif b'"stream":true' in body:
            self._transport.write(_STREAM)
            limit = _MAX_TOKENS.search(body)
            self._stream(int(limit[1]) if limit else self._frames)
        elif self._slots is not None:
            self._loop.call_at(self._slots.answers_at(self._loop.time()), self._transport.write, _ANSWER)
        else:
            self._transport.write(_ANSWER)

    def _stream(self, frames: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(_FRAME if frames else _END)
        if frames:
            self._loop.call_later(self._interval_s, self._stream, frames - 1)


async def _serve(frames: int, interval_s: float, slots: _Slots | None) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Stub(frames, interval_s, slots), "127.0.0.1", 0, backlog=4096)
    sys.stdout.write(f"ready http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--interval-s", type=float, default=0.02)
    parser.add_argument("--slots", type=int, default=0, help="Number of unstreamed answers at a time; 0: unlimited.")
    parser.add_argument("--delay-s", type=float, default=0.0, help="Seconds per answer in a slot.")
    given = parser.parse_args()
    asyncio.run(_serve(given.frames, given.interval_s, _Slots(given.slots, given.delay_s) if given.slots else None))
