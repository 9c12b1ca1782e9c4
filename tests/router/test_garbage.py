"""Garbage of a cloud instead of an answer: the device's stands in, with a row each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cascade_bench import run, text_of, updraft_of
from router_fakes import LOCAL_TEXT, FakeCloud, ScriptedGates
from updraft.classifier.online.experience import ExperienceStore
from updraft.protocol.http.sse import MAX_EVENT_BYTES
from updraft.router.accounting.budget import BudgetLimits
from updraft.router.accounting.ledger import Ledger
from updraft.router.feedback.collector import ExperienceCollector
from updraft.router.gates.exploration import ExplorationGates

DEEP = b"[" * 5000 + b"]" * 5000


def whole(message: Any, **more: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], **more}).encode()


def events(*payloads: Any) -> bytes:
    raw = (part if isinstance(part, bytes) else json.dumps(part).encode() for part in payloads)
    return b"".join(b"data: " + part + b"\n\n" for part in raw)


def piece(delta: Any, finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], **more}


SAID = {"role": "assistant", "content": "The answer."}
CALL = {"function": {"name": "f", "arguments": "5"}}
WHOLE = {
    "deep": (200, DEEP),
    "deep beside an answer": (200, b'{"odd": ' + DEEP + b", " + whole(SAID)[1:]),
    "deep error": (500, DEEP),
    "deep refusal": (500, b'{"error": ' + DEEP + b"}"),
    "text": (200, b'{"choices": [{"text": "x", "finish_reason": "stop"}]}'),
    "empty message": (200, whole({})),
    "only a role": (200, whole({"role": "assistant", "content": None, "tool_calls": []})),
    "a number": (200, whole({"role": "assistant", "content": 5})),
    "an object": (200, whole({"role": "assistant", "content": {"a": 1}})),
    "malformed calls": (200, whole({"role": "assistant", "content": None, "tool_calls": 5})),
    "an odd reason": (200, b'{"choices": [{"message": {"content": "x"}, "finish_reason": 7}]}'),
}
STREAMS = {
    "deep": events(DEEP),
    "a number": events(piece({"content": 5}), piece({}, "stop"), b"[DONE]"),
    "words": events(piece({"content": ["x"]}), piece({}, "stop"), b"[DONE]"),
    "no end": b"data: " + b"x" * MAX_EVENT_BYTES,
    "no delta": events(piece(5), piece({}, "stop"), b"[DONE]"),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_no_answer_takes_the_place_of_the_devices(bench: Any, cloud: FakeCloud, kind: str) -> None:
    async def test() -> None:
        cloud.says = WHOLE[kind]
        async with bench(ScriptedGates(after=True)) as b:
            answer = await b.answer()
            assert answer["choices"][0]["message"]["content"] == LOCAL_TEXT
            assert answer["updraft"]["route"] == "fallback"
            assert (await b.answer("cloud"))["error"]["type"] in ("upstream_error", "invalid_request_error")
        assert [(row.route, row.status == 200) for row in b.rows()] == [("none", False), ("fallback", True)]

    run(test())


@pytest.mark.parametrize("kind", STREAMS)
def test_no_stream_takes_the_place_of_the_devices(bench: Any, cloud: FakeCloud, kind: str) -> None:
    async def test() -> None:
        cloud.says = (200, STREAMS[kind])
        async with bench(ScriptedGates(after=True)) as b:
            _, got, done = await b.stream()
            assert (text_of(got), updraft_of(got)["route"], done) == (LOCAL_TEXT, "fallback", True)
            cloud.says = (200, events(piece({"content": "The "})), STREAMS[kind])
            _, got, done = await b.stream("cloud")
            assert (got[-1]["error"]["type"], done) == ("upstream_error", False), "it had begun: a typed end"
        assert [(row.route, row.status) for row in b.rows()] == [("cloud", 502), ("fallback", 200)]

    run(test())


@pytest.mark.parametrize(
    ("message", "graded"),
    [
        ({"role": "assistant", "content": ""}, (1, 0)),
        ({"role": "assistant", "content": [{"type": "text", "text": "x"}]}, None),
        ({"role": "assistant", "content": None, "refusal": "no"}, (1, 0)),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, None),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1", **CALL}]}, (0, 1)),
        ({"role": "assistant", "content": LOCAL_TEXT, "refusal": 5}, None),
    ],
)
def test_answers_with_content_are_not_garbage(
    bench: Any, cloud: FakeCloud, tmp_path: Path, message: Any, graded: tuple[float, float] | None
) -> None:
    """Also to those who learn from it: what they cannot read has no grade."""

    async def test() -> None:
        cloud.says = (200, whole(message))
        async with bench(ExplorationGates(ScriptedGates(after=True))) as b:
            b.router._learning._collector = ExperienceCollector(
                ExperienceStore(tmp_path / "experience.sqlite3"), "pair"
            )
            answer = await b.answer()
            assert (answer["choices"][0]["message"], answer["updraft"]["route"]) == (message, "escalated")
        assert [row.status for row in b.rows()] == [200]
        experience = ExperienceStore(tmp_path / "experience.sqlite3")
        assert [row.pair_grades for row in experience.rows("pair")] == [graded]
        experience.close()

    run(test())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("read", "written"), [(10**19, 10**30), (1e308, 1e308), (5, 1e308), (5, 10**19), (5, -1), (-5, 5), (True, 5)]
)
def test_counts_that_cannot_be_are_no_counts(
    bench: Any, cloud: FakeCloud, stream: bool, read: Any, written: Any
) -> None:
    """Impossible counts are ignored: row and budget settle on the estimate."""

    async def test() -> None:
        usage = {"prompt_tokens": read, "completion_tokens": written}
        chunks = events(piece({"content": "x"}, usage=usage), piece({}, "stop"), b"[DONE]")
        cloud.says = (200, chunks if stream else whole(SAID, usage=usage))
        async with bench(budget=BudgetLimits(cloud_tokens=10_000)) as b:
            for _ in range(2):
                if stream:
                    _, _, done = await b.stream("cloud", max_tokens=50)
                    assert done
                else:
                    assert (await b.answer("cloud", max_tokens=50))["choices"][0]["message"] == SAID
        ledger = Ledger(b.ledger)
        with ledger.transaction() as connection:
            (spent,) = connection.execute("SELECT cloud_tokens FROM spending").fetchone()
        ledger.close()
        assert 100 < spent < 1000
        assert [row.status for row in b.rows()] == [200] * 2
        assert sum(row.cloud_prompt_tokens + row.cloud_tokens for row in b.rows()) == spent

    run(test())


def test_learning_harms_no_answer(bench: Any) -> None:
    class Broken:
        def observe(self, judged: Any) -> None:
            raise RuntimeError("no more")

        async def close(self) -> None:
            pass

    async def test() -> None:
        async with bench(ScriptedGates(after=True)) as b:
            b.router._learning._collector = Broken()
            assert (await b.answer())["updraft"]["route"] == "escalated"
        assert [row.status for row in b.rows()] == [200]

    run(test())


def test_closing_closes_everything_whatever_fails(bench: Any) -> None:
    class Broken:
        async def close(self) -> None:
            raise RuntimeError("no more")

    async def test() -> None:
        async with bench() as b:
            await b.answer()
            b.router._learning._collector = Broken()
            with pytest.raises(RuntimeError, match="no more"):
                await b.router.close()
            assert b.local.closed
        assert not b.ledger.with_name("ledger.sqlite3-wal").exists(), "the ledger is closed"

    run(test())
