"""Sends raw bytes as HTTP requests, for requests that no HTTP library can send."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit


def exchanged(url: str, sent: bytes, timeout_s: float = 20) -> bytes:
    """Send `sent`, and return the response.

    The response ends when the server closes the connection, or sends nothing for `timeout_s`.
    """
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
    """Return a POST request that asks the server to close the connection after the answer."""
    lines = [f"POST {path} HTTP/1.1", f"host: {host}", "connection: close", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
