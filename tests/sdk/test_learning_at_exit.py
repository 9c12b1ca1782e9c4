"""Short scripts with `learn = true`: what they leave behind as they end, over sockets."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from updraft.router.tasks.store import TaskStore

SCRIPT = """
import sys
from updraft import OpenAI

client = OpenAI(local=sys.argv[1], cloud_url=sys.argv[1], cloud_model="big", learn=sys.argv[2], ledger=None)
for number in range(6):
    messages = [{"role": "user", "content": f"{sys.argv[3]} {number}"}]
    client.chat.completions.create(model="auto", messages=messages, metadata={"task": "sums"})
if sys.argv[3] == "close":
    client.close()
"""


class Answering(BaseHTTPRequestHandler):
    """The device's server and the cloud in one: each question is answered alike."""

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"object": "list", "data": [{"id": "small", "object": "model"}]}))

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        body: dict[str, Any] = {"id": "c", "created": 1, "model": request["model"]}
        if request.get("stream"):
            choice = {"index": 0, "delta": {"role": "assistant", "content": "7"}, "finish_reason": "stop"}
            events = [{**body, "object": "chat.completion.chunk", "choices": [choice], "usage": usage}]
            self._send(
                "text/event-stream", "".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n"
            )
        else:
            choice = {"index": 0, "message": {"role": "assistant", "content": "7"}, "finish_reason": "stop"}
            self._send(
                "application/json",
                json.dumps({**body, "object": "chat.completion", "choices": [choice], "usage": usage}),
            )

    def _send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.mark.parametrize("end", ["close", "none"])
def test_a_script_that_ends_loses_no_comparison(url: str, tmp_path: Path, end: str) -> None:
    """A connection that was cancelled at the exit looked like a failure of the device, with a traceback."""
    file = tmp_path / "tasks.sqlite3"
    for _ in range(4):
        command = [sys.executable, "-c", SCRIPT, url, str(file), end]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
    with closing(TaskStore(file)) as store:
        (task,) = store.tasks()
        samples = store.samples(task.id, store.newest_pair())
    assert samples and {(each.local, each.cloud, each.fault) for each in samples} == {(1.0, 1.0, "")}
