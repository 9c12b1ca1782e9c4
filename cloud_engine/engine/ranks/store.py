"""The ranks' rendezvous through rank 0: joining, torch.distributed's store, and signs of life between machines."""

# torch leaves its stores untyped
# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist
import zmq

from ..rank_messages import Join, Refusal, encode
from .meeting import Meeting

LOST_S = 10.0
"""Seconds without a sign of life after which a machine counts as lost."""

_BEAT_MS, _LOST_MS = 2000, int(LOST_S * 1000)
_JOIN, _BEAT, _SET, _GET, _ADD, _HAS, _DELETE = (b"join", b"beat", b"set", b"get", b"add", b"has", b"delete")
_log = logging.getLogger("updraft.engine")


class RankStore(dist.Store):
    """A rank's end of rank 0's store. Torch's own TCPStore has no key, and listens on every address of the machine."""

    def __init__(self, meeting: Meeting, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        super().__init__()
        self._socket = meeting.connect(context, meeting.store, zmq.REQ)
        self._lock = threading.Lock()  # NCCL reads the store in a thread of its own

    def close(self) -> None:
        self._socket.close()

    def join(self, rank: int) -> bytes:
        """Return rank 0's message `Join` or `Refusal`. Waits until rank 0 listens."""
        return self._ask(_JOIN, str(rank))

    def set(self, key: str, value: bytes) -> None:
        self._ask(_SET, key, value)

    def get(self, key: str) -> bytes:
        return self._ask(_GET, key)

    def add(self, key: str, value: int) -> int:
        return int(self._ask(_ADD, key, str(value).encode()))

    def wait(self, keys: list[str], timeout: object = None) -> None:  # noqa: ARG002 - collectives have their own
        for key in keys:
            self._ask(_GET, key)

    def check(self, keys: list[str]) -> bool:
        return all(self._ask(_HAS, key) for key in keys)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(_DELETE, key))

    def _ask(self, verb: bytes, key: str, value: bytes = b"") -> bytes:
        with self._lock:
            self._socket.send_multipart((verb, key.encode(), value))
            return self._socket.recv()


class StoreServer:
    """Rank 0's end, served in a thread of its own until its context ends."""

    def __init__(
        self, meeting: Meeting, context: zmq.Context[zmq.Socket[bytes]], join: Join, on_lost: Callable[[int], None]
    ) -> None:
        """`join`: the message for each rank that joins. `on_lost`: called with a rank that went silent."""
        self._socket = meeting.bind(context, meeting.store)
        self._join = join
        self._on_lost = on_lost
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, list[bytes]] = {}
        self._joined: set[int] = set()
        self._heard: dict[int, float] = {}
        threading.Thread(target=self._serve, name="updraft-rank-store", daemon=True).start()

    def _serve(self) -> None:
        with self._socket, suppress(zmq.ContextTerminated):
            self._serve_from(time.monotonic())

    def _serve_from(self, looked: float) -> None:
        while True:
            if self._socket.poll(_BEAT_MS):
                sender, _, verb, key, value = self._socket.recv_multipart()
                self._answer(sender, verb, key, value)
            now = time.monotonic()
            stalled_s = max(0.0, now - looked - 2 * _BEAT_MS / 1000)  # of this process, and so no silence of the others
            looked = now
            self._heard = {rank: at + stalled_s for rank, at in self._heard.items()}
            for rank in [rank for rank, at in self._heard.items() if now - at > LOST_S]:
                del self._heard[rank]
                self._on_lost(rank)

    def _answer(self, sender: bytes, verb: bytes, key: bytes, value: bytes) -> None:
        values = self._values
        answer = b""
        match verb:
            case b"join":
                answer = self._joining(int(key))
            case b"beat":
                self._heard[int(key)] = time.monotonic()
            case b"set":
                values[key] = value
            case b"add":
                answer = values[key] = str(int(values.get(key, b"0")) + int(value)).encode()
            case b"get" if key not in values:
                self._waiting.setdefault(key, []).append(sender)
                return
            case b"get":
                answer = values[key]
            case b"has":
                answer = b"1" if key in values else b""
            case b"delete":
                answer = b"1" if values.pop(key, None) is not None else b""
            case _:
                _log.warning("A rank sent the unknown message %r.", verb)
        self._reply(sender, answer)
        if key in values:
            for other in self._waiting.pop(key, ()):
                self._reply(other, values[key])

    def _joining(self, rank: int) -> bytes:
        config = self._join.config
        if not 1 <= rank < config.num_ranks:
            return encode(Refusal(f"rank 0 has {config.num_ranks} ranks: give all machines the same options"))
        if rank in self._joined:
            return encode(Refusal("another process has this rank: give each machine its own --node-rank"))
        self._joined.add(rank)
        return encode(self._join)

    def _reply(self, to: bytes, answer: bytes) -> None:
        try:
            self._socket.send_multipart((to, b"", answer))
        except zmq.ZMQError:
            _log.warning("A rank left before its answer came.")


def begin_beats(meeting: Meeting, context: zmq.Context[zmq.Socket[bytes]], rank: int) -> None:
    """Wait for rank 0. From then on tell it that this rank lives, and exit once it has been silent for `LOST_S`."""
    met = threading.Event()

    def beat() -> None:
        with meeting.connect(context, meeting.store, zmq.REQ) as socket, suppress(zmq.ContextTerminated):
            while True:
                socket.send_multipart((_BEAT, str(rank).encode(), b""))
                if met.is_set() and not (socket.poll(_LOST_MS) or socket.poll(_BEAT_MS)):
                    _log.error("Rank 0 was silent for %.0f s.", LOST_S)
                    os._exit(1)
                socket.recv()
                met.set()
                time.sleep(_BEAT_MS / 1000)

    threading.Thread(target=beat, name="updraft-rank-beat", daemon=True).start()
    met.wait()
