"""A cloud whose answers are as long as their token limits allow, and that records the true cost of each answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROMPT_TOKENS = 10


@dataclass
class LongCloud:
    """`tokens`: length of an answer without a limit. `chunk`: tokens per stream event. `word`: text of a token.

    `hidden`: tokens generated before the first text of a stream. `honours`: whether the request's limit ends an answer.
    `omits`: tokens that the usage counts only in `total_tokens`.
    """

    url: str = ""
    tokens: int = 16_000
    chunk: int = 1
    word: str = "word "
    hidden: int = 0
    omits: int = 0
    reports: bool = True
    honours: bool = True
    # Number of requests to end without an answer, by closing the connection.
    breaks: int = 0
    # Whether streams end without a finish reason.
    cuts: bool = False
    # Error messages by name of a field: requests with this field are refused.
    refuses: dict[str, str] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    costs: list[tuple[int, int]] = field(default_factory=list)
    lock: threading.Condition = field(default_factory=threading.Condition)
    stopped: threading.Event = field(default_factory=threading.Event)

    @property
    def written(self) -> int:
        return sum(written for _, written in self.costs)

    def usd(self, prompt: float, answer: float) -> float:
        return sum(read * prompt + written * answer for read, written in self.costs) / 1e6

    def book(self, written: int) -> None:
        with self.lock:
            self.costs.append((PROMPT_TOKENS, written))
            self.lock.notify_all()

    def ended(self, answers: int) -> bool:
        """Wait until this number of answers has ended, including answers whose reader has left."""
        with self.lock:
            return self.lock.wait_for(lambda: len(self.costs) >= answers, 60)

    def asked(self, requests: int) -> bool:
        """Wait until this number of requests has arrived."""
        with self.lock:
            return self.lock.wait_for(lambda: len(self.requests) >= requests, 60)

    def length(self, body: dict[str, Any]) -> int:
        caps = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name)]
        return min(self.tokens, *caps) if caps and self.honours else self.tokens


def _handler(cloud: LongCloud) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.answer(200, {"object": "list", "data": [{"id": "big", "object": "model", "owned_by": "x"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with cloud.lock:
                cloud.requests.append(body)
                cloud.lock.notify_all()
            for name, message in cloud.refuses.items():
                if body.get(name) is not None:
                    error = {"message": message, "type": "invalid_request_error", "param": name}
                    if "context" in message:  # as Updraft's nodes and OpenAI refuse it
                        error |= {"param": "prompt", "code": "context_length_exceeded"}
                    self.answer(400, {"error": error})
                    return
            length = cloud.length(body)
            if cloud.breaks:
                cloud.breaks -= 1
                cloud.book(0)
                self.close_connection = True
                return
            if body.get("stream"):
                self.stream(body, length)
                return
            prompts = body.get("prompt")
            count = (body.get("n") or 1) * (len(prompts) if isinstance(prompts, list) else 1)
            cloud.book(length * count)
            content = {"message": {"role": "assistant", "content": "Long."}, "finish_reason": "stop", "text": "Long."}
            answer = {"id": "a", "object": "chat.completion", "created": 1, "model": "big"}
            answer["choices"] = [{"index": index, **content} for index in range(count)]
            if cloud.reports:
                answer["usage"] = usage(length * count, cloud.omits)
            self.answer(200, answer)

        def stream(self, body: dict[str, Any], length: int) -> None:
            """Stream an answer slowly, with a small send buffer, so that the server notices when the client leaves."""
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True
            self.connection.setsockopt(6, 1, 1)
            self.connection.setsockopt(1, 7, 4096)
            written = min(cloud.hidden, length)
            head = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "big"}
            try:
                while written < length and not cloud.stopped.is_set():
                    tokens = min(cloud.chunk, length - written)
                    piece = {"index": 0, "delta": {"content": cloud.word * tokens}, "finish_reason": None}
                    self.event({**head, "choices": [piece]})
                    written += tokens
                    cloud.stopped.wait(tokens / 20_000)
                if cloud.cuts:
                    return
                last = {"index": 0, "delta": {}, "finish_reason": "length" if length < cloud.tokens else "stop"}
                self.event({**head, "choices": [last]})
                if cloud.reports:
                    self.event({**head, "choices": [], "usage": usage(written, cloud.omits)})
                self.wfile.write(b"data: [DONE]\n\n")
            except OSError:
                pass
            finally:
                cloud.book(written)

        def event(self, event: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()

        def answer(self, status: int, body: dict[str, Any]) -> None:
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    return Handler


def usage(written: int, omits: int = 0) -> dict[str, int]:
    total = PROMPT_TOKENS + written
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": max(0, written - omits), "total_tokens": total}


class _Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = False


@contextmanager
def long_cloud(**settings: Any) -> Iterator[LongCloud]:
    cloud = LongCloud(**settings)
    server = _Server(("127.0.0.1", 0), _handler(cloud))
    cloud.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield cloud
    finally:
        cloud.stopped.set()
        server.shutdown()
        thread.join()
        server.server_close()
