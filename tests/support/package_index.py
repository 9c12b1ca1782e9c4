"""A package index on a loopback socket that serves wheels from memory in the format that pip expects."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

#: Code in every wheel, which exits the process. Tests check that it never runs.
PLANT = "raise SystemExit('code of the package ran')\n"


def wheel(package: str, version: str, files: Mapping[str, bytes]) -> tuple[str, bytes]:
    """Return the file name and the bytes of a wheel with `files`, and with code that exits if it is run."""
    module = package.replace("-", "_")
    facts = f"{module}-{version}.dist-info"
    contents = {f"{module}/{name}": data for name, data in files.items()}
    contents[f"{module}/__init__.py"] = PLANT.encode()
    contents["setup.py"] = PLANT.encode()
    contents[f"{facts}/METADATA"] = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode()
    contents[f"{facts}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{name},,\n" for name in contents) + f"{facts}/RECORD,,\n"
    contents[f"{facts}/RECORD"] = record.encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return f"{module}-{version}-py3-none-any.whl", buffer.getvalue()


@dataclass
class Index:
    """A package index. `wheels`: by package and file name. `settings`: environment that limits pip to this index."""

    wheels: dict[str, dict[str, bytes]]
    url: str = ""
    # If given, downloads stop after half of the file, and end once this event is set.
    ending: Event | None = None
    received: list[str] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, str]:
        others = dict.fromkeys(("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT"), "")
        return {**others, "PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": f"{self.url}/simple", "PIP_RETRIES": "0"}


@contextmanager
def running(index: Index) -> Iterator[Index]:
    """Run `index` inside the block, at the address `index.url`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.received.append(self.path)
            kind, _, name = self.path.strip("/").partition("/")
            if kind == "simple" and name in index.wheels:
                links = (
                    f'<a href="/files/{file}#sha256={hashlib.sha256(data).hexdigest()}">{file}</a>'
                    for file, data in index.wheels[name].items()
                )
                return self.reply(200, f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode())
            bodies = [files[name] for files in index.wheels.values() if name in files]
            return self.reply(200, bodies[0]) if kind == "files" and bodies else self.reply(404, b"")

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if body.startswith(b"<!") else "application/octet-stream")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if index.ending is not None and not body.startswith(b"<!"):
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                index.ending.wait(60)
                return
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    index.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
