"""A model hub and web server on loopback sockets, with typical faults: cut bodies, delays, wrong data, redirects."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote

COMMIT = "c" * 40


def tiny_gguf(size: int = 200_000, licence: str = "mit", seed: int = 0) -> bytes:
    """Return a GGUF file with a valid header and one tensor of `size` pseudo-random bytes."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    pairs = {"general.architecture": "llama", "general.license": licence}
    values = b"".join(text(key) + struct.pack("<I", 8) + text(value) for key, value in pairs.items())
    tensor = text("x") + struct.pack("<IQIQ", 1, size, 24, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + values + tensor
    return head + bytes(-len(head) % 32) + hashlib.shake_128(bytes([seed])).digest(size)


@dataclass
class ReceivedRequest:
    """A request: its path, and its headers with lower-case names."""

    path: str
    headers: dict[str, str]

    @property
    def start(self) -> int:
        """Offset of the first byte that the client asked for."""
        return int(self.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")[0])


@dataclass
class Hub:
    """Contents and faults of a hub. `files`: by repository and path. `web`: by path.

    The faults spare a client's first request for a single byte. `cuts`: number of bodies that end after `cut_after`
    bytes. `statuses`: replies to the first requests. `other`: origin of another server to which file requests are
    redirected. `target`: complete URL for such redirects. `facts_at`: origin to which requests for repository facts are
    redirected. `tail`: bytes sent after a file. `pause_s`: seconds between two pieces of a body.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    web: dict[str, bytes] = field(default_factory=dict)
    cuts: int = 0
    cut_after: int = 50_000
    statuses: list[int] = field(default_factory=list)
    corrupt: bool = False
    no_ranges: bool = False
    wrong_range: bool = False
    no_length: bool = False
    tail: bytes = b""
    facts_at: str = ""
    etag: str | None = '"one"'
    other: str = ""
    target: str = ""
    pause_s: float = 0.0
    piece: int = 16_384
    lfs: bool = True
    gated: bool = False
    licence: str = "apache-2.0"
    url: str = ""
    received: list[ReceivedRequest] = field(default_factory=list)

    @property
    def bodies(self) -> list[ReceivedRequest]:
        """Requests for files, without the first requests for a single byte."""
        return [
            received
            for received in self.received
            if "/api/" not in received.path and received.headers.get("range") != "bytes=0-0"
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        hub = self.hub
        path = unquote(self.path.partition("?")[0])
        hub.received.append(ReceivedRequest(self.path, {key.lower(): value for key, value in self.headers.items()}))
        parts = path.strip("/").split("/")
        if hub.statuses:
            self.reply(hub.statuses.pop(0))
        elif parts[:2] == ["api", "models"] and hub.facts_at:
            self.reply(302, headers={"Location": hub.facts_at + self.path})
        elif parts[:2] == ["api", "models"]:
            self.describe("/".join(parts[2:4]))
        elif hub.target or hub.other:
            self.reply(302, headers={"Location": hub.target or hub.other + self.path})
        elif path in hub.web:
            self.file(hub.web[path])
        elif len(parts) >= 5 and parts[2] == "resolve":
            data = hub.files.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))
            self.reply(404) if data is None else self.file(data)
        else:
            self.reply(404)

    def describe(self, repo: str) -> None:
        hub = self.hub
        if repo not in hub.files:
            return self.reply(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        if hub.gated:
            return self.reply(403, b'{"error": "gated"}', {"X-Error-Code": "GatedRepo"})
        siblings = []
        for name, data in hub.files[repo].items():
            row: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": "b" * 40}
            if hub.lfs:
                row["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(row)
        body = {"id": repo, "sha": COMMIT, "siblings": siblings, "cardData": {"license": hub.licence}, "tags": []}
        return self.reply(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def file(self, data: bytes) -> None:
        hub = self.hub
        requested = self.headers.get("Range")
        headers = {"ETag": hub.etag} if hub.etag else {}
        sent = data[:-1] + bytes([data[-1] ^ 1]) if hub.corrupt else data
        status = 200
        if requested and not hub.no_ranges and self.headers.get("If-Range", hub.etag) == hub.etag:
            first, _, last = requested.removeprefix("bytes=").partition("-")
            start, end = int(first), int(last or len(data) - 1)
            status, sent = 206, sent[start : end + 1]
            headers["Content-Range"] = f"bytes {start + hub.wrong_range}-{end}/{len(data)}"
        if requested == "bytes=0-0" and status == 206:
            return self.reply(status, sent, headers)
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if not hub.no_length:
            self.send_header("Content-Length", str(len(sent)))
        self.send_header("Connection", "close")
        self.end_headers()
        return self.body(sent + hub.tail, cut=requested != "bytes=0-0")

    def body(self, sent: bytes, *, cut: bool) -> None:
        hub = self.hub
        self.close_connection = True
        if cut and hub.cuts:
            hub.cuts -= 1
            sent = sent[: hub.cut_after]
        try:
            for start in range(0, len(sent), hub.piece):
                self.wfile.write(sent[start : start + hub.piece])
                self.wfile.flush()
                time.sleep(hub.pause_s)
        except OSError:
            return  # the client has disconnected

    def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignore disconnected clients, which these tests provoke."""


@contextmanager
def running(hub: Hub, host: str = "127.0.0.1") -> Iterator[Hub]:
    """Run `hub` inside the block, at the address `hub.url`."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server((host, 0), handler)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    hub.url = f"http://{host}:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
