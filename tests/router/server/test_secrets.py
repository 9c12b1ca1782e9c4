"""Secrets of a user: what a daemon writes, serves, starts and says holds none of them, in good times and bad."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import psutil
import pytest
from homes import home_in

ROOT = Path(__file__).parents[3]
PASSWORD, CLOUD_KEY, APP_KEY, PROMPT = "canary-password", "canary-cloud-key", "canary-app-key", "canary-prompt"
SECRETS = PASSWORD, CLOUD_KEY, APP_KEY, PROMPT, "canary-user"


class _Cloud(BaseHTTPRequestHandler):
    """A cloud that answers every other request, and else quotes the key and the prompt that it was sent."""

    answers = False

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).answers = not self.answers
        if self.answers:
            message = {"role": "assistant", "content": "Fine.", "refusal": None}
            choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "big"}
            return self._reply(200, {**answer, "choices": [choice], "usage": usage})
        message = f"I do not take {self.headers.get('authorization')} for that"
        return self._reply(
            401 if "stream" not in sent else 500, {"error": {"message": message, "type": "x", "code": "k"}}
        )

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": "big", "owned_by": "somebody"}]})

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_arguments: object) -> None:
        """Keep the test's output clean."""


@contextmanager
def _cloud() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Cloud", (_Cloud,), {})) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UPDRAFT_")}
    names = {"PYTHONPATH": str(ROOT / ".typing"), "UPDRAFT_HOME": str(home_in(tmp_path)), "COLUMNS": "200"}
    return kept | names | {"CLOUD_KEY": CLOUD_KEY, "APP_KEY": APP_KEY, "UPDRAFT_CLOUD_MODEL": "big"}


def _ask(url: str, headers: dict[str, str], **more: Any) -> httpx.Response:
    body = {"model": "auto", "user": "canary-user", "messages": [{"role": "user", "content": f"{PROMPT}?"}]}
    return httpx.post(f"{url}/v1/chat/completions", json={**body, **more}, headers=headers, timeout=60)


def test_an_address_with_a_password_is_refused_without_being_quoted(environment: dict[str, str]) -> None:
    environment["UPDRAFT_CLOUD_URL"] = f"http://operator:{PASSWORD}@127.0.0.1:9/v1"
    command = [sys.executable, "-m", "updraft", "serve", "--port", "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 2
    assert "cloud_api_key" in done.stderr
    assert PASSWORD not in done.stderr


@pytest.mark.slow
def test_keys_and_prompts_are_shown_nowhere(tmp_path: Path, environment: dict[str, str]) -> None:
    key = {"authorization": f"Bearer {APP_KEY}"}
    with _cloud() as port, (tmp_path / "log").open("w") as log:
        environment |= {"UPDRAFT_CLOUD_URL": f"http://127.0.0.1:{port}/v1", "UPDRAFT_CLOUD_API_KEY": CLOUD_KEY}
        command = [sys.executable, "-m", "updraft", "serve", "--port", "0", "--client-api-key-env", "APP_KEY"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as daemon:
            try:
                assert daemon.stdout is not None
                url = daemon.stdout.readline().split()[1]
                answers = [
                    _ask(url, key, **more)
                    for more in (
                        {}, {}, {"stream": False}, {"stream": True}, {"model": PROMPT[:6]}, {"temperature": 9},
                        {"updraft": {"private": True}}, {"messages": [{"role": "user", "content": [{"type": "x"}]}]},
                    )
                ]  # fmt: skip
                answers.append(httpx.post(f"{url}/v1/chat/completions", content=f'{{"{PROMPT}', headers=key))
                answers.append(_ask(url, {"authorization": f"Bearer {APP_KEY}x"}))
                answers += [
                    httpx.get(f"{url}{path}", headers=key) for path in ("/metrics", "/health", "/v1/models", "/x")
                ]
                words = [word for each in (psutil.Process(daemon.pid), *psutil.Process(daemon.pid).children(True))
                         for word in each.cmdline()]  # fmt: skip
            finally:
                daemon.terminate()
        commands = [[name, *more] for name in ("log", "usage", "why", "models") for more in ([], ["--json"])]
        runs = [
            subprocess.run(
                [sys.executable, "-m", "updraft", *words], env=environment, capture_output=True, text=True,
                check=False, timeout=240,
            )
            for words in [*commands, ["doctor", "--json"]]
        ]  # fmt: skip
    assert {answer.status_code for answer in answers} >= {200, 400, 401, 404}
    assert any(done.returncode == 0 and "big" in done.stdout for done in runs), [done.stderr for done in runs]
    shown = [f"{answer.text} {answer.headers}" for answer in answers] + words
    shown += [(tmp_path / "log").read_text(), *(done.stdout + done.stderr for done in runs)]
    shown += [path.read_bytes().decode("latin-1") for path in (tmp_path / "home").iterdir() if path.is_file()]
    assert [(secret, text) for text in shown for secret in SECRETS if secret in text] == []
