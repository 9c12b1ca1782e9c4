"""Untrusted constraints: hostile ones are refused in bounded time and memory, and the next one is served."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from updraft.protocol.errors import EngineError, InvalidRequestError, OverloadedError
from updraft.protocol.structured import Constraint
from updraft.text.grammars.check import GrammarCheck
from updraft.text.grammars.compiler import Vocabulary
from updraft.text.tokenizer import Tokenizer
from wire_requests import parse_chat

POCKET = Path(__file__).resolve().parents[3] / "embedded" / "weights" / "pocket-large"


def checking(test: Callable[[GrammarCheck], Awaitable[None]]) -> None:
    others = set(psutil.Process().children())

    async def run() -> None:
        tokenizer = Tokenizer.from_folder(POCKET)
        check = GrammarCheck(lambda: Vocabulary.of(tokenizer, tokenizer.eos_ids))
        try:
            await test(check)
        finally:
            await check.close()
        assert set(psutil.Process().children()) <= others

    asyncio.run(run())


def schema(value: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(value), "response_format")


def regex(pattern: str) -> Constraint:
    return Constraint("regex", pattern, "structured_outputs")


def branches(depth: int) -> dict[str, Any]:
    """4 ** depth combinations."""
    names = [[f"k{i}_{j}" for j in range(4)] for i in range(depth)]
    return {"allOf": [{"anyOf": [{"type": "object", "properties": {name: {}}} for name in four]} for four in names]}


def deep(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        value = {"type": "array", "items": value}
    return value


HOSTILE = {
    "half a gigabyte of states": schema({"type": "integer", "multipleOf": 1234567}),
    "a product of moduli": schema(
        {"allOf": [{"type": "integer", "multipleOf": p} for p in (7, 11, 13, 17, 19, 23, 29)]}
    ),
    "combinations": schema(branches(7)),
    "thousands of optional fields": schema({"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}),
    "recursion that never ends": schema({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}),
    "deeper than its parser": schema(deep(200)),
    "counted repetitions": regex("(?:a?){5000}a{5000}"),
    "a tower of brackets": regex("(" * 5000 + "a" + ")" * 5000),
    "a tower in Lark": Constraint("lark", "start: " + "(" * 3000 + '"a"' + ")" * 3000, "structured_outputs"),
    "a million of it": Constraint("lark", 'start: "a"{1000000}', "structured_outputs"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_are_refused_in_bounded_time(name: str) -> None:
    async def test(check: GrammarCheck) -> None:
        await check.check(schema({"type": "object"}))  # the child has started
        cpu, started = time.process_time(), time.perf_counter()
        with pytest.raises(InvalidRequestError) as caught:
            await check.check(HOSTILE[name])
        assert caught.value.param == HOSTILE[name].param
        assert caught.value.code in ("invalid_grammar", "grammar_too_complex")
        assert time.process_time() - cpu < 0.5  # this process hardly noticed
        assert time.perf_counter() - started < 60  # 1 s of CPU time, on a machine that may be busy
        await check.check(schema({"type": "integer"}))

    checking(test)


@pytest.mark.parametrize(
    "pattern", ["(a|b)*a(a|b){25}", "(x+x+)+y", "((a{1,99}){1,99}){1,99}", ".*x.{300}", "(.{1,500}x){1,500}"]
)
def test_patterns_that_are_slow_elsewhere_compile(pattern: str) -> None:
    """The automata are built as far as an answer goes."""
    checking(lambda check: check.check(regex(pattern)))


def test_a_flood_does_not_stall_the_event_loop() -> None:
    async def test(check: GrammarCheck) -> None:
        longest, turns = 0.0, 0

        async def tick() -> None:
            nonlocal longest, turns
            while True:
                before = time.thread_time()
                await asyncio.sleep(0.01)
                longest, turns = max(longest, time.thread_time() - before), turns + 1

        ticking = asyncio.create_task(tick())
        flood = [check.check(HOSTILE["half a gigabyte of states"]), check.check(HOSTILE["combinations"])]
        refused = await asyncio.gather(*flood, check.check(schema({})), return_exceptions=True)
        ticking.cancel()
        assert [type(one) for one in refused] == [InvalidRequestError, InvalidRequestError, type(None)]
        assert longest < 0.5, "it computed nothing itself"
        assert turns > 10, "it waited for nobody"

    checking(test)


def moduli(count: int) -> list[Constraint]:
    return [schema({"type": "integer", "multipleOf": 1234567 + 2 * i}) for i in range(count)]


def test_one_tenants_flood_does_not_stand_before_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("updraft.text.grammars.check._QUEUE_TIMEOUT_S", 600)  # the machine may be busy

    async def test(check: GrammarCheck) -> None:
        flood = [asyncio.create_task(check.check(one, "flood")) for one in moduli(70)]  # more than may wait
        await asyncio.sleep(0.3)
        await check.check(regex("[0-9]{3}x?"), "other")
        done = [one.exception() for one in flood if one.done()]
        assert sum(isinstance(error, InvalidRequestError) for error in done) <= 2
        overloaded = [error for error in done if isinstance(error, OverloadedError)]
        assert len(overloaded) == 70 - 1 - 64 + 1  # one is served, 64 wait, and one of these was evicted
        assert overloaded[0].headers()["retry-after"]
        for one in flood:
            one.cancel()
        await asyncio.gather(*flood, return_exceptions=True)

    checking(test)


def test_waiting_checks_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("updraft.text.grammars.check._QUEUE_TIMEOUT_S", 0.1)

    async def test(check: GrammarCheck) -> None:
        bad, good = await asyncio.gather(check.check(moduli(1)[0]), check.check(schema({})), return_exceptions=True)
        assert (type(bad), type(good)) == (InvalidRequestError, OverloadedError)
        await check.check(schema({}))

    checking(test)


def test_refusals_are_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    constraints: list[Constraint] = []
    ask = GrammarCheck._ask

    async def counted(self: GrammarCheck, constraint: Constraint) -> object:
        constraints.append(constraint)
        return await ask(self, constraint)

    monkeypatch.setattr(GrammarCheck, "_ask", counted)

    async def test(check: GrammarCheck) -> None:
        async def refused() -> None:
            with pytest.raises(InvalidRequestError, match="takes over") as caught:
                await check.check(moduli(1)[0])
            assert caught.value.code == "grammar_too_complex"

        await refused()
        await refused()
        assert len(constraints) == 1
        now = time.monotonic()
        monkeypatch.setattr("updraft.text.grammars.check.time.monotonic", lambda: now + 61)
        await refused()
        assert len(constraints) == 2

    checking(test)


@pytest.mark.skipif(sys.platform != "linux", reason="needs waitid")
def test_a_child_that_its_limits_ended_leaves_no_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio warns where somebody else took the exit code of a child before it did."""
    waitpid = os.waitpid

    def late(pid: int, options: int) -> tuple[int, int]:
        if options == 0:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            time.sleep(0.05)
        return waitpid(pid, options)

    monkeypatch.setattr("os.waitpid", late)

    async def test(check: GrammarCheck) -> None:
        with pytest.raises(InvalidRequestError):
            await check.check(moduli(1)[0])

    checking(test)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_cancelled_check_keeps_other_answers() -> None:
    async def test(check: GrammarCheck) -> None:
        left = asyncio.create_task(check.check(HOSTILE["half a gigabyte of states"]))
        await asyncio.sleep(0.6)
        left.cancel()
        await check.check(schema({"type": "string"}))
        with pytest.raises(InvalidRequestError, match="elephant"):
            await check.check(schema({"type": "elephant"}))

    checking(test)


def test_a_child_that_cannot_start_is_no_fault_of_the_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(check: GrammarCheck) -> None:
        monkeypatch.setattr("sys.executable", "/bin/false")
        with pytest.raises(EngineError, match="exited at startup"):
            await check.check(schema({"type": "object"}))
        monkeypatch.undo()
        await check.check(schema({"type": "object"}))

    checking(test)


def test_sizes_are_checked_before_anything_is_compiled() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for field in (
        {"structured_outputs": {"regex": "a" * 2**18}},
        {"structured_outputs": {"choice": ["a" * 50_000] * 4}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": deep(70)}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep(70)}}]},
    ):
        with pytest.raises(InvalidRequestError) as caught:
            parse_chat(json.dumps({**body, **field}).encode())
        assert caught.value.param == next(iter(field))
