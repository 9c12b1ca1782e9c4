"""Failures of a cloud that the caller sees, those the device's answer covers, and their cost for the next requests."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from cascade_bench import Bench, run, text_of, updraft_of
from router_fakes import CLOUD_TEXT, LOCAL_TEXT, FakeCloud, ScriptedGates, unused_url
from updraft.protocol.http.wire import WireRequest
from updraft.router.accounting.budget import BudgetLimits

pytestmark = pytest.mark.usefixtures("short_waits")

NO_RETRY = {"x-should-retry": "false"}


@pytest.mark.parametrize("status", ["400", "401", "402", "403", "404", "413", "422"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("gate", [1, 2, 3])
def test_a_refusal_reaches_the_caller(bench: Any, cloud: FakeCloud, status: str, stream: bool, gate: int) -> None:
    async def test() -> None:
        cloud.mode = status
        gates = ScriptedGates(before=gate == 1, during_at=2 if gate == 2 else None, after=gate == 3)
        async with bench(gates) as b:
            response = await b.ask(stream=stream)
            assert response.status == int(status)
            assert json.loads(response.body)["error"]["message"] == f"cloud error {status}"
            assert response.headers["x-should-retry"] == "false"
        assert len(cloud.requests) == 1
        (row,) = b.rows()
        assert (row.status, row.route, row.failure) == (int(status), "none", f"the server answered {status}")
        assert f"({b.router.config.cloud_url})" in row.reason

    run(test())


@pytest.mark.parametrize(
    ("fallback", "covered"),
    [("unreachable", {"503", "429", "garbage"}), ("any", {"401", "503", "429", "garbage"}), ("never", set[str]())],
)
def test_fallback_says_what_the_device_covers(bench: Any, cloud: FakeCloud, fallback: str, covered: set[str]) -> None:
    async def test() -> None:
        cloud.headers = NO_RETRY
        for mode in ("401", "503", "429", "garbage"):
            cloud.mode = mode
            async with bench(ScriptedGates(after=True), fallback=fallback) as b:
                answer = await b.answer()
                assert (answer.get("updraft", {}).get("route") == "fallback") == (mode in covered), mode
                assert ("error" in answer) == (mode not in covered)

    run(test())


def test_a_budget_that_is_spent_is_no_failure_to_show(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        limited = {"budget": BudgetLimits(cloud_tokens=10)}
        async with bench(ScriptedGates(after=True), fallback="never", **limited) as b:
            assert (await b.answer())["choices"][0]["message"]["content"] == LOCAL_TEXT
        assert not cloud.requests

    run(test())


@pytest.mark.parametrize(("mode", "ends"), [("401", False), ("503", True)])
def test_a_stream_that_has_begun_ends_as_the_setting_says(bench: Any, cloud: FakeCloud, mode: str, ends: bool) -> None:
    async def test() -> None:
        cloud.mode, cloud.headers = mode, NO_RETRY
        async with bench(ScriptedGates(during_at=4), hold_tokens=2) as b:
            _, events, done = await b.stream()
            assert done == ends
            assert (text_of(events) == LOCAL_TEXT) == ends
            assert ends or events[-1]["error"]["message"] == "cloud error 401"
        assert [row.status for row in b.rows()] == [200 if ends else 401]

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_busy_cloud_is_asked_again_and_answers(bench: Any, cloud: FakeCloud, stream: bool) -> None:
    async def test() -> None:
        cloud.mode, cloud.headers = "429", {"retry-after": "1"}
        async with bench(ScriptedGates(before=True)) as b:
            pending = asyncio.create_task(b.stream() if stream else b.answer())
            while not cloud.requests:  # noqa: ASYNC110 - the server is another thread
                await asyncio.sleep(0.01)
            cloud.mode = "healthy"
            answer = await pending
            text = text_of(answer[1]) if stream else answer["choices"][0]["message"]["content"]
            assert text == CLOUD_TEXT
        assert len(cloud.requests) == 2
        assert [row.status for row in b.rows()] == [200]

    run(test())


def test_retry_after_beyond_the_deadline_reaches_the_caller(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        cloud.mode, cloud.headers = "429", {"retry-after": "3600"}
        async with bench(cloud_timeout_s=60.0) as b:
            began = time.monotonic()
            response = await b.ask("cloud")
            assert (response.status, response.headers["retry-after"]) == (429, "3600")
            assert time.monotonic() - began < 30
        assert len(cloud.requests) == 1

    run(test())


@pytest.mark.parametrize("hangs", [False, True])
def test_a_cloud_that_is_down_costs_the_next_requests_nothing(bench: Any, cloud: FakeCloud, hangs: bool) -> None:
    async def test() -> None:
        cloud.mode = "slow"
        settings = {"cloud_timeout_s": 0.4} if hangs else {"cloud_url": unused_url()}
        async with bench(ScriptedGates(after=True), **settings) as b:
            for number in range(3):
                assert (await b.answer(user=f"user-{number}"))["updraft"]["route"] == "fallback"
            sent = len(cloud.requests)
            for _ in range(20):
                info = (await b.answer())["updraft"]
                assert info["route"] == "fallback"
                assert b.router.config.cloud_url in info["reason"]
            error = (await b.answer("cloud"))["error"]
            assert (error["type"], error["code"]) == ("upstream_error", "cloud_unreachable")
            assert len(cloud.requests) == sent, "not one wait each"

    run(test())


# Drafts


@pytest.mark.parametrize(
    ("owner", "send_drafts", "drafted"),
    [("updraft", False, True), ("openai", False, False), ("openai", True, True), ("vllm", False, False)],
)
def test_drafts_go_to_nodes_and_where_the_user_says(
    bench: Any, cloud: FakeCloud, owner: str, send_drafts: bool, drafted: bool
) -> None:
    async def test() -> None:
        cloud.owner = owner
        async with bench(ScriptedGates(after=True), send_drafts=send_drafts) as b:
            for _ in range(3):
                info = (await b.answer())["updraft"]
                assert (info["route"], info["gate"]) == ("escalated" if drafted else "cloud", 3)
            _, events, _ = await b.stream()
            assert updraft_of(events)["tier"] == "cloud"
        assert ["prediction" in body for body in cloud.requests] == [drafted] * 4
        assert cloud.asked_for_models == (not send_drafts), "once, and only where it matters"

    run(test())


def test_callers_prediction_is_sent_to_every_cloud(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        cloud.owner = "openai"
        mine = {"type": "content", "content": "mine"}
        async with bench(ScriptedGates(after=True)) as b:
            await b.answer("cloud", prediction=mine)
            cloud.owner = "updraft"
            await b.answer(prediction=mine)
        assert [body["prediction"] for body in cloud.requests] == [mine, mine]

    run(test())


def test_a_router_is_no_node(bench: Any) -> None:
    """Its own cloud may bill drafts."""

    async def test() -> None:
        async with bench() as b:
            response = await b.handle(WireRequest("GET", "/v1/models"))
        assert {card["owned_by"] for card in json.loads(response.body)["data"]} == {"updraft-router"}

    run(test())


# What is answered oddly, but is an answer


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_a_filtered_answer_is_one(bench: Any, cloud: FakeCloud, bom: bytes) -> None:
    async def test() -> None:
        message = {"role": "assistant", "content": None}
        body = {"choices": [{"index": 0, "message": message, "finish_reason": "content_filter"}]}
        cloud.says = (200, bom + json.dumps(body).encode())
        async with bench() as b:
            choice = (await b.answer("cloud"))["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (None, "content_filter")

    run(test())


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_a_stream_with_other_line_ends_is_relayed(bench: Any, cloud: FakeCloud, end: bytes) -> None:
    async def test() -> None:
        deltas = [({"content": "Hi"}, None), ({}, "stop")]
        chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]} for delta, reason in deltas]
        payloads = [*(json.dumps(chunk).encode() for chunk in chunks), b"[DONE]"]
        whole = b"\xef\xbb\xbf" + b"".join(b"data: " + payload + end + end for payload in payloads)
        cloud.says = (200, whole[:2], whole[2:40], whole[40:-1], whole[-1:])
        async with bench() as b:
            _, events, done = await b.stream("cloud")
            assert (text_of(events), done) == ("Hi", True)

    run(test())


# One tier's trouble leaves the other alone


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ALL_PROXY": "ftp://me:secret@127.0.0.1:9"}, "ftp://127.0.0.1:9"),
        ({"SSL_CERT_FILE": "/nowhere/ca.pem"}, "SSL_CERT_FILE=/nowhere/ca.pem"),
    ],
)
def test_cloud_start_failure_leaves_the_device_running(
    bench: Any, variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ALL_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    async def test() -> None:
        b: Bench
        async with bench(ScriptedGates(after=True), cloud_url="https://cloud.example/v1") as b:
            assert (await b.answer("local"))["choices"][0]["message"]["content"] == LOCAL_TEXT
            for model in ("cloud", "auto"):
                response = await b.ask(model)
                error = json.loads(response.body)["error"]  # type: ignore[arg-type]
                assert (response.status, error["type"]) == (500, "configuration_error")
                assert message in error["message"]
                assert "secret" not in error["message"]

    run(test())


def test_a_network_in_no_proxy_keeps_the_cloud_within_reach(
    bench: Any, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", unused_url())
    monkeypatch.setenv("NO_PROXY", "::1/128,127.0.0.0/8")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("http_proxy", raising=False)

    async def test() -> None:
        async with bench() as b:
            assert (await b.answer("cloud"))["choices"][0]["message"]["content"] == CLOUD_TEXT
        monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
        async with bench(cloud_timeout_s=1.0) as b:
            assert (await b.answer("cloud"))["error"]["code"] == "cloud_unreachable"

    run(test())


@pytest.mark.parametrize(
    ("status", "stream", "told"),
    [
        (401, False, b"Wrong key: sk-mine-1"),
        (401, False, b'{"error": {"message": "Wrong key: sk-mine-1", "code": "sk-mine-1"}}'),
        (404, False, b"There is no /chat?key=sk-in-query"),
        (200, False, b'{"error": {"message": "Wrong key: sk-mine-1", "code": 401}}'),
        (200, True, b'data: {"error": {"message": "Wrong key: sk-mine-1", "code": 401}}\n\n'),
    ],
)
def test_key_quoted_by_the_cloud_is_redacted(
    bench: Any, cloud: FakeCloud, status: int, stream: bool, told: bytes
) -> None:
    async def test() -> None:
        cloud.says = (status, told)
        async with bench(cloud_api_key="sk-mine-1", cloud_query={"key": "sk-in-query", "api-version": "1"}) as b:
            response = await b.ask("cloud", stream=stream)
            assert isinstance(response.body, bytes)
            assert response.status >= 400
            assert b"[the API key]" in response.body
            assert b"sk-" not in response.body

    run(test())


def test_short_key_is_redacted_without_damage(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(cloud_api_key="e") as b:
            cloud.says = (400, b'{"error": {"message": "Set the temperature.", "type": "invalid_request_error"}}')
            assert (await b.answer("cloud"))["error"]["message"] == "Set the temperature."
            cloud.says = (401, b'{"error": {"message": "Wrong key: e", "code": "invalid_e"}}')
            error = (await b.answer("cloud"))["error"]
            assert (error["message"], error["code"]) == ("Wrong key: [the API key]", "invalid_e")

    run(test())
