"""Requests as bytes, for what no HTTP library sends."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit


def exchanged(url: str, sent: bytes, timeout_s: float = 20) -> bytes:
    """The response until the server closes the connection, or until it has been silent for `timeout_s`."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=timeout_s) as client:
        received = bytearray()
        try:
            client.sendall(sent)
            while piece := client.recv(65536):
                received += piece
        except (TimeoutError, ConnectionResetError, BrokenPipeError):
            pass
        return bytes(received)


def status_of(answer: bytes) -> int:
    """Return the status of the first answer; 0 without an answer."""
    return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0


def post(path: str, body: bytes, *headers: str, host: str = "localhost") -> bytes:
    """A POST after whose answer the connection closes."""
    lines = [f"POST {path} HTTP/1.1", f"host: {host}", "connection: close", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
