"""The scheduler and its block pool under any order of events: no leak, no double use, always progress."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from updraft.cloud_engine.engine.block_pool import BlockPool
from updraft.cloud_engine.engine.config import EngineConfig, Policy
from updraft.cloud_engine.engine.kv_cache import KVCacheManager
from updraft.cloud_engine.engine.prediction import PredictionCursor
from updraft.cloud_engine.engine.request import GenerationRequest, RequestState
from updraft.cloud_engine.engine.scheduler import ScheduledRequest, Scheduler
from updraft.protocol.errors import ConfigurationError, OverloadedError

BLOCK, BLOCKS, BUDGET, BATCH, WAITING = 4, 10, 12, 4, 5


def make_state(
    name: str, prompt: list[int], max_tokens: int, draft: list[int] | None = None, **options: Any
) -> RequestState:
    request = GenerationRequest(name, prompt, draft_ids=draft or [], **options)
    return RequestState(request, max_tokens, 0.0, 0, frozenset(), list(prompt), PredictionCursor(draft or []))


class Simulation(RuleBasedStateMachine):
    """An engine without a model. `memory` stands for the KV tensors: which token was last written into each slot."""

    policy: Policy = "fcfs"

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCacheManager(BLOCKS, BLOCK)
        config = EngineConfig(
            block_size=BLOCK,
            max_batch_size=BATCH,
            token_budget=BUDGET,
            max_waiting=WAITING,
            num_draft_tokens=3,
            policy=self.policy,
        )
        self.scheduler = Scheduler(config, self.cache, num_draft_tokens=3)
        self.memory: dict[int, int] = {}
        self.salts: dict[int, str] = {}
        self.random = random.Random(0)
        self.names = 0
        self.now = 0.0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        output=st.integers(1, 12),
        predicted=st.booleans(),
        priority=st.integers(-1, 2),
        salt=st.sampled_from(["", "a"]),
        pause=st.sampled_from([0.1, 1.0, 15.0]),
        answers=st.sampled_from([1, 1, 2, 4]),
    )
    def add(
        self, prompt: list[int], output: int, predicted: bool, priority: int, salt: str, pause: float, answers: int
    ) -> None:
        self.names += 1
        self.now += pause
        draft = [0, 1, 0, 1, 1, 0] if predicted else None
        state = make_state(str(self.names), prompt, output, draft, priority=priority, cache_salt=salt)
        state.arrived = self.now
        state.unforked = answers - 1
        assert self.scheduler.fits(len(prompt) + output)
        full = len(self.scheduler.waiting) >= WAITING
        try:
            self.scheduler.add(state)
            assert not full
        except OverloadedError:
            assert full

    @precondition(lambda self: self.scheduler.requests())
    @rule()
    def step(self) -> None:
        before = {state: (len(state.token_ids), state.num_computed_tokens) for state in self.scheduler.requests()}
        oldest = min(before, key=lambda state: (state.order, int(state.request_id)))
        batch = self.scheduler.schedule()
        copies = self.cache.take_copies()
        contents = [[self.memory.get(source * BLOCK + i) for i in range(BLOCK)] for source, _ in copies]
        for (source, target), content in zip(copies, contents, strict=True):
            self.salts[target] = self.salts[source]
            self.memory |= {target * BLOCK + i: token for i, token in enumerate(content) if token is not None}
        assert sum(item.num_tokens + len(item.draft_ids) + item.num_model_drafts for item in batch) <= BUDGET
        assert len({id(item.state) for item in batch}) == len(batch) == len(self.scheduler.running) <= BATCH
        assert all(item.num_tokens >= 1 for item in batch)
        first = self.scheduler.running[0].request_id
        assert self.policy != "fcfs" or first == oldest.request_id
        assert self.scheduler.running == sorted(self.scheduler.running, key=lambda state: state.order)
        for item in batch:
            item.draft_ids = item.draft_ids or [self.random.randrange(2) for _ in range(item.num_model_drafts)]
            self.write(item)
        for item in batch:
            self.check_reads(item)
            self.advance(item)
        group = [state for state in before if state.request_id == first]
        moved = [(len(state.token_ids), state.num_computed_tokens) > before[state] for state in group]
        assert any(moved), "the first always moves"

    def write(self, item: ScheduledRequest) -> None:
        known = item.state.token_ids[item.start : item.start + item.num_tokens]
        for position, token in enumerate(known + item.draft_ids, start=item.start):
            block = item.state.block_table[position // BLOCK]
            assert self.cache.pool.references(block) == 1, "a shared block is written"
            self.memory[block * BLOCK + position % BLOCK] = token
            self.salts[block] = item.state.request.cache_salt

    def check_reads(self, item: ScheduledRequest) -> None:
        state = item.state
        for position, token in enumerate(state.token_ids[: item.start + item.num_tokens]):
            slot = state.block_table[position // BLOCK] * BLOCK + position % BLOCK
            assert self.memory[slot] == token, "a request reads what is not its own"
            assert self.salts[slot // BLOCK] == state.request.cache_salt, "a tenant reads another's block"

    def advance(self, item: ScheduledRequest) -> None:
        state = item.state
        if not item.is_caught_up:
            state.num_computed_tokens += item.num_tokens
            self.cache.register(state)
            return
        for _ in range(state.unforked):
            self.branch_off(state)
        accepted = self.random.randint(0, len(item.draft_ids))
        state.num_computed_tokens = len(state.token_ids) + accepted
        new = [*item.draft_ids[:accepted], self.random.randrange(2)]
        state.token_ids.extend(new)
        state.prediction.advance(state.token_ids, len(new), len(item.draft_ids))
        self.cache.register(state)
        if state.num_remaining_tokens == 0 or self.random.random() < 0.1:
            self.scheduler.remove(state)
        else:
            assert state.num_remaining_tokens > 0
            self.cache.trim(state)

    def branch_off(self, parent: RequestState) -> None:
        self.names += 1
        child = make_state(str(self.names), parent.request.prompt_ids, parent.max_tokens)
        child.request = parent.request
        child.num_computed_tokens = len(parent.token_ids)
        self.scheduler.fork(parent, child)
        child.token_ids = [*parent.token_ids, self.random.randrange(2)]
        if child.num_remaining_tokens == 0:
            self.scheduler.remove(child)

    @precondition(lambda self: self.scheduler.requests())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.remove(data.draw(st.sampled_from(self.scheduler.requests())))

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        pool = self.cache.pool
        held = Counter(block for state in self.scheduler.running for block in state.block_table)
        assert all(pool.references(block) == held[block] for block in range(BLOCKS))
        assert pool.num_used == len(held)
        assert not any(state.block_table for state in self.scheduler.waiting)
        for state in self.scheduler.running:
            assert len(set(state.block_table)) == len(state.block_table)
            needed, most = (self.cache.blocks_for(n) for n in (state.num_computed_tokens, len(state.token_ids)))
            assert needed <= len(state.block_table) <= most

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.scheduler.requests():
                break
            self.step()
        assert not self.scheduler.requests(), "a request is stuck"
        assert self.cache.pool.num_used == 0


class PrioritySimulation(Simulation):
    policy: Policy = "priority"


class ShortestPrefillSimulation(Simulation):
    policy: Policy = "shortest-prefill"


SETTINGS = settings(max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
for simulation in (Simulation, PrioritySimulation, ShortestPrefillSimulation):
    simulation.TestCase.settings = SETTINGS
TestSimulation = Simulation.TestCase
TestPrioritySimulation = PrioritySimulation.TestCase
TestShortestPrefillSimulation = ShortestPrefillSimulation.TestCase


def test_the_pool_reuses_the_least_recently_released_block_and_forgets_its_content() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        pool.register(block, bytes([block]))
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    assert pool.lookup(bytes([blocks[1]])) == blocks[1]
    pool.share(blocks[1])  # taken back from the free list
    assert pool.allocate() == blocks[0]
    assert pool.lookup(bytes([blocks[0]])) is None
    assert pool.lookup(bytes([blocks[2]])) == blocks[2]


def test_the_pool_refuses_a_double_release() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(ValueError, match="released more often"):
        pool.release(block)


def test_decodes_go_on_while_a_long_prompt_is_prefilled() -> None:
    cache = KVCacheManager(100, BLOCK)
    scheduler = Scheduler(EngineConfig(block_size=BLOCK, max_batch_size=4, token_budget=8), cache)
    long, short = make_state("long", [1] * 30, 4), make_state("short", [1, 2], 4)
    scheduler.add(long)
    scheduler.add(short)
    shares: list[list[tuple[str, int]]] = []
    for _ in range(5):
        batch = scheduler.schedule()
        shares.append([(item.state.request_id, item.num_tokens) for item in batch])
        for item in batch:
            item.state.num_computed_tokens += item.num_tokens
            if item.is_caught_up:
                item.state.token_ids.append(0)
    assert shares[0] == [("long", 8)]
    assert shares[3] == [("long", 6), ("short", 2)]
    assert shares[4] == [("long", 1), ("short", 1)]


def ran(scheduler: Scheduler) -> list[str]:
    """One step; who was in it, in order."""
    batch = scheduler.schedule()
    for item in batch:
        item.state.num_computed_tokens += item.num_tokens
        if item.is_caught_up:
            item.state.token_ids.append(0)
    return [item.state.request_id for item in batch]


def small(policy: Policy, *, batch: int = 1, blocks: int = 100) -> Scheduler:
    config = EngineConfig(block_size=BLOCK, max_batch_size=batch, token_budget=64, policy=policy)
    return Scheduler(config, KVCacheManager(blocks, BLOCK))


def test_a_higher_priority_takes_the_place_of_a_running_request() -> None:
    scheduler = small("priority")
    scheduler.add(make_state("later", [1] * 5, 9, priority=1))
    assert ran(scheduler) == ["later"]
    scheduler.add(make_state("equal", [1] * 5, 9, priority=1))
    assert ran(scheduler) == ["later"]
    scheduler.add(make_state("urgent", [2] * 5, 9, priority=0))
    assert ran(scheduler) == ["urgent"]
    assert [state.request_id for state in scheduler.waiting] == ["later", "equal"]
    assert scheduler.num_preemptions == 1


def test_a_long_prefill_does_not_use_up_the_budget_of_who_comes_first() -> None:
    config = EngineConfig(block_size=BLOCK, max_batch_size=4, token_budget=8, policy="priority")
    scheduler = Scheduler(config, KVCacheManager(100, BLOCK))
    scheduler.add(make_state("long", [1] * 30, 9, priority=1))
    assert ran(scheduler) == ["long"]
    scheduler.add(make_state("urgent", [2] * 3, 9, priority=0))
    assert ran(scheduler) == ["urgent", "long"]


def test_a_higher_priority_takes_no_place_it_does_not_need() -> None:
    scheduler = small("priority", batch=2)
    scheduler.add(make_state("later", [1] * 5, 9, priority=1))
    ran(scheduler)
    scheduler.add(make_state("urgent", [2] * 5, 9, priority=0))
    assert ran(scheduler) == ["urgent", "later"]
    assert scheduler.num_preemptions == 0


def test_a_higher_priority_takes_blocks_where_there_are_none() -> None:
    scheduler = small("priority", batch=2, blocks=3)
    scheduler.add(make_state("later", [1] * 9, 3, priority=1))
    ran(scheduler)
    scheduler.add(make_state("urgent", [2] * 5, 3, priority=0))
    assert ran(scheduler) == ["urgent"]


@pytest.mark.parametrize("policy", ["priority", "shortest-prefill"])
def test_who_waits_long_enough_goes_first(policy: Policy) -> None:
    scheduler = small(policy)
    waiting = make_state("waiting", [1] * 30, 3, priority=2)
    waiting.arrived -= 60.0
    scheduler.add(make_state("fresh", [2] * 2, 3, priority=0))
    scheduler.add(waiting)
    assert ran(scheduler) == ["waiting"]


def test_short_prompts_go_first() -> None:
    scheduler = small("shortest-prefill")
    for name, length in (("long", 40), ("short", 3), ("middle", 20)):
        scheduler.add(make_state(name, [1] * length, 3))
    assert [state.request_id for state in scheduler.waiting] == ["short", "middle", "long"]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="fcfs or priority or shortest-prefill"):
        EngineConfig(policy="fastest")  # type: ignore[arg-type]


def test_drafts_take_only_what_is_left_over() -> None:
    cache = KVCacheManager(3, BLOCK)
    scheduler = Scheduler(EngineConfig(block_size=BLOCK, max_batch_size=2, token_budget=64), cache, num_draft_tokens=4)
    scheduler.add(make_state("a", [1] * 4, 9))
    scheduler.add(make_state("b", [2] * 3, 9))
    first, second = scheduler.schedule()
    assert (first.num_model_drafts, second.num_model_drafts) == (4, 0)  # the third block is gone
    assert scheduler.num_preemptions == 0


def test_scheduling_needs_no_torch() -> None:
    code = (
        "import sys; import updraft.cloud_engine.engine.scheduler, updraft.cloud_engine.engine.kv_cache; "
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(root / ".typing")}, timeout=60)


def test_a_fork_does_not_write_into_what_its_parent_has_registered() -> None:
    """The parent's drafts filled their common block in the step of the fork, and the parent is gone."""
    cache = KVCacheManager(4, BLOCK)
    parent, child = make_state("parent", [1], 8), make_state("child", [1], 8)
    assert cache.admit(parent)
    child.num_computed_tokens = 1
    cache.fork(parent, child)
    parent.token_ids, parent.num_computed_tokens = [1, 0, 1, 0], 4
    cache.register(parent)
    [block] = parent.block_table
    cache.free(parent)
    child.token_ids = [1, 1]
    assert cache.grow(child, 2)
    assert cache.take_copies() == [(block, child.block_table[0])]
    assert child.block_table != [block]
