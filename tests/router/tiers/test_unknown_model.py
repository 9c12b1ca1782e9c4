"""The error for an unknown model of a cloud names the model and the known models."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from updraft.router.tiers.cloud import HttpCloudTier
from updraft.router.tiers.connection import CloudEndpoint
from updraft.router.tiers.failures import CloudFailure

UNKNOWN = {"error": {"message": "The model `moon` does not exist.", "type": "NotFoundError", "code": 404}}
MODELS = {"data": [{"id": name} for name in ("b", "a", "c" * 500)]}


@contextmanager
def cloud(refusal: tuple[int, dict[str, Any]], models: tuple[int, Any]) -> Iterator[tuple[str, list[str]]]:
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.reply(*refusal)

        def do_GET(self) -> None:
            self.reply(*models)

        def reply(self, status: int, body: Any) -> None:
            paths.append(self.path)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_arguments: object) -> None:
            """Keep the test's output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", paths
        server.shutdown()


def refused(url: str, model: str) -> CloudFailure:
    async def ask() -> None:
        tier = HttpCloudTier(CloudEndpoint(url))
        try:
            await tier.complete("chat/completions", {"model": model, "messages": []}, timeout_s=60.0)
        finally:
            await tier.aclose()

    with pytest.raises(CloudFailure) as raised:
        asyncio.run(ask())
    return raised.value


def test_the_models_there_are() -> None:
    with cloud((404, UNKNOWN), (200, MODELS)) as (url, _):
        failure = refused(url, "moon")
    message = failure.error.to_body()["error"]["message"]
    assert message == f"The model `moon` does not exist. {url} has no model 'moon'. Known models: a, b, {'c' * 100}."
    assert failure.error.status == 404


@pytest.mark.parametrize("models", [(500, {}), (200, []), (200, {"data": []}), (200, {"data": [{"id": "moon"}]})])
def test_clouds_own_error_without_a_model_list(models: tuple[int, Any]) -> None:
    with cloud((404, UNKNOWN), models) as (url, _):
        assert refused(url, "moon").error.message == "The model `moon` does not exist."


def test_another_refusal_asks_for_no_list() -> None:
    with cloud((400, {"error": {"message": "Bad temperature."}}), (200, MODELS)) as (url, paths):
        assert refused(url, "moon").error.message == "Bad temperature."
    assert paths == ["/v1/chat/completions"]
