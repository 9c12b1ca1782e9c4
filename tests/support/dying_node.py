"""A proxy that kills its node after a given number of answer chunks, even if the node has sent more by then."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from server_processes import Process

_CHUNK_END = b"\n\n\r\n"  # end of an event, followed by the end of an HTTP chunk


class _Proxy:
    def __init__(self, node: Process, deaths: deque[int]) -> None:
        self._node, self._deaths = node, deaths
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def serve(self) -> None:
        """Relay connections until `close` is called, by the owner or after the node was killed."""
        address = urlsplit(self._node.url)
        with suppress(OSError):
            while True:
                gateway, _ = self._listener.accept()
                try:
                    node = socket.create_connection((address.hostname, address.port))
                except ConnectionRefusedError:
                    gateway.close()
                    continue
                for relay in (self._relay_request, self._relay_answer):
                    threading.Thread(target=relay, args=(gateway, node), daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _relay_request(self, gateway: socket.socket, node: socket.socket) -> None:
        with suppress(OSError):
            while piece := gateway.recv(65536):
                node.sendall(piece)
            node.shutdown(socket.SHUT_WR)

    def _relay_answer(self, gateway: socket.socket, node: socket.socket) -> None:
        with gateway, node, suppress(OSError):
            self._relay_pieces(gateway, node)
            gateway.shutdown(socket.SHUT_RDWR)

    def _relay_pieces(self, gateway: socket.socket, node: socket.socket) -> None:
        remaining, rest = None, b""
        while piece := node.recv(65536):
            if remaining is None and b"text/event-stream" in piece and self._deaths:
                remaining = self._deaths.popleft()
            if remaining is None:
                gateway.sendall(piece)
                continue
            *chunks, rest = (rest + piece).split(_CHUNK_END)
            gateway.sendall(b"".join(chunk + _CHUNK_END for chunk in chunks[:remaining]))
            remaining -= len(chunks)
            if remaining <= 0:
                self._node.popen.kill()
                self._node.popen.wait()
                self.close()
                return


@contextmanager
def dying(node: Process, deaths: deque[int]) -> Iterator[str]:
    """Run the proxy, and yield its URL. `deaths`: number of chunks after which the node is killed, by stream.

    Several proxies may share `deaths`; each stream takes the first number left.
    """
    proxy = _Proxy(node, deaths)
    thread = threading.Thread(target=proxy.serve)
    thread.start()
    try:
        yield proxy.url
    finally:
        proxy.close()
        thread.join()
