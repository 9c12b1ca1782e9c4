"""Scheduling policies: their order, and that no stream of later requests starves a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_steps import run_step
from updraft.cloud_engine.engine.config import EngineConfig, SchedulingPolicy
from updraft.cloud_engine.engine.kv.kv_cache_manager import KVCacheManager
from updraft.cloud_engine.engine.scheduling.policies import FORGIVEN_TOKENS_PER_S, PREFILL_TOKEN_S, PRIORITY_S
from updraft.cloud_engine.engine.scheduling.scheduler import Scheduler
from updraft.cloud_engine.engine.speculation.speculator import Speculator
from updraft.cloud_engine.engine.types.prediction import PredictionCursor
from updraft.cloud_engine.engine.types.request import MAX_PRIORITY, GenerationRequest
from updraft.cloud_engine.engine.types.request_state import RequestState
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.sampling import ResolvedParams

BLOCK, BLOCKS, LONGEST, ANSWER = 4, 24, 30, 3
STEP_S = 5.0
POLICIES: tuple[SchedulingPolicy, ...] = ("fcfs", "priority", "shortest-prefill", "fair")
#: Bounds of the seconds within which a later request can overtake another one, by policy.
WINDOWS_S: dict[SchedulingPolicy, Callable[[], float]] = {
    "fcfs": lambda: 0,
    "priority": lambda: 2 * MAX_PRIORITY * PRIORITY_S,
    "shortest-prefill": lambda: LONGEST * PREFILL_TOKEN_S,
    "fair": lambda: 8 * (LONGEST + ANSWER) / 0.5 / FORGIVEN_TOKENS_PER_S,
}


def scheduler_of(policy: SchedulingPolicy, batch: int = 1) -> Scheduler:
    config = EngineConfig(
        block_size=BLOCK, max_num_seqs=batch, max_num_batched_tokens=64, scheduling_policy=policy, max_waiting=10_000
    )
    return Scheduler(config, KVCacheManager(BLOCKS, BLOCK), Speculator([], config))


def state_of(name: str, prompt: int, arrived: float, max_tokens: int = ANSWER, **options: Any) -> RequestState:
    request = GenerationRequest(name, [1] * prompt, **options)
    greedy, cursor = ResolvedParams(temperature=0.0), PredictionCursor([])
    return RequestState(request, max_tokens, greedy, 0, frozenset(), [1] * prompt, cursor, arrived=arrived)


def served_tokens(scheduler: Scheduler, steps: int) -> Counter[str]:
    """Return the tokens of prompts and answers in `steps`, by the first letter of the request's name."""
    served = Counter[str]()
    for _ in range(steps):
        begun = {state.request_id for state in scheduler.running}
        prompts = {state.request_id: state.num_prompt_tokens for state in scheduler.waiting}
        for name in run_step(scheduler):
            served[name[0]] += 1 + (0 if name in begun else prompts[name])
    return served


RIVALS = st.tuples(
    st.integers(1, LONGEST), st.integers(-MAX_PRIORITY, MAX_PRIORITY), st.integers(0, 3), st.sampled_from([0.5, 1.0, 9])
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(
    before=st.lists(RIVALS, max_size=5),
    rivals=st.lists(RIVALS, min_size=1, max_size=5),
    batch=st.integers(1, 3),
    are_new_tenants=st.booleans(),
)
def test_no_stream_of_rivals_starves_a_request(
    policy: SchedulingPolicy, before: list[Any], rivals: list[Any], batch: int, are_new_tenants: bool
) -> None:
    """Rivals arrive faster than they are served, at their worst for the request, and from ever new tenants. Those that
    arrive after the policy's window never begin before the request."""
    scheduler = scheduler_of(policy, batch)

    def add(name: str, rival: Any, now: float, **more: Any) -> None:
        prompt, priority, tenant, weight = rival
        options = {"priority": priority, "tenant": str(tenant), "weight": weight} | more
        scheduler.add(state_of(name, prompt, now, **options))

    for number, rival in enumerate(before):
        add(f"before {number}", rival, 0.0)
    add("victim", (LONGEST, MAX_PRIORITY, 0, 0.5), 0.0)
    window_s, now, begun = WINDOWS_S[policy](), 0.0, set[str]()
    last_overtaking = int(window_s / STEP_S) + 1
    for step in range(12 * last_overtaking + 40 * len(before) + 200):
        now += STEP_S
        if step <= last_overtaking + 20:
            for number in range(2 if policy != "priority" else 1):
                more = {"tenant": f"new {step} {number}"} if are_new_tenants else {}
                add(f"rival {step} {number}", rivals[(step + number) % len(rivals)], now, **more)
        begun.update(run_step(scheduler))
        if "victim" in begun:
            break
        assert not {name for name in begun if name.startswith("rival") and int(name.split()[1]) > last_overtaking}
    assert "victim" in begun


@pytest.mark.parametrize("policy", ["priority", "shortest-prefill"])
def test_long_waits_outweigh_preference(policy: SchedulingPolicy) -> None:
    scheduler = scheduler_of(policy)
    scheduler.add(state_of("fresh", 2, 60.0, priority=0))
    scheduler.add(state_of("waiting", LONGEST, 0.0, priority=2))
    assert run_step(scheduler) == ["waiting"]


def test_short_prompts_go_first() -> None:
    scheduler = scheduler_of("shortest-prefill")
    for name, length in (("long", 40), ("short", 3), ("middle", 20)):
        scheduler.add(state_of(name, length, 0.0))
    assert [state.request_id for state in scheduler.waiting] == ["short", "middle", "long"]


def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    scheduler = scheduler_of("fair")
    for number in range(50):
        scheduler.add(state_of(f"flood {number}", 8, 0.0, tenant="a"))
    run_step(scheduler)
    scheduler.add(state_of("single", 8, 0.0, tenant="b"))
    begun = [name for _ in range(3 * ANSWER) for name in run_step(scheduler)]
    assert begun.index("single") <= 2 * ANSWER


@pytest.mark.parametrize("weight", [1.0, 2.0, 4.0])
def test_tenants_share_tokens_by_weight(weight: float) -> None:
    """One tenant sends many short requests, and the other one few long requests."""
    scheduler = scheduler_of("fair")
    for number in range(400):
        scheduler.add(state_of(f"a {number}", 2, 0.0, tenant="a", weight=weight))
    for number in range(200):
        scheduler.add(state_of(f"b {number}", 22, 0.0, max_tokens=8, tenant="b"))
    served = served_tokens(scheduler, 400)
    assert served["a"] / served["b"] == pytest.approx(weight, rel=0.15)


def test_nobody_pays_for_use_while_others_were_idle() -> None:
    scheduler = scheduler_of("fair")
    for number in range(40):
        scheduler.add(state_of(f"a {number}", 8, 0.0, tenant="a"))
    served_tokens(scheduler, 20 * ANSWER)
    for number in range(40):
        scheduler.add(state_of(f"b {number}", 8, 0.0, tenant="b"))
    served = served_tokens(scheduler, 20 * ANSWER)
    assert served["a"] == pytest.approx(served["b"], rel=0.2)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="fcfs or priority or shortest-prefill or fair"):
        EngineConfig(scheduling_policy="fastest")  # type: ignore[arg-type]
