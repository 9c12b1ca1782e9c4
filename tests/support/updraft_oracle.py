"""A cloud on a real socket that knows the answers to `QUESTIONS`, but returns an error for the first of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from updraft.bench.cascade.questions import pocket_questions

QUESTIONS = pocket_questions(125, seed=5)


@pytest.fixture(scope="module")
def oracle() -> Iterator[str]:
    """Run the cloud, and yield its URL. Each answer reports 20 prompt tokens and 10 completion tokens."""
    answers = {question.prompt.strip(): question.answer for question in QUESTIONS[1:]}

    class Oracle(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = answers.get(request["messages"][-1]["content"].strip())
            message = {"role": "assistant", "content": answer}
            body: dict[str, Any] = {
                "id": "c1", "object": "chat.completion", "created": 1, "model": "oracle",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30},
            }  # fmt: skip
            data = json.dumps(body if answer else {"error": {"message": "out of order", "type": "x"}}).encode()
            self.send_response(200 if answer else 400)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_arguments: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Oracle) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()
