"""A model hub on a loopback port: repositories from memory, with the headers and the faults of a real one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = "c" * 40


@dataclass
class Hub:
    """`files` by repository and name. The first `breaks` downloads end half way; those called in `corrupt`
    arrive changed, those in `lost` not at all."""

    files: dict[str, dict[str, bytes]]
    breaks: int = 0
    corrupt: set[str] = field(default_factory=set[str])
    lost: set[str] = field(default_factory=set[str])
    ranges: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self.describe("/".join(parts[2:4]), tree="tree" in parts[4:])
            elif len(parts) >= 5 and parts[2] == "resolve":
                self.file("/".join(parts[:2]), "/".join(parts[4:]), body)
            else:
                self.send(404, b"{}")

        def describe(self, repo: str, *, tree: bool) -> None:
            if repo not in hub.files:
                self.send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
                return
            if tree:
                files = hub.files[repo].items()
                rows = [{"type": "file", "path": name, "size": len(data), "oid": COMMIT} for name, data in files]
                self.send(200, json.dumps(rows).encode())
                return
            siblings = [{"rfilename": name} for name in hub.files[repo]]
            self.send(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())

        def file(self, repo: str, name: str, body: bool) -> None:
            data = hub.files.get(repo, {}).get(name)
            if data is None:
                code = "EntryNotFound" if repo in hub.files else "RepoNotFound"
                self.send(404, b"", {"X-Error-Code": code})
                return
            digest = hashlib.sha256(data).hexdigest()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
            sent = data[:-1] + b"?" if name in hub.corrupt else data
            status, asked = 200, self.headers.get("Range")
            if asked:
                hub.ranges.append(asked)
                start = int(asked.removeprefix("bytes=").partition("-")[0])
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                status, sent = 206, sent[start:]
            if body and name in hub.lost:
                self.send(403, b"")
            elif body and hub.breaks:
                hub.breaks -= 1
                self.send(status, sent, headers, cut=len(sent) // 2)
            else:
                self.send(status, sent if body else b"", headers, length=len(sent))

        def send(
            self,
            status: int,
            data: bytes,
            headers: dict[str, str] | None = None,
            *,
            cut: int = 0,
            length: int | None = None,
        ) -> None:
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data) if length is None else length))
            self.end_headers()
            self.wfile.write(data[:cut] if cut else data)
            self.close_connection = bool(cut)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
