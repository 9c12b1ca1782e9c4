"""The gateway as a process in front of node processes that answer, hang and die."""

from __future__ import annotations

import functools
import re
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from full_cloud import running_full_cloud
from gateway_keys import make_key
from ports import free_port
from server_processes import FAKE_NODE
from waiting import wait_for

pytestmark = pytest.mark.slow  # such files come first

GATEWAY = ("-m", "updraft", "gateway", "--port", "0")


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@dataclass
class Running:
    url: str
    key: str
    admin_key: str
    db: Path
    process: Any
    # How many rows of the database are of others.
    before: int = 0

    def client(self, **options: Any) -> openai.OpenAI:
        settings = {"api_key": self.key, "max_retries": 0, "timeout": 120, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **settings)

    def rows(self) -> list[dict[str, Any]]:
        """Everything metered; asking for the totals writes out what is pending."""
        self.admin("usage")
        with closing(sqlite3.connect(self.db)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute("SELECT * FROM usage ORDER BY id")][self.before :]

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def healthy(self) -> int:
        return sum(node["healthy"] for node in self.admin("nodes"))

    def admin(self, what: str) -> list[dict[str, Any]]:
        headers = {"authorization": f"Bearer {self.admin_key}"}
        return httpx.get(f"{self.url}/admin/{what}", headers=headers, timeout=60).raise_for_status().json()[what]


def start_gateway(spawn: Callable[..., Any], folder: Path, *nodes: Any, flags: Sequence[str] = ()) -> Running:
    keys, db = folder / "keys", folder / "usage.sqlite"
    key, admin_key = make_key(keys, "tester"), make_key(keys, "operator", "admin", "usage")
    urls = [word for node in nodes for word in ("--node", node.url)]
    process = spawn(*GATEWAY, *urls, "--keys", str(keys), "--ledger", str(db), "--exit-with-parent", *flags)
    return Running(process.url, key, admin_key, db, process.popen)


@pytest.fixture
def spawn_gateway(spawn: Any, tmp_path: Path) -> Callable[..., Running]:
    return functools.partial(start_gateway, spawn, tmp_path)


@pytest.fixture
def gateway(spawn_gateway: Callable[..., Running], fake_node: Any) -> Running:
    return spawn_gateway(fake_node)


@pytest.fixture(scope="module")
def kept_spawn(spawned: Any) -> Iterator[Callable[..., Any]]:
    with ExitStack() as stack:
        yield lambda *command: stack.enter_context(spawned(*command))


@pytest.fixture(scope="module")
def kept_gateway(kept_spawn: Any, fake_node: Any, tmp_path_factory: pytest.TempPathFactory) -> Running:
    return start_gateway(kept_spawn, tmp_path_factory.mktemp("gateway"), fake_node)


@pytest.fixture
def shared(kept_gateway: Running) -> Running:
    """One for all who leave it as it is."""
    return replace(kept_gateway, before=len(kept_gateway.rows()))


@pytest.fixture(scope="module")
def kept_trio(kept_spawn: Any, tmp_path_factory: pytest.TempPathFactory) -> Running:
    nodes = [kept_spawn(str(FAKE_NODE), "--heartbeat", "0.2") for _ in range(3)]
    return start_gateway(kept_spawn, tmp_path_factory.mktemp("trio"), *nodes)


@pytest.fixture
def trio(kept_trio: Running) -> Running:
    """A gateway with three nodes, for all who leave them alive."""
    return replace(kept_trio, before=len(kept_trio.rows()))


def test_answers_and_meters(gateway: Running) -> None:
    with gateway.client() as client:
        whole = client.chat.completions.with_raw_response.create(
            model="echo",
            messages=say("abc"),
            prediction={"type": "content", "content": "abx"},
            extra_headers={"x-request-id": "mine"},
        )
        assert whole.headers["x-request-id"] == "mine"
        assert whole.parse().choices[0].message.content == "abc"
        chunks = list(client.chat.completions.create(model="echo", messages=say("hello"), stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"
        assert all(chunk.choices and chunk.usage is None for chunk in chunks)  # the usage was for the meter only
        *_, last = client.chat.completions.create(
            model="echo", messages=say("hello"), stream=True, stream_options={"include_usage": True}
        )
        assert last.usage and last.usage.completion_tokens == 5
        assert client.completions.create(model="echo", prompt="user\nxy").choices[0].text == "xy"
        assert [model.id for model in client.models.list()] == ["echo"]
    rows = gateway.rows()
    assert [row["completion_tokens"] for row in rows] == [3, 5, 5, 2]
    assert [row["status"] for row in rows] == [200] * 4
    assert rows[0]["request_id"] == "mine"
    assert (rows[0]["accepted_prediction_tokens"], rows[0]["rejected_prediction_tokens"]) == (2, 1)
    for row in rows:
        assert row["key_name"] == "tester"
        assert row["model"] == "echo"
        assert row["prompt_tokens"] > 0
        assert row["bytes"] > 50
        assert 0 < row["ttft_ms"] <= row["latency_ms"]
    usage = gateway.admin("usage")
    assert usage[0]["requests"] == 4
    assert usage[0]["completion_tokens"] == 15


def test_a_route_that_the_node_lacks_is_a_typed_error(shared: Running) -> None:
    for path in ("/v1/rerank", "/v1/moderations"):
        body = {"model": "echo", "query": "a", "documents": ["b"]}
        answer = httpx.post(f"{shared.url}{path}", json=body, headers=shared.headers, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_keys(gateway: Running) -> None:
    for wrong in ("", "nonsense", gateway.key + "x"):
        headers = {"authorization": f"Bearer {wrong}"} if wrong else {}
        for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/admin/nodes")):
            response = httpx.request(method, f"{gateway.url}{path}", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
    for path in ("nodes", "usage"):
        response = httpx.get(f"{gateway.url}/admin/{path}", headers=gateway.headers)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "permission_denied")
    assert gateway.key.encode() not in gateway.db.with_name("keys").read_bytes()
    assert gateway.rows() == [], "a stranger leaves a count, not a row"
    assert 'updraft_gateway_requests_total{status="401"} 3.0\n' in httpx.get(f"{gateway.url}/metrics").text


def test_bad_requests_and_rows(shared: Running) -> None:
    good = {"model": "echo", "messages": say("hi")}
    cases: list[tuple[Any, int, str]] = [
        (b"{", 400, "invalid_json"),
        (b"[1]", 400, "invalid_value"),
        (b'{"model": "echo", "stream": true, "\xff": 1}', 400, "invalid_json"),
        ({**good, "model": "other"}, 404, "model_not_found"),
        ({**good, "messages": []}, 400, "invalid_value"),
        ({**good, "messages": say("x" * 1_000_000)}, 400, "context_length_exceeded"),
        ({**good, "temperature": -1}, 400, "invalid_value"),
        ({**good, "max_tokens": 0, "stream": True}, 400, "invalid_value"),
        ({**good, "use_beam_search": True}, 400, "unsupported_parameter"),
        ({**good, "stream_options": {"include_usage": True}}, 400, "invalid_value"),
    ]
    with httpx.Client(base_url=shared.url, headers=shared.headers, timeout=120) as client:
        for body, status, code in cases:
            content = {"content": body} if isinstance(body, bytes) else {"json": body}
            response = client.post("/v1/chat/completions", **content)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code), body
        assert client.get("/v1/chat/completions").status_code == 405
        assert client.get("/nowhere").json()["error"]["code"] == "not_found"
        assert client.post("/v1/chat/completions", content=b"x" * 9_000_000).status_code == 413
        assert client.post("/v1/chat/completions", json=good).status_code == 200
    rows = shared.rows()
    assert [row["status"] for row in rows] == [status for _, status, _ in cases] + [413, 200]
    assert {row["key_name"] for row in rows} == {"tester"}


def test_embeddings_are_relayed_and_metered(shared: Running) -> None:
    with shared.client() as client:
        reply = client.embeddings.create(model="echo", input=["abc", "de"])
        assert [item.embedding for item in reply.data] == [[3.0], [2.0]]
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="echo", input="")
    shown = [(row["status"], row["prompt_tokens"], row["completion_tokens"]) for row in shared.rows()]
    assert shown == [(200, 5, 0), (400, 0, 0)]


def test_usage_is_on_the_wire_only_where_it_was_asked_for(shared: Running) -> None:
    request: dict[str, Any] = {"model": "echo", "messages": say('"usage":null'), "stream": True}
    with httpx.Client(base_url=shared.url, headers=shared.headers, timeout=120) as client:
        plain = client.post("/v1/chat/completions", json=request).text
        asked = client.post("/v1/chat/completions", json={**request, "stream_options": {"include_usage": True}}).text
    assert '"usage"' not in plain
    assert plain.endswith("data: [DONE]\n\n")
    assert asked.count('"usage":null') == plain.count("data: ") - 1
    assert asked.count('"usage":{') == 1
    assert [row["completion_tokens"] for row in shared.rows()] == [len('"usage":null')] * 2


def asked_by_four(gateway: Running) -> tuple[list[threading.Thread], list[str]]:
    """Four running requests, and where their answers will be."""
    answers: list[str] = []

    def ask() -> None:
        with gateway.client() as client:
            answers.append(str(client.chat.completions.create(model="echo", messages=say("x" * 40)).choices[0]))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    return threads, answers


def test_node_killed_before_the_first_byte(spawn_gateway: Any, spawn_held_node: Any, hold: Path) -> None:
    """Both nodes get the poisoned request once the first died; a harmless one that was in flight moves over."""
    nodes = [spawn_held_node() for _ in range(2)]
    gateway = spawn_gateway(*nodes)
    threads, answers = asked_by_four(gateway)
    wait_for(lambda: all(running(node.url) == 2 for node in nodes))  # least loaded: two each
    nodes[0].popen.kill()
    killed = time.monotonic()
    hold.unlink()
    for thread in threads:
        thread.join()
    assert time.monotonic() - killed < 60, "half the time that a first token may take"
    assert len([answer for answer in answers if "x" * 40 in answer]) == 4
    rows = gateway.rows()
    assert sorted(row["retries"] for row in rows) == [0, 0, 1, 1]
    assert {row["node"] for row in rows} == {nodes[1].url}
    assert gateway.healthy() == 1


def test_unanswered_requests_of_a_hanging_node_move_to_another(
    spawn_gateway: Any, spawn_held_node: Any, hold: Path
) -> None:
    nodes = [spawn_held_node() for _ in range(2)]
    gateway = spawn_gateway(*nodes)
    threads, answers = asked_by_four(gateway)
    wait_for(lambda: all(running(node.url) == 2 for node in nodes))
    nodes[0].popen.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    hold.unlink()
    for thread in threads:
        thread.join()
    assert time.monotonic() - stopped < 60, "three late probes are enough: half the time that a first token may take"
    assert len([answer for answer in answers if "x" * 40 in answer]) == 4
    assert sorted(row["retries"] for row in gateway.rows()) == [0, 0, 1, 1]
    nodes[0].popen.send_signal(signal.SIGCONT)
    wait_for(lambda: gateway.healthy() == 2)


@pytest.fixture
def pair(spawn_gateway: Any, spawn_fake_node: Any) -> Iterator[tuple[Running, list[Any]]]:
    nodes = [spawn_fake_node("--delay", "0.02") for _ in range(2)]
    yield spawn_gateway(*nodes), nodes


def test_idle_nodes_take_turns(pair: tuple[Running, list[Any]]) -> None:
    gateway, nodes = pair
    with gateway.client() as client:
        for _ in range(6):
            client.chat.completions.create(model="echo", messages=say("a"))
    served = [row["node"] for row in gateway.rows()]
    assert {url: served.count(url) for url in served} == {node.url: 3 for node in nodes}


def test_a_request_that_kills_nodes_in_mid_stream_kills_two(spawn_gateway: Any, spawn_fake_node: Any) -> None:
    gateway = spawn_gateway(*(spawn_fake_node("--delay", "0.02") for _ in range(3)))
    texts: list[str] = []
    with gateway.client() as client:
        with pytest.raises(openai.APIError, match="send the request again") as caught:
            for chunk in client.chat.completions.create(model="echo", messages=say("die-middle"), stream=True):
                texts.append(chunk.choices[0].delta.content or "")
        assert caught.value.type == "upstream_error"
        assert "".join(texts) == "die-m"
        assert client.chat.completions.create(model="echo", messages=say("next")).choices[0].message.content == "next"
        with pytest.raises(openai.APIStatusError) as refused:
            client.chat.completions.create(model="echo", messages=say("die-middle"), stream=True)
        assert (refused.value.status_code, refused.value.code) == (502, "request_quarantined")
        assert refused.value.response.headers["x-should-retry"] == "false"
    rows = gateway.rows()
    assert [row["status"] for row in rows] == [502, 200, 502]
    assert [row["retries"] for row in rows] == [1, 0, 0]
    assert (rows[0]["completion_tokens"], rows[0]["prompt_tokens"] > 0) == (5, True), "what came before it died"


def test_an_engine_that_fails_in_mid_stream_is_replaced_once(spawn_gateway: Any, spawn_fake_node: Any) -> None:
    nodes = [spawn_fake_node() for _ in range(3)]
    gateway = spawn_gateway(*nodes)
    with gateway.client() as client:
        with pytest.raises(openai.APIError, match="the cache caught fire"):
            list(client.chat.completions.create(model="echo", messages=say("break-middle"), stream=True))
        assert client.chat.completions.create(model="echo", messages=say("next")).choices[0].message.content == "next"
    broken, following = gateway.rows()
    assert (broken["status"], broken["retries"]) == (502, 1)
    assert following["status"] == 200  # by the third node, or one whose engine is back


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["fail-first", "fail-middle"])
def test_a_request_that_fails_alone_is_not_retried(text: str, stream: bool, trio: Running) -> None:
    with trio.client(max_retries=2) as client:
        with pytest.raises(openai.APIError, match="the engine failed on this request") as caught:
            list(client.chat.completions.create(model="echo", messages=say(text), stream=stream))
        assert caught.value.code == "request_failed"
        if not stream:
            assert isinstance(caught.value, openai.InternalServerError)
            assert caught.value.response.headers["x-should-retry"] == "false"
        assert client.chat.completions.create(model="echo", messages=say("next")).choices[0].message.content == "next"
    failed, following = trio.rows()
    assert (failed["retries"], following["status"]) == (0, 200)


def lines_of_a_slow_stream(gateway: Running, text: str, n: int) -> list[str]:
    body = {"model": "echo", "messages": say(text), "stream": True, "n": n}
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, headers=gateway.headers) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line]
    assert lines.count(": keep-alive") >= 4
    return lines


@pytest.mark.parametrize("n", [1, 2])
def test_a_node_that_dies_after_its_first_comments_is_replaced(
    n: int, spawn_gateway: Any, spawn_fake_node: Any
) -> None:
    """Also if no node could continue the answer."""
    nodes = [spawn_fake_node("--heartbeat", "0.2") for _ in range(2)]
    lines = lines_of_a_slow_stream(spawn_gateway(*nodes), "read-slowly die-first", n)
    # the sockets of a killed process close before its parent sees it end
    assert all(node.popen.wait(60) == -signal.SIGKILL for node in nodes) and "error" in lines[-1]


@pytest.mark.parametrize("text", ["read-slowly", "read-slowly fail-first"])
@pytest.mark.parametrize("n", [1, 2])
def test_comments_keep_a_stream_open_while_its_prompt_is_read(text: str, n: int, trio: Running) -> None:
    lines = lines_of_a_slow_stream(trio, text, n)
    if "fail" in text:
        assert "request_failed" in lines[-1]
        wait_for(lambda: [row["retries"] for row in trio.rows()][:1] == [0])  # written after the stream's end
    else:
        assert lines[-1] == "data: [DONE]"
    if n == 1 and text == "read-slowly":
        with trio.client() as client:
            chunks = client.chat.completions.create(model="echo", messages=say(text), stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text


def test_stream_of_a_hanging_node_continues_on_another(spawn_gateway: Any, spawn_held_node: Any, hold: Path) -> None:
    nodes = [spawn_held_node() for _ in range(2)]
    gateway, text, got = spawn_gateway(*nodes), "0123456789" * 20, ""
    with gateway.client() as client:
        for chunk in client.chat.completions.create(model="echo", messages=say(text), stream=True):
            got += chunk.choices[0].delta.content or ""
            if got == text[:3] and hold.exists():
                (busy,) = [node for node in nodes if running(node.url)]
                busy.popen.send_signal(signal.SIGSTOP)
                hold.unlink()
    assert got == text
    assert [(row["status"], row["retries"], row["completion_tokens"]) for row in gateway.rows()] == [(200, 1, 200)]


def test_a_poisoned_request_is_refused_once_it_killed_two_nodes(pair: tuple[Running, list[Any]]) -> None:
    gateway, nodes = pair
    with gateway.client() as client:
        for text, status, retried in (("die-first", 502, "false"), ("die-first", 502, "false"), ("Hi", 503, "true")):
            with pytest.raises(openai.APIStatusError) as caught:
                client.chat.completions.create(model="echo", messages=say(text))
            assert caught.value.status_code == status
            assert caught.value.response.headers["x-should-retry"] == retried
        assert caught.value.response.headers["retry-after"] == "1"
    assert all(node.popen.wait(30) < 0 for node in nodes)
    wait_for(lambda: httpx.get(f"{gateway.url}/health").status_code == 503)  # once probes agree with the requests
    assert [(row["status"], row["retries"]) for row in gateway.rows()] == [(502, 1), (502, 0), (503, 0)]


def test_a_node_that_returns_is_used_again(spawn_gateway: Any, spawn_fake_node: Any) -> None:
    node = spawn_fake_node("--port", str(free_port()))
    gateway = spawn_gateway(node)
    node.popen.kill()
    node.popen.wait()
    wait_for(lambda: gateway.healthy() == 0)
    spawn_fake_node("--port", node.url.rpartition(":")[2])
    wait_for(lambda: gateway.healthy() == 1)
    with gateway.client() as client:
        assert client.chat.completions.create(model="echo", messages=say("back")).choices[0].message.content == "back"


def test_leaving_client_frees_the_node_and_is_metered(gateway: Running, fake_node: Any) -> None:
    body = {"model": "echo", "messages": say("x" * 1900)}
    counted = httpx.post(f"{fake_node.url}/tokenize", json=body).json()["count"]
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, headers=gateway.headers, timeout=2),
    ):
        pass
    wait_for(lambda: running(fake_node.url) == 0)
    read = 0
    with httpx.stream(
        "POST", f"{gateway.url}/v1/chat/completions", json={**body, "stream": True}, headers=gateway.headers
    ) as response:
        for line in response.iter_lines():
            assert "usage" not in line
            read += '"content":"x"' in line
            if read == 20:
                break
    wait_for(lambda: running(fake_node.url) == 0)
    wait_for(lambda: [row["status"] for row in gateway.rows()] == [499, 499])
    whole, streamed = gateway.rows()
    assert whole["prompt_tokens"] == streamed["prompt_tokens"] == counted
    assert 1 <= whole["completion_tokens"] < 1900
    assert 20 <= streamed["completion_tokens"] < 1900
    expected = f'updraft_gateway_prompt_tokens_total{{model="echo",tier="interactive"}} {float(2 * counted)}\n'
    assert expected in httpx.get(f"{gateway.url}/metrics").text


def test_sigterm_finishes_answers_and_writes_rows(spawn_gateway: Any, spawn_held_node: Any, hold: Path) -> None:
    gateway, answers = spawn_gateway(spawn_held_node()), list[Any]()

    def ask() -> None:
        with gateway.client() as client:
            answers.append(client.chat.completions.create(model="echo", messages=say("x" * 100)))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(
        lambda: re.search(r"node_in_flight\{node=.*\} 1\.0$", httpx.get(f"{gateway.url}/metrics").text, re.MULTILINE)
    )
    gateway.process.terminate()
    hold.unlink()
    thread.join()
    assert gateway.process.wait(60) == 0
    assert answers[0].choices[0].message.content == "x" * 100
    with closing(sqlite3.connect(gateway.db)) as connection:
        assert connection.execute("SELECT status, completion_tokens FROM usage").fetchall() == [(200, 100)]


def running(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("updraft_engine_running "))


def test_null_is_absent_and_models_are_listed_as_the_node_does(shared: Running) -> None:
    with shared.client() as client:
        nothing = {"stream": None, "stream_options": None}
        answer = client.chat.completions.create(model="echo", messages=say("abc"), extra_body=nothing)
        assert answer.choices[0].message.content == "abc"
        chunks = client.chat.completions.create(
            model="echo", messages=say("abc"), stream=True, stream_options={"include_usage": None}
        )
        assert [chunk.usage for chunk in chunks if not chunk.choices] == []
        card = client.models.retrieve("echo")
        assert card.created > 10**9
        assert card.owned_by == "updraft"
        assert card.model_extra == {"max_model_len": 2000}


def test_headers_and_query_go_along_to_a_node(spawn_gateway: Callable[..., Running], tmp_path: Path) -> None:
    (tmp_path / "limits.toml").write_text("[weights]\ntester = 2.5\n")
    limits = ("--limits", str(tmp_path / "limits.toml"))
    with running_full_cloud() as cloud, spawn_gateway(cloud, flags=limits).client() as client:
        extra = {"X-Title": "An app", "Cookie": "a=b", "X-Updraft-Tenant": "another", "X-Auth-Token": "hunter2"}
        extra["X-Updraft-Tenant-Weight"] = "1000"
        client.chat.completions.create(
            model="big", messages=say("abc"), extra_headers=extra, extra_query={"api-version": "7"}
        )
        got = cloud.headers[0]
        assert (got["x-title"], cloud.queries) == ("An app", ["api-version=7"])
        assert got["x-updraft-tenant"] != "another"
        assert got["x-updraft-tenant-weight"] == "2.5"
        assert "cookie" not in got
        assert not {"authorization", "x-auth-token"} & got.keys()
        assert client.models.retrieve("big").owned_by == "somebody"
