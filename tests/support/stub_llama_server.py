"""Stub of the `llama-server` binary: takes its options, is ready after a moment, and returns made-up answers."""

from __future__ import annotations

import argparse
import json
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

READY_AFTER_S = 0.3
started = time.monotonic()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        loading = time.monotonic() - started < READY_AFTER_S
        self.reply(503 if loading else 200, {"data": []})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert self.path == "/v1/completions"
        assert set(body) == {"prompt", "max_tokens", "temperature", "logprobs"}
        self.reply(200, {"usage": {"completion_tokens": body["max_tokens"]}})

    def reply(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for option in ("-m", "-c", "-np", "-b", "-t", "-tb", "-fa", "--host", "--port"):
        parser.add_argument(option, required=True)
    options = parser.parse_args()
    HTTPServer((options.host, int(options.port)), Handler).serve_forever()
