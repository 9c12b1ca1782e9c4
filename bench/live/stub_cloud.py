"""A cloud that knows the answers: a local OpenAI-compatible server that looks them up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CLOUD_MODEL = "answer-sheet"


@contextmanager
def stub_cloud(answers: Mapping[str, str]) -> Iterator[str]:
    """Run the server inside the block and yield its URL. `answers`: by the text of the last message."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # sends header and body in one write

        def do_GET(self) -> None:
            self._reply(200, {"object": "list", "data": [{"id": CLOUD_MODEL, "object": "model", "owned_by": "bench"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = answers.get(body["messages"][-1]["content"])
            if answer is None:
                self._reply(400, {"error": {"message": "Not on the answer sheet.", "type": "invalid_request"}})
            else:
                self._reply(200, _completion(answer))

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Log nothing."""

        def _reply(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            self.wfile.flush()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


def _completion(answer: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer}
    usage = {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return {"id": "c", "object": "chat.completion", "created": 0, "model": CLOUD_MODEL, "choices": choices} | {
        "usage": usage
    }
