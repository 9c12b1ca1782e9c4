"""The cache of exact repetitions: what is one, what is not, and what it may cost."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from cascade_bench import run, text_of, updraft_of
from hypothesis import given
from hypothesis import strategies as st
from router_fakes import CLOUD_TEXT, LOCAL_TEXT, FakeCloud, ScriptedGates
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.http.wire import WireRequest
from updraft.router.accounting.budget import BudgetLimits
from updraft.router.config import CacheSettings
from updraft.router.responses.cache import AnswerCache, CachedCompletion

ON = CacheSettings(max_mb=1.0)
SAME: dict[str, Any] = {"temperature": 0}


@pytest.mark.parametrize("gate", [None, 1, 3])
@pytest.mark.parametrize("first_streams", [False, True])
def test_the_second_time_costs_nothing_whole_or_streamed(
    bench: Any, cloud: FakeCloud, gate: int | None, first_streams: bool
) -> None:
    async def test() -> None:
        async with bench(ScriptedGates(before=gate == 1, after=gate == 3), cache=ON) as b:
            first = updraft_of((await b.stream(**SAME))[1]) if first_streams else (await b.answer(**SAME))["updraft"]
            sent, started = len(cloud.requests), b.local.started
            again = await b.answer(**SAME)
            _, events, done = await b.stream(**SAME, stream_options={"include_usage": True})
            assert (len(cloud.requests), b.local.started) == (sent, started), "nobody was asked again"
        text = LOCAL_TEXT if gate is None else CLOUD_TEXT
        assert again["choices"][0]["message"]["content"] == text_of(events) == text
        assert again["choices"][0]["finish_reason"] == "stop"
        assert done
        assert events[-1]["usage"] == again["usage"]
        assert again["usage"]["completion_tokens"] == (6 if gate is None else 4)
        for info in (again["updraft"], updraft_of(events)):
            assert (info["route"], info["tier"], info["cost_usd"]) == ("cache", first["tier"], 0)
            assert info["saved_usd"] > 0
            assert info["request_id"] != first["request_id"]
        assert again["id"] == again["updraft"]["request_id"]
        assert [row.route for row in b.rows()] == ["cache", "cache", first["route"]]

    run(test())


def _named(*names: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}}


@pytest.mark.parametrize(
    "field",
    [
        lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
        lambda schema: {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]},
    ],
    ids=["response_format", "tools"],
)
def test_the_order_of_properties_is_in_the_key_and_that_of_fields_is_not(bench: Any, field: Any) -> None:
    async def test() -> None:
        async with bench(cache=ON) as b:
            fields = {"model": "cloud", **SAME, **field(_named("reasoning", "answer"))}
            await b.answer(**fields)
            assert (await b.answer(**dict(reversed(fields.items()))))["updraft"]["route"] == "cache"
            other = {**fields, **field(_named("answer", "reasoning"))}
            assert (await b.answer(**other))["updraft"]["route"] != "cache"

    run(test())


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [{"role": "user", "content": "hello "}]},
        {"temperature": 0, "seed": 1},
        {"max_tokens": 5},
        {"model": "cloud"},
        {"user": "somebody else"},
        {"updraft": {"quality": 0.5}},
        {"logprobs": True},
        {"key": "sk-other"},
    ],
)
def test_everything_that_changes_the_answer_is_in_the_key(bench: Any, other: dict[str, Any]) -> None:
    async def test() -> None:
        async with bench(cache=ON) as b:
            await b.answer(**SAME, key="sk-mine")
            fields = {**SAME, "key": "sk-mine", **other}
            assert (await b.answer(**fields))["updraft"]["route"] != "cache"
            assert (await b.answer(**SAME, key="sk-mine"))["updraft"]["route"] == "cache"

    run(test())


@pytest.mark.parametrize(
    ("header", "is_repeat"),
    [
        *((name, False) for name in ("X-Tenant", "Anthropic-Beta", "OpenAI-Project", "HTTP-Referer", "Helicone-User")),
        *((name, True) for name in ("Traceparent", "Idempotency-Key", "X-B3-TraceId", "User-Agent", "X-Request-ID")),
    ],
)
def test_headers_for_the_cloud_are_in_the_key(bench: Any, header: str, is_repeat: bool) -> None:
    body = json.dumps({**SAME, "model": "cloud", "messages": [{"role": "user", "content": "hello"}]}).encode()

    async def test() -> None:
        async with bench(cache=ON) as b:
            for value in (None, "a", "b", "b"):
                headers = {} if value is None else {header: value}
                assert (await b.handle(WireRequest("POST", "/v1/chat/completions", headers, body, None))).status == 200
        first, *others = [row.route == "cache" for row in reversed(b.rows())]
        assert (first, others) == (False, [True] * 3 if is_repeat else [False, False, True])

    run(test())


@pytest.mark.parametrize("model", ["local", "cloud"])
def test_notes_are_cached(bench: Any, model: str) -> None:
    """A note on a header is not: it is about the repeated request."""
    asked = {**SAME, "metadata": {"a": "b"}, "client_metadata": {}, "max_tokens": 100_000}
    own = WireRequest("POST", "/v1/chat/completions", {}, b"", names={"max_tokens": "max_output_tokens"})

    async def test() -> None:
        async with bench(cache=ON) as b:
            first, again, _, events, _ = (
                await b.answer(model, **asked),
                await b.answer(model, **asked),
                *(await b.stream(model, **asked)),
            )
            body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hello"}], **asked}).encode()
            named = replace(own, body=body, headers={"unknown": "1"})
            other = [json.loads((await b.handle(named)).body)["updraft"] for _ in range(2)]
        assert again["updraft"]["route"] == updraft_of(events)["route"] == "cache"
        assert first["updraft"]["notes"] == again["updraft"]["notes"] == updraft_of(events)["notes"]
        assert "client_metadata: no effect" in first["updraft"]["notes"]
        assert ("metadata: no effect" in first["updraft"]["notes"]) == (model == "local")
        assert [info["route"] == "cache" for info in other] == [False, True], "the notes have the caller's names"
        assert [info["notes"][0] for info in other] == ["header unknown: not forwarded"] * 2

    run(test())


def test_uncached_answers(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(cache=ON) as b:
            for _ in range(2):
                assert (await b.answer(temperature=0.5))["updraft"]["route"] == "local", "it may come out another way"
                assert (await b.answer())["updraft"]["route"] == "local"
        async with bench() as b:
            for _ in range(2):
                assert (await b.answer(**SAME))["updraft"]["route"] == "local", "off unless asked for"
        async with bench(ScriptedGates(before=True), cache=ON, budget=BudgetLimits(cloud_tokens=0)) as b:
            for _ in range(2):
                assert "budget" in (await b.answer(**SAME))["updraft"]["reason"]
        async with bench(ScriptedGates(before=True), cache=ON) as b:
            cloud.mode, cloud.headers = "500", {"x-should-retry": "false"}
            for _ in range(2):
                assert (await b.answer(**SAME))["updraft"]["route"] == "fallback"
            cloud.mode = "cut"
            await b.stream("cloud", **SAME)
            cloud.mode = "healthy"
            assert (await b.answer("cloud", **SAME))["updraft"]["route"] == "cloud", "a cut stream is no answer"
            response = await b.ask("cloud", stream=True, seed=7, temperature=1)
            await anext(response.body)
            await response.body.aclose()
            assert (await b.answer("cloud", seed=7, temperature=1))["updraft"]["route"] == "cloud"

    run(test())


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_an_answer_is_cached_unless_its_budget_cut_it(bench: Any, cloud: FakeCloud, finish_reason: str) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": finish_reason}
    cloud.says = (200, json.dumps({"choices": [choice]}).encode())

    async def test() -> None:
        async with bench(cache=ON, budget=BudgetLimits(cloud_tokens=9_000)) as b:
            first, again = [(await b.answer("cloud", **SAME))["updraft"] for _ in range(2)]
            assert "the budget leaves" in first["notes"][0]
            assert again["route"] == ("cache" if finish_reason == "stop" else "cloud")
            assert ("notes" in again) == (finish_reason == "length")
            thinking = {"thinking": {"type": "enabled", "budget_tokens": 10**6}, "max_tokens": 2 * 10**6, **SAME}
            routes = [(await b.answer("cloud", **thinking))["updraft"]["route"] for _ in range(2)]
            assert routes == ["cloud", "cloud"], "the cap has shortened the thoughts"

    run(test())


@pytest.mark.parametrize("first_streams", [False, True])
def test_answer_metadata_is_cached(bench: Any, first_streams: bool) -> None:
    async def test() -> None:
        async with bench(cache=ON) as b:
            b.local.stop_reason = "default_max_tokens"
            first = (await b.stream("local", **SAME))[1][-1] if first_streams else await b.answer("local", **SAME)
            again = await b.answer("local", **SAME)
            _, events, _ = await b.stream("local", **SAME)
        assert again["updraft"]["route"] == "cache"
        assert first["sampling"] == again["sampling"] == events[-1]["sampling"]
        assert first["sampling"]["temperature"] == 0.25
        for choice in (first["choices"][0], again["choices"][0], events[-1]["choices"][0]):
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "default_max_tokens")
        assert not any("sampling" in event for event in events[:-1])

    run(test())


def test_answers_age(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("updraft.router.responses.cache.time", SimpleNamespace(monotonic=lambda: now))

    async def test() -> None:
        nonlocal now
        async with bench(cache=CacheSettings(max_mb=1.0, ttl_s=60.0)) as b:
            routes = [(await b.answer(seed=3))["updraft"]["route"]]
            now = 60.0
            routes.append((await b.answer(seed=3))["updraft"]["route"])
            now = 60.1
            routes.append((await b.answer(seed=3))["updraft"]["route"])
        assert routes == ["local", "cache", "local"]

    run(test())


@pytest.mark.parametrize(
    "choice",
    [
        {"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"},
        {"index": "0", "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"},
        {
            "index": 0,
            "message": {"role": "assistant", "content": [{"type": "text", "text": "hi"}]},
            "finish_reason": "stop",
        },
    ],
)
def test_an_answer_in_another_shape_is_one_and_is_not_kept(bench: Any, cloud: FakeCloud, choice: Any) -> None:
    async def test() -> None:
        async with bench(cache=ON) as b:
            cloud.says = (200, json.dumps({"choices": [choice]}).encode())
            assert (await b.answer("cloud", **SAME))["updraft"]["route"] == "cloud"
            cloud.says = None
            _, events, done = await b.stream("cloud", **SAME)
            assert (text_of(events), done) == (CLOUD_TEXT, True), "asked again, and it is whole"

    run(test())


@pytest.mark.parametrize("first", [{"delta": {"content": "hi"}}, {"index": 0, "delta": {"content": [{"text": "hi"}]}}])
def test_a_stream_in_another_shape_is_relayed_and_not_kept(bench: Any, cloud: FakeCloud, first: Any) -> None:
    async def test() -> None:
        last = {"delta": {}, "finish_reason": "stop"}
        raw = b"".join(b"data: " + json.dumps({"choices": [piece]}).encode() + b"\n\n" for piece in (first, last))
        cloud.says = (200, raw + b"data: [DONE]\n\n")
        async with bench(cache=ON) as b:
            for _ in range(2):
                _, events, done = await b.stream("cloud", **SAME)
                begun = {**first, "delta": {"role": "assistant", **first["delta"]}}
                assert (events[0]["choices"], updraft_of(events)["route"], done) == ([begun], "cloud", True)
        assert [row.status for row in b.rows()] == [200, 200]

    run(test())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3000)), max_size=60))
def test_cache_is_bounded_and_evicts_the_oldest(puts: list[tuple[int, int]]) -> None:
    cache, newest = AnswerCache(max_bytes=8192, ttl_s=60.0), b""
    for key, size in puts:
        newest = bytes([key])
        cache.put(newest, CachedCompletion(b"x" * size, "local", float("inf")))
        assert sum(len(e.completion) + 512 for e in cache._entries.values()) == cache._bytes <= 8192
        assert cache.get(newest) is not None


@pytest.mark.parametrize("settings", [{"max_mb": -1}, {"ttl_s": float("nan")}, {"max_mb": float("inf")}])
def test_sizes_that_mean_nothing_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="cache"):
        CacheSettings(**settings)
