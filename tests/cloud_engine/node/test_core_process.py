"""The node's two processes as users meet them: what each loads, and what happens when one dies or a client leaves."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tiny_model import write_model
from updraft.cloud_engine.engine.process.core_process import HUNG_S

pytestmark = pytest.mark.slow  # such files come first

CONTEXT = 8192
ENDLESS: dict[str, Any] = {"prompt": "Once", "max_tokens": 8000, "temperature": 0, "repetition_detection": False}


@dataclass
class Node:
    url: str
    server: subprocess.Popen[str]

    @property
    def core(self) -> psutil.Process:
        """The other child renders chat templates."""
        children = psutil.Process(self.server.pid).children()
        (core,) = (child for child in children if not child.cmdline()[-1].endswith("render_child"))
        return core

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={"model": "tiny", **body}, timeout=300)

    def stream(self, **body: Any) -> AbstractContextManager[httpx.Response]:
        body = {"model": "tiny", "stream": True, **body}
        return httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=300)

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"updraft_engine_{name} "))

    def health(self) -> httpx.Response:
        return httpx.get(f"{self.url}/health")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", 0, context=CONTEXT)


Start = Callable[..., AbstractContextManager[Node]]


@pytest.fixture(scope="module")
def started(folder: Path, spawned: Any) -> Start:
    @contextmanager
    def start(*flags: str) -> Iterator[Node]:
        command = ("-m", "updraft", "node", "--port", "0", "--model", str(folder), "--threads", "1")
        with spawned(*command, "--exit-with-parent", *flags) as process:
            yield Node(process.url, process.popen)

    return start


@pytest.fixture(scope="module")
def node(started: Start) -> Iterator[Node]:
    """Serves one request at a time, by 16 tokens a step."""
    with started("--max-num-seqs", "1", "--max-num-batched-tokens", "16") as node:
        yield node


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> float:
    """Seconds until `condition` held."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s
        time.sleep(0.01)  # each look is a request
    return time.monotonic() - started


def libraries(process: psutil.Process) -> set[str]:
    return {Path(mapped.path).name for mapped in process.memory_maps()}


def test_a_queue_of_one_and_no_prefix_cache(started: Start) -> None:
    flags = ("--max-num-seqs", "1", "--max-waiting", "1", "--no-enable-prefix-caching", "--enforce-eager")
    with started(*flags) as node:
        for _ in range(2):
            usage = node.post(prompt="Once upon a time" * 9, max_tokens=1).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        with leaving_client(node, ENDLESS):
            wait_for(lambda: node.metric("running") == 1)
            with leaving_client(node, ENDLESS):
                wait_for(lambda: node.metric("waiting") == 1)
                refused = node.post(prompt="Hello", max_tokens=1)
    assert (refused.status_code, "queue is full (1 requests" in refused.text) == (503, True)


def test_only_the_core_loads_torch(node: Node) -> None:
    assert node.post(prompt="Hello", max_tokens=4).status_code == 200
    loaded = [
        any("torch" in name for name in libraries(psutil.Process(pid))) for pid in (node.server.pid, node.core.pid)
    ]
    assert loaded == [False, True]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_decoding_frees_the_engine(node: Node, stream: bool) -> None:
    with leaving_client(node, {**ENDLESS, "stream": stream}):
        wait_for(lambda: node.metric("running") == 1)
        tokens = node.metric("generated_tokens_total")
        wait_for(lambda: node.metric("generated_tokens_total") > tokens + 10)
    wait_for(lambda: node.metric("running") == 0)
    assert node.metric("generated_tokens_total") < tokens + ENDLESS["max_tokens"] / 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_during_its_prompt_frees_the_engine(node: Node, stream: bool) -> None:
    tokens = node.metric("generated_tokens_total")
    prompt = f"{time.monotonic()}" * 500  # nothing of it is cached
    with leaving_client(node, {**ENDLESS, "prompt": prompt[:8000], "max_tokens": 10, "stream": stream}):
        wait_for(lambda: node.metric("kv_blocks_used") >= 20)
        assert node.metric("running") == 1
    wait_for(lambda: node.metric("running") == 0)
    assert node.metric("generated_tokens_total") == tokens


def test_a_slow_prompt_is_left_as_fast(started: Start, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A node whose model needs most of a second for a full token budget."""
    folder = write_model(tmp_path_factory.mktemp("models") / "slow", 0, context=CONTEXT, width=1024, layers=6)
    with started("--model", str(folder), "--max-step-ms", "100") as node:
        assert node.post(model="slow", prompt="x" * 300, max_tokens=1).status_code == 200  # it learns its pace
        began = time.monotonic()
        assert node.post(model="slow", prompt=(f"{began}" * 300)[:1500], max_tokens=1).status_code == 200
        whole_s = time.monotonic() - began
        left_s: list[float] = []
        for _ in range(5):  # others may have the processor once or twice
            prompt = f"{time.monotonic()}" * 300
            with leaving_client(node, {"model": "slow", "prompt": prompt[:4000], "max_tokens": 10}):
                wait_for(lambda: node.metric("running") == 1)
            left_s.append(wait_for(lambda: node.metric("running") == 0))
    assert statistics.median(left_s) < whole_s / 10  # a step of the whole budget takes about a third


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue_is_forgotten(node: Node, stream: bool) -> None:
    with leaving_client(node, {**ENDLESS, "stream": True}):
        wait_for(lambda: node.metric("running") == 1)
        with leaving_client(node, {**ENDLESS, "stream": stream}):
            wait_for(lambda: node.metric("waiting") == 1)
        wait_for(lambda: node.metric("waiting") == 0)
        assert node.metric("running") == 1
    wait_for(lambda: node.metric("running") == 0)


@contextmanager
def leaving_client(node: Node, body: dict[str, Any]) -> Iterator[None]:
    """A client that has sent its request, and closes its connection at the end of the block."""
    host, port = node.url.removeprefix("http://").split(":")
    data = json.dumps({"model": "tiny", **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + data)
        yield


def test_killed_core_fails_every_request(started: Start) -> None:
    with (
        started("--max-num-seqs", "2") as node,
        concurrent.futures.ThreadPoolExecutor() as pool,
        node.stream(**ENDLESS) as first,
        node.stream(**ENDLESS) as second,
    ):
        whole, queued = (pool.submit(node.post, **ENDLESS, n=n) for n in (1, 2))
        wait_for(lambda: node.metric("waiting") == 2)
        node.core.kill()
        assert wait_for(lambda: node.health().status_code == 503) < HUNG_S / 2
        error = node.health().json()["error"]
        assert (error["type"], error["code"]) == ("engine_error", "engine_down")
        assert "SIGKILL" in error["message"]
        for response in (first, second):
            assert response.status_code == 200
            last = [line for line in response.iter_lines() if line][-1]
            assert json.loads(last.removeprefix("data: "))["error"] == error
        for response in (whole.result(), queued.result(), node.post(**ENDLESS)):
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"] == error
        assert node.metric("healthy") == node.metric("running") == 0
        node.server.send_signal(signal.SIGTERM)
        assert node.server.wait(60) == 0


def test_a_restarted_core_serves_again(started: Start) -> None:
    with started("--restart") as node:
        before = node.post(prompt="Hello", max_tokens=10, temperature=0).json()["choices"]
        node.core.kill()
        assert wait_for(lambda: node.health().status_code == 503) < HUNG_S / 2
        assert node.health().json()["error"]["code"] == "engine_restarting"
        refused = node.post(**ENDLESS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_restarting")
        wait_for(lambda: node.health().status_code == 200)
        assert node.post(prompt="Hello", max_tokens=10, temperature=0).json()["choices"] == before
        assert node.metric("restarts_total") == 1


def text_of(response: httpx.Response) -> list[str]:
    """The text of each answer of a stream."""
    texts: dict[int, str] = {}
    for line in response.iter_lines():
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[index] for index in sorted(texts)]


def test_answers_continue_on_the_next_core(started: Start) -> None:
    """Streams of one and several answers, a whole answer and a queued one, twice interrupted by SIGKILL."""
    long = {"prompt": "Once", "max_tokens": 1500, "repetition_detection": False, "ignore_eos": True}
    bodies = [{**long, "temperature": 0}, {**long, "temperature": 1.2, "seed": 5, "n": 2}]
    with started("--restart", "--max-num-seqs", "4") as node, concurrent.futures.ThreadPoolExecutor() as pool:
        expected = [[choice["text"] for choice in node.post(**body).json()["choices"]] for body in bodies]

        def read(body: dict[str, Any]) -> list[str]:
            with node.stream(**body) as response:
                return text_of(response)

        streams = [pool.submit(read, body) for body in bodies]
        whole, queued = (pool.submit(node.post, **body) for body in (bodies[0], bodies[1]))
        for restarts in (1, 2):
            wait_for(lambda: node.health().status_code == 200 and node.metric("generated_tokens_total") > 100)
            node.core.kill()
            wait_for(lambda restarts=restarts: node.metric("restarts_total") == restarts)
        assert [stream.result(60) for stream in streams] == expected
        assert [choice["text"] for choice in whole.result(60).json()["choices"]] == expected[0]
        assert [choice["text"] for choice in queued.result(60).json()["choices"]] == expected[1]
        assert node.metric("restarts_total") == 2


def test_sleep_and_wake(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPDRAFT_NODE_ADMIN_KEY", "operator")
    monkeypatch.setenv("UPDRAFT_NODE_API_KEY", "client-key")
    operator, caller = ({"authorization": f"Bearer {key}"} for key in ("operator", "client-key"))
    with started("--drain-timeout-s", "0.5") as node, httpx.Client(base_url=node.url, timeout=300) as client:
        asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 10, "temperature": 0}
        expected = client.post("/v1/completions", json=asked, headers=caller).json()["choices"]
        assert client.post("/sleep").status_code == client.post("/sleep", headers=caller).status_code == 401
        assert client.post("/v1/completions", json=asked, headers=operator).status_code == 401
        assert client.post("/sleep?level=3", headers=operator).status_code == 400
        with client.stream("POST", "/v1/completions", json={**asked, **ENDLESS, "stream": True}, headers=caller):
            busy = client.post("/sleep", headers=operator)
            assert (busy.status_code, busy.json()["error"]["code"]) == (409, "conflict")
            assert client.get("/health").status_code == 200
        core = node.core
        for level in (1, 2, 1):
            assert client.post(f"/sleep?level={level}", headers=operator).json() == {"is_sleeping": True}
            assert client.get("/is_sleeping", headers=operator).json() == {"is_sleeping": True}
            refused = client.post("/v1/completions", json=asked, headers=caller)
            for answer in (refused, client.get("/health")):
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "sleeping")
            assert core.is_running() == (level == 1)
            assert client.post("/wake_up", headers=operator).json() == {"is_sleeping": False}
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json=asked, headers=caller).json()["choices"] == expected
            core = node.core
        client.post("/sleep?level=2", headers=operator)
        node.server.send_signal(signal.SIGTERM)
        assert node.server.wait(60) == 0


def test_sleep_is_refused_without_an_admin_key(node: Node) -> None:
    refused = httpx.post(f"{node.url}/sleep")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")


def test_a_core_does_not_outlive_its_face(started: Start) -> None:
    with started() as node, node.stream(**ENDLESS):
        core = node.core
        sockets = Path(core.cmdline()[-1])
        assert sockets.stat().st_mode & 0o777 == 0o700
        node.server.kill()
        wait_for(lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE)
        assert not sockets.exists()


def test_sigterm_lets_requests_finish(started: Start) -> None:
    with started("--drain-timeout-s", "600") as node, httpx.Client(base_url=node.url) as client:
        core = node.core
        with node.stream(**{**ENDLESS, "max_tokens": 1500}) as response:
            lines = response.iter_lines()
            next(lines)
            node.server.send_signal(signal.SIGTERM)
            wait_for(lambda: client.get("/health").status_code == 503)
            refused = client.post("/v1/completions", json={"model": "tiny", **ENDLESS})
            for answer in (refused, client.get("/health")):
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
                assert answer.headers["retry-after"] == "1"
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert node.server.wait(60) == 0
        assert not core.is_running()


def test_requests_at_the_drain_deadline_get_a_typed_error(started: Start) -> None:
    with started("--drain-timeout-s", "0.3") as node, concurrent.futures.ThreadPoolExecutor() as pool:
        with node.stream(**ENDLESS) as response:
            whole = pool.submit(node.post, **ENDLESS)
            wait_for(lambda: node.metric("running") == 2)
            node.server.send_signal(signal.SIGTERM)
            last = [line for line in response.iter_lines() if line][-1]
            assert json.loads(last.removeprefix("data: "))["error"]["type"] == "overloaded_error"
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["type"] == "overloaded_error"
        assert node.server.wait(60) == 0


def test_a_broken_chat_template_is_refused_at_the_start(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", 0)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}")
    command = [sys.executable, "-m", "updraft", "node", "--model", str(folder), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "chat template is not valid Jinja: Unexpected end of template." in done.stderr
