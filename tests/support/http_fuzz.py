"""Random HTTP requests from a seed, of which heads, framing and bodies are often slightly or completely invalid."""

from __future__ import annotations

import json
import random
import socket
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_WORDS = (
    "",
    "hi",
    "echo",
    "\x00",
    "\ufffd",
    "é" * 50,
    "x" * 3000,
    "null",
    "-1",
    "../..",
    "' OR 1=1 --",
    "${7*7}",
    "%s%n",
)
_NUMBERS = (0, -1, 1, 2**31, 2**63, -(2**63), 10**40, 1e308, 0.1, -0.0)
_HOSTS = ("localhost", "127.0.0.1:1", "evil.example", "localhost/", "localhost?#@", "", "[::1]", "a, b", "\xff")
_NAMES = (
    "x-request-id", "x-updraft-tenant", "traceparent", "accept-encoding", "expect", "upgrade", "te", "range", "cookie",
    "x-forwarded-for", "origin", "content-encoding", "http2-settings", "x" * 300, "x-\xff", "x y", "",
)  # fmt: skip
_FORM = "multipart/form-data; boundary=b"
_FORM_TYPES = (
    *[_FORM] * 7,
    "multipart/form-data",
    "text/plain",
    f'{_FORM}"; boundary="',
    "multipart/form-data; boundary=\xff",
    "",
)
_METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "PRI", "get", "\xff", "")


class Form(dict[str, str]):
    """Fields of a body that is sent as a multipart form."""


@dataclass(frozen=True)
class Endpoint:
    method: str
    path: str
    # A valid body; None if the endpoint takes no body.
    body: dict[str, Any] | None = None
    key: str = ""


@dataclass
class Fuzzer:
    """Generator of random requests. `canary`: part of every wrong key, so that a key in a log is noticed."""

    seed: int
    canary: str
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def request(self, endpoint: Endpoint) -> bytes:
        """Return a request to `endpoint`. Each of its parts is valid most of the time."""
        rng = self._random
        method = endpoint.method if rng.random() < 0.95 else rng.choice(_METHODS)
        version = (
            "HTTP/1.1" if rng.random() < 0.95 else rng.choice(("HTTP/1.0", "HTTP/2.0", "HTTP/9.9", "HTTQ/1.1", ""))
        )
        headers = ["connection: close", f"host: {'localhost' if rng.random() < 0.92 else rng.choice(_HOSTS)}"]
        if endpoint.key and rng.random() < 0.9:
            headers.append(f"authorization: Bearer {endpoint.key}")
        elif rng.random() < 0.7:
            scheme = rng.choice(("Bearer ", "Basic ", "bearer\t", ""))
            headers.append(f"authorization: {scheme}{self.canary}{self._text()}")
        headers += [f"{rng.choice(_NAMES)}:{self._text()}" for _ in range(self._junk_headers())]
        if isinstance(endpoint.body, Form):
            headers.append(f"content-type: {rng.choice(_FORM_TYPES)}")
        body, framing = self._framed(self._body(endpoint))
        rng.shuffle(headers)
        head = "\r\n".join([f"{method} {self._target(endpoint.path)} {version}", *headers, *framing, "", ""])
        return self._harmed(head.encode("utf-8", "surrogatepass" if rng.random() < 0.1 else "replace"), 0.03) + body

    def _junk_headers(self) -> int:
        return self._random.choices((0, 1, 2, 300), (30, 4, 2, 1))[0]

    def _target(self, path: str) -> str:
        rng = self._random
        if rng.random() < 0.9:
            return path
        junk = rng.choice(
            ("?", "?a=%ff", "/", "//", "%00", "#x", "/../", "?" + "a" * 9000, " x", "\xe9", "/%2e%2e/", "*")
        )
        return rng.choice((path + junk, junk + path, "http://evil.example" + path))

    def _body(self, endpoint: Endpoint) -> bytes:
        rng = self._random
        if endpoint.body is None:
            return b"" if rng.random() < 0.8 else rng.randbytes(rng.randrange(200))
        kind = rng.random()
        if kind < 0.1:
            return rng.choice((b"", b"[]", b"null", b"{", rng.randbytes(100), b"[" * 5000, b'{"a":' * 3000, b'"\xff"'))
        fields = dict(endpoint.body)
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            name = rng.choice((*fields, "n", "stream", "stream_options", "max_tokens", "stop", "user", "tools", "seed"))
            fields[name] = self._value(0)
        encoded = _form(fields) if isinstance(endpoint.body, Form) else json.dumps(fields).encode()
        return self._harmed(encoded, 0.1)

    def _value(self, depth: int) -> Any:
        rng = self._random
        kind = rng.randrange(4 if depth > 3 else 7)
        if kind == 0:
            return rng.choice(_WORDS)
        if kind == 1:
            return rng.choice(_NUMBERS)
        if kind < 4:
            return rng.choice((True, False, None))
        if kind == 4:
            return [self._value(depth + 1) for _ in range(rng.choice((0, 1, 3)))]
        names = ("role", "content", "type", "name", "include_usage", "concurrent", "x")
        return {rng.choice(names): self._value(depth + 1) for _ in range(rng.choice((0, 1, 3)))}

    def _framed(self, body: bytes) -> tuple[bytes, list[str]]:
        """Return the body as sent, and the headers that describe its framing."""
        rng = self._random
        kind = rng.random()
        if kind < 0.8:
            return body, [f"content-length: {len(body)}"]
        if kind < 0.95:
            pieces: list[bytes] = []
            while body:
                size = rng.randrange(1, len(body) + 1)
                pieces.append(b"%x%b\r\n%b\r\n" % (size, rng.choice((b"", b"", b";a=b", b" ")), body[:size]))
                body = body[size:]
            end = rng.choice(
                (b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"-1\r\n\r\n", b"zz\r\n", b"f" * 20 + b"\r\n")
            )
            return b"".join(pieces) + end, ["transfer-encoding: chunked"]
        lengths = (["content-length: -1"], ["content-length: x"], ["content-length: 1", "content-length: 2"])
        both = ["transfer-encoding: chunked", f"content-length: {len(body)}"]
        return body, rng.choice((*lengths, both, [f"content-length: {10**30}"], ["transfer-encoding: gzip"]))

    def _harmed(self, data: bytes, share: float) -> bytes:
        """Return `data`, in which a few bytes are changed with the probability `share`."""
        rng = self._random
        if not data or rng.random() >= share:
            return data
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 5))):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)

    def _text(self) -> str:
        rng = self._random
        return rng.choice((*_WORDS, "".join(chr(rng.randrange(1, 0x250)) for _ in range(rng.randrange(20)))))


def _form(fields: dict[str, Any]) -> bytes:
    part = '--b\r\ncontent-disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    text = "".join(part.format(name, value) for name, value in fields.items()) + "--b--\r\n"
    return text.encode("utf-8", "replace")


def answer_to(url: str, request: bytes, silence_s: float = 0.5) -> bytes:
    """Send `request`, and return the response.

    The response ends when the server closes the connection, or sends nothing for `silence_s`.
    """
    address = urlsplit(url)
    received = bytearray()
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=20) as client:
        try:
            client.sendall(request)
            client.settimeout(silence_s)
            while piece := client.recv(65536):
                received += piece
        except (TimeoutError, ConnectionResetError, BrokenPipeError):
            pass
    return bytes(received)
