"""Every transition of the cascade, through its endpoints, against a scripted local model and a real HTTP server."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from cascade_bench import run, text_of, updraft_of
from router_fakes import CLOUD_TEXT, LOCAL_TEXT, FakeCloud, ScriptedGates, unused_url
from updraft.protocol.errors import EngineError
from updraft.protocol.http.wire import WireRequest
from updraft.router.gates.gates import NoPolicyGates
from updraft.router.tiers.cloud import HttpCloudTier
from updraft.text.tool_formats import ToolFormat
from waiting import wait_for

pytestmark = pytest.mark.usefixtures("short_waits")

# Gate 0: rules


@pytest.mark.parametrize("model", ["local", "fake-small"])
def test_forced_local_never_asks_the_cloud(bench: Any, cloud: FakeCloud, model: str) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(before=True, after=True)) as b:
            answer = await b.answer(model)
            assert answer["choices"][0]["message"]["content"] == LOCAL_TEXT
            assert answer["model"] == "fake-small"
            assert answer["updraft"]["route"] == answer["updraft"]["tier"] == "local"
            assert answer["updraft"]["gate"] == 0
            assert "asked for the device" in answer["updraft"]["reason"]
        assert not cloud.requests

    run(test())


@pytest.mark.parametrize("model", ["cloud", "pocket-large"])
def test_forced_cloud_never_runs_the_local_model(bench: Any, cloud: FakeCloud, model: str) -> None:
    async def test() -> None:
        async with bench(cloud_api_key="sk-cloud") as b:
            answer = await b.answer(model)
            assert answer["choices"][0]["message"]["content"] == CLOUD_TEXT
            assert answer["system_fingerprint"] == "fp_cloud", "unknown fields of the server are kept"
            assert answer["updraft"]["route"] == "cloud"
            assert b.local.started == 0
        assert cloud.requests[0]["model"] == "pocket-large"
        assert "prediction" not in cloud.requests[0]
        assert cloud.authorizations == ["Bearer sk-cloud"]

    run(test())


def test_private_requests_stay_and_the_option_does_not_travel(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(after=True)) as b:
            assert (await b.answer(updraft={"private": True}))["updraft"]["reason"].startswith("private")
            assert (await b.answer(updraft={"quality": 0.9}))["updraft"]["route"] == "escalated"
            refused = await b.answer("cloud", updraft={"private": True})
            assert refused["error"]["param"] == "updraft.private"
        assert len(cloud.requests) == 1
        assert "updraft" not in cloud.requests[0]

    run(test())


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"best_of": 2},
        {"use_beam_search": True},
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "12"},
            ]
        },
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        {"verbosity": "low"},
    ],
)
def test_cloud_only_features_escalate(bench: Any, cloud: FakeCloud, fields: dict[str, Any]) -> None:
    async def test() -> None:
        async with bench() as b:
            answer = await b.answer(**fields)
            assert answer["updraft"]["route"] == "cloud"
            assert answer["updraft"]["reason"].startswith("beyond the device")
            assert (await b.ask("local", **fields)).status == 400
        for name, value in fields.items():
            assert cloud.requests[0][name] == value

    run(test())


def test_a_prompt_that_is_too_long_for_the_device_goes_to_the_cloud(bench: Any) -> None:
    async def test() -> None:
        async with bench() as b:
            b.local.too_long = True
            assert (await b.answer())["updraft"]["route"] == "cloud"
            forced = await b.answer("local")
            assert forced["error"]["code"] == "context_length_exceeded"

    run(test())


def test_a_local_model_that_fails_is_replaced_by_the_cloud(bench: Any) -> None:
    async def test() -> None:
        async with bench() as b:
            b.local.fails_at, b.local.error = 2, EngineError("llama failed")
            assert (await b.answer())["updraft"]["tier"] == "cloud"
            assert (await b.answer("local"))["error"]["type"] == "engine_error"

    run(test())


def test_offline_and_missing_tiers(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(before=True), offline=True) as b:
            assert (await b.answer())["updraft"]["reason"] == "offline mode"
            assert (await b.answer("cloud"))["error"]["code"] == "offline"
        assert not cloud.requests
        async with bench(ScriptedGates(before=True), cloud_url=None) as b:
            assert (await b.answer())["updraft"]["reason"] == "the device is the only tier: no cloud is configured"
            assert (await b.answer("cloud"))["error"]["code"] == "cloud_not_configured"
        async with bench(has_local=False) as b:
            assert (await b.answer())["updraft"]["route"] == "cloud"
            assert (await b.answer("local"))["error"]["code"] == "local_not_configured"
        async with bench(has_local=False, cloud_url=None) as b:
            assert (await b.answer())["error"]["code"] == "no_tier"

    run(test())


def test_health_is_bad_where_no_tier_can_answer(bench: Any) -> None:
    async def test() -> None:
        for settings, status in (
            ({"has_local": False, "cloud_url": None}, 503),
            ({"has_local": False, "offline": True}, 503),
            ({"has_local": False}, 200),
            ({"offline": True}, 200),
        ):
            async with bench(**settings) as b:
                response = await b.handle(WireRequest("GET", "/health"))
                assert response.status == status, settings

    run(test())


def test_a_request_may_state_a_confidence_and_no_target_that_nothing_keeps(bench: Any, cloud: FakeCloud) -> None:
    """The scripted device writes with a probability of 0.95 per token."""

    async def test() -> None:
        async with bench(ScriptedGates(before=True)) as b:
            kept = await b.answer(updraft={"confidence": 0.9})
            assert (kept["updraft"]["tier"], kept["updraft"]["reason"]) == (
                "local",
                "uncalibrated: confidence 0.95 reaches threshold 0.90 after generation",
            )
            assert kept["updraft"]["confidence"] == pytest.approx(0.951, abs=1e-3)
            assert (await b.answer(updraft={"confidence": 0.99}))["updraft"]["tier"] == "cloud"
            assert (await b.answer("local", updraft={"confidence": 0.99}))["updraft"]["tier"] == "local"
            by_entropy = await b.answer(updraft={"confidence": 0.93, "confidence_signal": "entropy"})
            assert by_entropy["updraft"]["tier"] == "cloud"
            assert "confidence by entropy 0.90 below threshold 0.93" in by_entropy["updraft"]["reason"]
            for wrong, param in (
                ({"confidence": 1.0}, "updraft.confidence"),
                ({"confidence": 0.8, "quality": 0.9}, "updraft.confidence"),
                ({"confidence_signal": "entropy"}, "updraft.confidence_signal"),
                ({"confidence": 0.8, "confidence_signal": "luck"}, "updraft"),
            ):
                error = (await b.answer(updraft=wrong))["error"]
                assert error["param"] == param, error
            for wrong in (7, "x", []):
                assert (await b.answer(updraft=wrong))["error"]["message"] == "updraft: the value must be an object."
            assert "error" not in await b.answer(updraft={})
        for has_local in (True, False):
            async with bench(NoPolicyGates(), has_local=has_local) as b:
                response = await b.ask(updraft={"quality": 0.9})
                assert response.status == 400
                assert b"updraft calibrate" in response.body
                assert (await b.answer())["updraft"]["tier"] == "cloud"

    run(test())


# Gates 1 to 3


@pytest.mark.parametrize("text", ["", " \n\t "])
@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_answer_escalates(bench: Any, cloud: FakeCloud, text: str, stream: bool) -> None:
    """Whatever the gates think of it: a policy cannot read an answer without a token."""

    async def test() -> None:
        async with bench(hold_tokens=1) as b:
            b.local.text = text
            if stream:
                _, events, done = await b.stream()
                assert done and text_of(events) == CLOUD_TEXT
                info = updraft_of(events)
            else:
                reply = await b.answer()
                assert reply["choices"][0]["message"]["content"] == CLOUD_TEXT
                info = reply["updraft"]
            assert (info["tier"], info["reason"]) == ("cloud", "the device gave an empty answer")
            assert (await b.answer("local"))["updraft"]["tier"] == "local"

    run(test())


def test_all_gates_pass(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench() as b:
            response = await b.ask()
            info = json.loads(response.body)["updraft"]
            assert (info["route"], info["gate"], info["p_gain"], info["threshold"]) == ("local", 3, 0.1, 0.5)
            assert info["confidence"] is None, "no confidence threshold decided"
            assert info["local_tokens"] == 6
            assert info["cost_usd"] == 0
            assert info["saved_usd"] == pytest.approx((7 * 0.5 + 6 * 1.5) / 1e6)
            assert response.headers["x-updraft-tier"] == "local"
            assert response.headers["x-updraft-p-gain"] == "0.1000"
        assert not cloud.requests

    run(test())


@pytest.mark.parametrize(("model", "read"), [("auto", 1), ("local", 0), ("cloud", 0)])
def test_the_question_is_read_for_gate_3_while_the_model_writes(bench: Any, model: str, read: int) -> None:
    class Reading(ScriptedGates):
        running: ClassVar[list[int]] = []

        def read_ahead(self, messages: Any) -> None:
            assert [message.text for message in messages] == ["hi"]
            self.running.append(b.local.running)

    async def test() -> None:
        nonlocal b
        async with bench(Reading()) as b:
            await b.ask(model=model, messages=[{"role": "user", "content": "hi"}])
            assert Reading.running == [1] * read

    b: Any = None
    run(test())


@pytest.mark.parametrize(("model", "read"), [("auto", ["One line.\nAnother"]), ("local", [])])
def test_complete_lines_are_read_for_gate_3_while_the_model_writes(bench: Any, model: str, read: list[str]) -> None:
    class Reading(ScriptedGates):
        lines: ClassVar[list[str]] = []

        def read_lines(self, answer: str) -> None:
            assert b.local.running == 1
            self.lines.append(answer)

    async def test() -> None:
        nonlocal b
        async with bench(Reading()) as b:
            b.local.text = "One line.\nAnother that goes on for rather long."
            await b.ask(model=model, messages=[{"role": "user", "content": "hi"}])
            assert Reading.lines[:1] == read

    b: Any = None
    run(test())


def test_gate_1_sends_no_draft(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(before=True)) as b:
            info = (await b.answer())["updraft"]
            assert (info["route"], info["gate"]) == ("cloud", 1)
            assert b.local.started == 0
        assert "prediction" not in cloud.requests[0]

    run(test())


def test_gate_2_stops_the_local_run_and_sends_its_draft(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(during_at=2)) as b:
            info = (await b.answer())["updraft"]
            assert (info["route"], info["gate"], info["local_tokens"]) == ("escalated", 2, 2)
            assert b.local.finished == 0
        assert cloud.requests[0]["prediction"] == {"type": "content", "content": "one two"}

    run(test())


def test_gate_2_is_not_asked_about_an_answer_that_ends_there(bench: Any) -> None:
    """As little as in the calibration, whose thresholds are those of answers that go on."""

    async def test() -> None:
        async with bench(ScriptedGates(during_at=2, after=True)) as b:
            info = (await b.answer(max_tokens=2))["updraft"]
            assert (info["gate"], info["local_tokens"]) == (3, 2)

    run(test())


def test_gate_3_sends_the_whole_answer_as_the_draft(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(after=True)) as b:
            answer = await b.answer()
            info = answer["updraft"]
            assert answer["choices"][0]["message"]["content"] == CLOUD_TEXT
            assert (info["route"], info["gate"], info["tier"]) == ("escalated", 3, "cloud")
            assert (info["draft_proposed"], info["draft_accepted"]) == (6, 2)
            assert info["cloud_tokens"] == 4
            assert info["cost_usd"] == pytest.approx((11 * 0.5 + 4 * 1.5) / 1e6)
        assert cloud.requests[0]["prediction"]["content"] == LOCAL_TEXT

    run(test())


def test_a_local_answer_that_repeats_itself_goes_up_whatever_the_gates_think(bench: Any) -> None:
    async def test() -> None:
        async with bench() as b:
            b.local.stop_reason = "repetition_detected"
            answer = await b.answer()
            assert answer["choices"][0]["message"]["content"] == CLOUD_TEXT
            assert answer["updraft"]["route"] == "escalated"
            assert "repeated itself" in answer["updraft"]["reason"]
            kept = await b.answer("local")
            assert kept["choices"][0]["message"]["content"] == LOCAL_TEXT
            assert kept["choices"][0]["stop_reason"] == "repetition_detected"

    run(test())


def test_cloud_gets_the_requests_own_sampling(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(after=True)) as b:
            await b.answer()
            await b.answer(top_p=0.5, max_tokens=9)
        sampling = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"}
        assert [sampling & request.keys() for request in cloud.requests] == [set(), {"top_p", "max_tokens"}]

    run(test())


def test_a_server_that_refuses_prediction_is_asked_once_more_and_remembered(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        cloud.mode = "no-prediction"
        async with bench(ScriptedGates(after=True)) as b:
            first = (await b.answer())["updraft"]
            assert (first["tier"], first["route"]) == ("cloud", "cloud")
            await b.answer()
        assert ["prediction" in body for body in cloud.requests] == [True, False, False]

    run(test())


def test_a_refusal_of_something_else_leaves_drafts_alone(bench: Any, cloud: FakeCloud) -> None:
    """Some servers quote the whole request in their refusal, the word `prediction` with it."""

    async def test() -> None:
        async with bench(ScriptedGates(after=True)) as b:
            cloud.says = (422, b'{"detail": "Not with this temperature: {\\"prediction\\": ...}"}')
            assert (await b.ask()).status == 422
            cloud.says = None
            assert (await b.answer())["updraft"]["route"] == "escalated"
        assert ["prediction" in body for body in cloud.requests] == [True, False, True]

    run(test())


def test_a_quality_that_is_no_share_is_refused(bench: Any) -> None:
    async def test() -> None:
        async with bench() as b:
            for quality in (0, 1.5, "high"):
                assert (await b.answer(updraft={"quality": quality}))["error"]["type"] == "invalid_request_error"
            assert "known: quality" in (await b.answer(updraft={"qualty": 0.9}))["error"]["message"]

    run(test())


def test_the_ledger_can_explain_a_request(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(after=True)) as b:
            b.local.delay_s = 0.01
            await b.answer()
            cloud.mode, cloud.headers = "500", {"x-should-retry": "false"}
            await b.stream()
            await b.ask("cloud")
        forced, fell, escalated = b.rows()
        gates = [(each["gate"], each["escalate"], each["p_gain"]) for each in json.loads(escalated.decisions)]
        assert gates == [(0, False, None), (1, False, 0.1), (2, False, 0.1), (3, True, 0.9)]
        assert escalated.local_ms > 50
        assert escalated.cloud_ms > 0
        assert escalated.local_ms + escalated.cloud_ms < escalated.latency_ms
        assert (escalated.local_prompt_tokens, escalated.cloud_prompt_tokens) == (7, 11)
        assert (escalated.cloud_model, escalated.failure) == ("pocket-large", "")
        assert (fell.route, fell.failure) == ("fallback", "the server answered 500")
        assert (forced.route, forced.failure, forced.local_ms) == ("none", "the server answered 500", 0.0)

    run(test())


def test_the_ledger_knows_keys_by_their_digest_only(bench: Any) -> None:
    async def test() -> None:
        async with bench() as b:
            body = json.dumps({"model": "auto", "messages": [{"role": "user", "content": "hello"}]}).encode()
            for key in ("sk-one", "sk-one", "sk-two"):
                headers = {"authorization": f"Bearer {key}"}
                await b.handle(WireRequest("POST", "/v1/chat/completions", headers, body))
        third, second, first = b.rows()
        assert first.key == second.key != third.key
        assert len(first.key) == 32
        assert b"sk-" not in b.ledger.read_bytes()

    run(test())


# A cloud that fails


@pytest.mark.parametrize(
    ("gate", "mode", "stream"),
    [(3, mode, False) for mode in ("500", "429", "garbage", "reset", "down", "slow")]
    + [(3, mode, True) for mode in ("500", "garbage", "garbage-stream", "cut-before", "down", "slow")]
    + [(gate, "500", stream) for gate in (1, 2) for stream in (False, True)],
)
def test_a_failing_cloud_means_the_local_answer(
    bench: Any, cloud: FakeCloud, mode: str, stream: bool, gate: int
) -> None:
    async def test() -> None:
        gates = ScriptedGates(before=gate == 1, during_at=2 if gate == 2 else None, after=gate == 3)
        settings = {"down": {"cloud_url": unused_url()}, "slow": {"cloud_timeout_s": 0.2}}.get(mode, {})
        cloud.mode = mode
        async with bench(gates, **settings) as b:
            if stream:
                _, events, done = await b.stream()
                assert done
                text, info = text_of(events), updraft_of(events)
            else:
                answer = await b.answer()
                text, info = answer["choices"][0]["message"]["content"], answer["updraft"]
            assert text == LOCAL_TEXT
            assert (info["route"], info["tier"], info["gate"]) == ("fallback", "local", gate)
            assert "fallback, because the cloud failed" in info["reason"]
            assert f"({b.router.config.cloud_url})" in info["reason"]
        (row,) = b.rows()
        assert (row.route, row.status) == ("fallback", 200)

    run(test())


@pytest.mark.parametrize(
    ("mode", "status", "kind"),
    [
        ("500", 500, "invalid_request_error"),
        ("401", 401, "invalid_request_error"),
        ("429", 429, "invalid_request_error"),
        ("garbage", 502, "upstream_error"),
        ("reset", 500, "upstream_error"),
        ("slow", 504, "timeout_error"),
    ],
)
def test_a_forced_cloud_that_fails_is_a_typed_error(
    bench: Any, cloud: FakeCloud, mode: str, status: int, kind: str
) -> None:
    async def test() -> None:
        cloud.mode = mode
        async with bench(cloud_timeout_s=0.3 if mode == "slow" else 60.0) as b:
            response = await b.ask("cloud")
            assert response.status == status
            assert json.loads(response.body)["error"]["type"] == kind
            assert b.local.started == 0
        (row,) = b.rows()
        assert (row.status, row.route, row.tier) == (status, "none", "none")
        assert "the cloud failed" in row.reason

    run(test())


def test_no_answer_possible_anywhere_is_the_clouds_error(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        cloud.mode = "garbage"
        async with bench(ScriptedGates(before=True)) as b:
            b.local.too_long = True
            response = await b.ask()
            assert response.status == 502

    run(test())


# Deadlines, cancellation, bugs


def test_a_deadline_leaves_time_for_the_local_answer(
    bench: Any, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cloud gets nine tenths of it; that is too long to wait for here."""
    complete, given = HttpCloudTier.complete, []

    async def hurried(tier: HttpCloudTier, *request: Any, timeout_s: float, **options: Any) -> Any:
        given.append(timeout_s)
        return await complete(tier, *request, timeout_s=0.3, **options)

    monkeypatch.setattr(HttpCloudTier, "complete", hurried)

    async def test() -> None:
        cloud.mode = "slow"
        async with bench(ScriptedGates(after=True), cloud_timeout_s=600.0) as b:
            response = await b.ask(timeout_s=60.0)
            assert json.loads(response.body)["updraft"]["route"] == "fallback"
        assert 0 < given[0] <= 0.9 * 60

    run(test())


def test_a_deadline_that_ends_in_local_work_is_not_retried(bench: Any) -> None:
    async def test() -> None:
        async with bench() as b:
            b.local.hangs_at = 2
            response = await b.ask(timeout_s=2.0)
            assert response.status == 504
            assert json.loads(response.body)["error"]["code"] == "timeout"
            assert response.headers["x-should-retry"] == "false"
            assert b.local.running == 0
        (row,) = b.rows()
        assert (row.status, row.local_tokens) == (504, 2)

    run(test())


def test_cancelling_the_caller_stops_the_local_run(bench: Any) -> None:
    async def test() -> None:
        async with bench() as b:
            b.local.delay_s = 0.2
            task = asyncio.create_task(b.ask())
            while not b.local.running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert b.local.running == 0
        (row,) = b.rows()
        assert row.status == 499

    run(test())


@pytest.mark.parametrize("read_one", [False, True])
def test_closing_a_stream_stops_everything(bench: Any, cloud: FakeCloud, read_one: bool) -> None:
    async def test() -> None:
        cloud.mode = "hang"
        async with bench(ScriptedGates(before=True)) as b:
            for model in ("local", "auto"):
                response = await b.ask(model, stream=True)
                if read_one:
                    await anext(response.body)
                await response.body.aclose()
                await response.body.aclose()
                assert b.local.running == 0
            await asyncio.to_thread(wait_for, lambda: cloud.disconnects)
            assert cloud.disconnects == 1
        assert sorted(row.status for row in b.rows()) == [499, 499]

    run(test())


@pytest.mark.parametrize("model", ["local", "cloud"])
def test_a_stream_that_is_closed_at_its_end_mark_was_delivered(bench: Any, model: str) -> None:
    """As openai's client does it."""

    async def test() -> None:
        async with bench() as b:
            response = await b.ask(model, stream=True)
            while not (await anext(response.body)).endswith(b"[DONE]\n\n"):
                pass
            await response.body.aclose()
        assert [row.status for row in b.rows()] == [200]

    run(test())


def test_closing_the_router_ends_open_streams(bench: Any) -> None:
    async def test() -> None:
        async with bench() as b:
            await b.ask("local", stream=True)
        assert b.local.running == 0
        assert b.local.closed
        assert [row.status for row in b.rows()] == [499]
        assert (await b.ask()).status == 503, "a closed router does not load everything again"

    run(test())


def test_a_bug_is_a_500_in_openai_shape(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with bench() as b:
            b.local.fails_at, b.local.error = 1, ZeroDivisionError("oops")
            response = await b.ask("local")
            assert response.status == 500
            assert json.loads(response.body)["error"]["code"] == "internal_error"
            assert b"oops" not in response.body
            assert (await b.ask("cloud")).status == 200, "the router lives on"

    run(test())
    assert "ZeroDivisionError" in caplog.text


# Bad input


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "gpt-9"}, 404, "model"),
        ({"model": 7}, 400, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": "hi"}, 400, "messages"),
        ({"messages": [{"role": "user", "content": 7}]}, 400, "messages[0].content"),
        ({"temperature": -1}, 400, "temperature"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"temperature": "hot"}, 400, "temperature"),
    ],
)
def test_bad_requests(bench: Any, cloud: FakeCloud, fields: dict[str, Any], status: int, param: str) -> None:
    async def test() -> None:
        async with bench() as b:
            response = await b.ask(**fields)
            assert response.status == status
            error = json.loads(response.body)["error"]
            assert error["type"] == "invalid_request_error"
            assert error["param"] == param
            assert (await b.ask()).status == 200
        assert not cloud.requests
        assert sorted(row.status for row in b.rows()) == [200, status]

    run(test())


def test_paths_and_methods(bench: Any) -> None:
    async def test() -> None:
        async with bench() as b:

            async def status(method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
                response = await b.handle(WireRequest(method, path, body=body))
                return response.status, json.loads(response.body)

            assert (await status("POST", "/v1/chat/completions", b"{nonsense"))[1]["error"]["code"] == "invalid_json"
            assert (await status("POST", "/v1/chat/completions", b"[1]"))[0] == 400
            assert (await status("PUT", "/v1/chat/completions"))[0] == 405
            assert (await status("POST", "/v1/images"))[0] == 404
            assert (await status("GET", "/v1/embeddings"))[0] == 405
            assert (await status("POST", "/v1/completions"))[0] == 400
            assert (await status("GET", "/health")) == (200, {"status": "ok"})
            _, listed = await status("GET", "/v1/models")
            assert [card["id"] for card in listed["data"]] == ["auto", "local", "cloud", "pocket-large", "fake-small"]
            assert (await status("GET", "/v1/models/auto"))[1]["object"] == "model"
            assert (await status("GET", "/v1/models/nope"))[1]["error"]["code"] == "model_not_found"

    run(test())


# Many at once


def test_sixty_four_requests_while_the_cloud_dies(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(after=True), cloud_timeout_s=60.0) as b:
            b.local.delay_s = 0.005
            cloud.fail_after = 20
            asks = [b.stream() if index % 2 else b.answer("cloud" if index % 8 == 0 else "auto") for index in range(64)]
            outcomes = await asyncio.gather(*asks)
            for outcome in outcomes:
                if isinstance(outcome, dict):
                    assert "error" in outcome or outcome["choices"][0]["message"]["content"] in (CLOUD_TEXT, LOCAL_TEXT)
                else:
                    _, events, done = outcome
                    assert done or events[-1]["error"]["type"] == "upstream_error"
        rows = b.rows()
        assert len(rows) == 64
        assert len({row.id for row in rows}) == 64
        assert {"escalated", "fallback"} <= {row.route for row in rows}

    run(test())


def test_settings_reach_the_answer(bench: Any) -> None:
    async def test() -> None:
        async with bench() as b:
            b.router.config = replace(b.router.config, hold_tokens=1)
            response = await b.ask(stream=True)
            assert b.local.finished == 0
            await response.body.aclose()

    run(test())


def test_names_of_callers_are_shortened_and_escaped(bench: Any) -> None:
    odd = "\x1b[2J\r\nset-cookie: a=b" + "x" * 10**5

    async def test() -> None:
        async with bench() as b:
            assert (await b.ask(odd)).status == 400, "no model has so long a name"
            assert (await b.ask(odd[:200])).status == 404
            response = await b.ask(**{odd: 1})
            assert response.status == 200, "a field that the cloud may know"
            assert response.headers["x-updraft-reason"] == "beyond the device: an unknown field"
            assert response.headers["x-updraft-reason"].isprintable()
        kept = b.rows()
        assert sorted(len(row.model) for row in kept) == [0, 4, 100], "nothing is kept of a name that is refused"
        assert not any("cookie" in row.reason + row.decisions for row in kept)
        assert max(len(row.decisions) for row in kept) < 1000

    run(test())


class NoTokens:
    chat_template = None

    def special_id(self, text: str) -> None:
        return None


@pytest.mark.parametrize("stream", [False, True])
def test_json_that_only_looks_like_a_call_stays_an_answer(bench: Any, stream: bool) -> None:
    tools = [{"type": "function", "function": {"name": "get_weather"}}]

    async def test() -> None:
        async with bench(ScriptedGates()) as b:
            b.local.tool_format = ToolFormat.named("llama3", NoTokens())
            b.local.text = '{"name": "Alice", "age": 30}'
            fields: dict[str, Any] = {"tools": tools, "parallel_tool_calls": False}
            if stream:
                _, events, _ = await b.stream("local", **fields)
                assert text_of(events) == b.local.text
            else:
                answer = await b.answer("local", **fields)
                assert answer["choices"][0]["message"]["content"] == b.local.text
            assert b.local.options[0]["tools"].parallel is False

    run(test())
