"""A package index on a loopback socket: wheels from memory, listed as pip wants them."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

#: Code of a wheel's module, whose effect on import or run the tests look for.
PLANT = "raise SystemExit('code of the package ran')\n"


def wheel(package: str, version: str, files: Mapping[str, bytes]) -> tuple[str, bytes]:
    """The name and bytes of a wheel that holds `files`, and code that fails when it runs."""
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
    """`wheels` by package and file name. `settings`: the environment in which pip asks this index and no other."""

    wheels: dict[str, dict[str, bytes]]
    url: str = ""
    # If given, a download begins but does not end before the event is set.
    ending: Event | None = None
    received: list[str] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, str]:
        others = dict.fromkeys(("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT"), "")
        return {**others, "PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": f"{self.url}/simple", "PIP_RETRIES": "0"}


@contextmanager
def running(index: Index) -> Iterator[Index]:
    """The index, answering at `index.url`."""

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
