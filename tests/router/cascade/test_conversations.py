"""Conversations and agent turns: within them, the tier changes only towards the cloud."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cascade_bench import Bench, run, text_of, updraft_of
from router_fakes import FakeCloud, ScriptedGates
from updraft.text.tool_calls import ToolSyntax
from updraft.text.tool_formats import ToolFormat

FIRST = {"role": "user", "content": "a hard question"}
AND = {"role": "user", "content": "and why?"}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
STAYS = "the cloud answered earlier in this conversation"


class Turns:
    """A conversation as an app sends it: whole, with each answer that it got."""

    def __init__(self, bench: Bench, *, stream: bool = False, key: str | None = None) -> None:
        self.bench, self.stream, self.key = bench, stream, key
        self.messages: list[dict[str, Any]] = []

    async def ask(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Send the next messages, and return the `updraft` object of the answer."""
        self.messages += messages
        if self.stream:
            _, events, _ = await self.bench.stream(messages=self.messages, **fields)
            said, info = text_of(events), updraft_of(events)
        else:
            answer = await self.bench.answer(messages=self.messages, key=self.key, **fields)
            said, info = answer["choices"][0]["message"]["content"], answer["updraft"]
        self.messages.append({"role": "assistant", "content": said})
        return info


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_stays_in_the_cloud(bench: Callable[..., Any], cloud: FakeCloud, *, stream: bool) -> None:
    async def check() -> None:
        gates = ScriptedGates(before=True)
        async with bench(gates) as router:
            turns = Turns(router, stream=stream)
            assert (await turns.ask(FIRST))["reason"] == "gate 1"
            gates._before = False
            for _ in range(3):
                info = await turns.ask(AND)
                assert (info["tier"], info["reason"], info["gate"]) == ("cloud", STAYS, 0)
            other = await Turns(router, stream=stream).ask({"role": "user", "content": "another question"})
            assert other["tier"] == "local"

    run(check())


def test_a_local_conversation_may_move_to_the_cloud_and_stays_there(bench: Callable[..., Any]) -> None:
    async def check() -> None:
        gates = ScriptedGates()
        async with bench(gates) as router:
            turns = Turns(router)
            assert [(await turns.ask(each))["tier"] for each in (FIRST, AND)] == ["local", "local"]
            gates._after = True
            assert (await turns.ask(AND))["route"] == "escalated"
            gates._after = False
            assert (await turns.ask(AND))["reason"] == STAYS

    run(check())


def test_an_agent_of_forty_steps_changes_its_tier_once(bench: Callable[..., Any]) -> None:
    """The steps of an agent's turn: calls of the model, results of the app, no user between them."""

    async def check() -> None:
        gates = ScriptedGates()
        async with bench(gates) as router:
            router.local.tool_format = ToolFormat("hermes", ToolSyntax("<tool_call>", "</tool_call>"), {})
            messages: list[dict[str, Any]] = [FIRST]
            tiers: list[str] = []
            for step in range(40):
                gates._before = step == 10
                answer = await router.answer(messages=messages, tools=TOOLS)
                tiers.append(answer["updraft"]["tier"])
                called = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": f"call_{step}"}]}
                messages += [called, {"role": "tool", "tool_call_id": f"call_{step}", "content": f"result {step}"}]
            assert tiers == ["local"] * 10 + ["cloud"] * 30
            rows = router.rows()
            assert sum(row.reason == STAYS for row in rows) == 29

    run(check())


def test_other_keys_private_requests_and_named_tiers_are_not_bound(bench: Callable[..., Any]) -> None:
    async def check() -> None:
        gates = ScriptedGates(before=True)
        async with bench(gates) as router:
            turns = Turns(router, key="one")
            assert (await turns.ask(FIRST))["tier"] == "cloud"
            gates._before = False
            continued = [*turns.messages, AND]
            assert (await router.answer(messages=continued, key="other"))["updraft"]["tier"] == "local"
            for fields in ({"model": "local"}, {"updraft": {"private": True}}):
                answer = await router.answer(messages=continued, key="one", **fields)
                assert answer["updraft"]["tier"] == "local"
            assert (await router.answer(messages=continued, key="one"))["updraft"]["reason"] == STAYS

    run(check())


def test_a_named_cloud_binds_what_follows(bench: Callable[..., Any]) -> None:
    async def check() -> None:
        async with bench(ScriptedGates()) as router:
            turns = Turns(router)
            assert (await turns.ask(FIRST, model="cloud"))["tier"] == "cloud"
            assert (await turns.ask(AND))["reason"] == STAYS

    run(check())


def test_without_the_cloud_the_device_continues(bench: Callable[..., Any], cloud: FakeCloud, short_waits: None) -> None:
    async def check() -> None:
        gates = ScriptedGates(before=True)
        async with bench(gates, fallback="any") as router:
            turns = Turns(router)
            await turns.ask(FIRST)
            cloud.mode = "500"
            assert (await turns.ask(AND))["route"] == "fallback"

    run(check())
