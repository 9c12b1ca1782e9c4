"""The scheduler and its block pool under any order of events: no leak, no double use, always progress."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forward_chunks import Chunk
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduler_steps import run_step
from updraft.cloud_engine.engine.config import EngineConfig, SchedulingPolicy
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.kv.block_pool import NO_BLOCK, BlockPool
from updraft.cloud_engine.engine.kv.kv_cache_manager import KVCacheManager, Window
from updraft.cloud_engine.engine.output.output_processor import OutputProcessor
from updraft.cloud_engine.engine.scheduling.growth import GrowthForecast
from updraft.cloud_engine.engine.scheduling.plain_decodes import BLOCKS_AT_ONCE
from updraft.cloud_engine.engine.scheduling.scheduler import Scheduler
from updraft.cloud_engine.engine.scheduling.step_budget import StepBudget
from updraft.cloud_engine.engine.speculation.drafter import Drafter
from updraft.cloud_engine.engine.speculation.speculator import Speculator
from updraft.cloud_engine.engine.types.outputs import TokenOutput
from updraft.cloud_engine.engine.types.prediction import PredictionCursor
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.types.request_state import RequestState, ScheduledRequest
from updraft.cloud_engine.engine.worker.launched_step import UnreadInputs
from updraft.cloud_engine.engine.worker.model_runner import ForwardBatch
from updraft.cloud_engine.engine.worker.slots import Slots, SlotState
from updraft.cloud_engine.engine.worker.worker import Worker
from updraft.kernels.attention.block_tables import BlockTables
from updraft.protocol.errors import OverloadedError
from updraft.protocol.sampling import ResolvedParams, SamplingParams
from updraft.text.grammars.state import Mask

BLOCK, BLOCKS, BUDGET, BATCH, WAITING = 4, 10, 12, 4, 5
END = 2  # a token that ends some of the answers, and is in no prompt


def plain_scheduler(config: EngineConfig, cache: KVCacheManager) -> Scheduler:
    """Without drafters: requests' predictions are all that is drafted."""
    return Scheduler(config, cache, Speculator([], config))


def make_state(
    name: str, prompt: list[int], max_tokens: int, draft: list[int] | None = None, **options: Any
) -> RequestState:
    request = GenerationRequest(name, prompt, draft_ids=draft or [], **options)
    return RequestState(
        request,
        max_tokens,
        ResolvedParams(temperature=0.0),
        0,
        frozenset(),
        list(prompt),
        PredictionCursor(draft or []),
    )


class Sometimes(Drafter):
    """Offers all that is asked for, or nothing."""

    name = "sometimes"

    def __init__(self, chance: float = 0.5) -> None:
        self.chance, self.random = chance, random.Random(0)

    def offer(self, state: RequestState, limit: int) -> int:
        return limit if self.random.random() < self.chance else 0

    def propose(self, batch: Sequence[ScheduledRequest], rows_of: Any) -> None:
        raise AssertionError("the simulation makes up the drafts")


class Quota:
    """Stub of a grammar: an answer is complete after a fixed number of tokens."""

    error = None

    def __init__(self, left: int) -> None:
        self.left = left

    @property
    def complete(self) -> bool:
        return self.left == 0

    def mask(self, drafts: Sequence[int]) -> Mask | None:
        return np.full(1, -1, np.int32) if len(drafts) < self.left else None

    def num_allowed(self, drafts: Sequence[int]) -> int:
        return min(len(drafts), self.left)

    def advance(self, tokens: Sequence[int]) -> int:
        taken = self.num_allowed(tokens)
        self.left -= taken
        return taken


class Memory:
    """A runner without a model. It keeps the token of each KV slot, and checks all that it is asked to read and write.

    Its next tokens are random, but mostly confirm drafts.
    """

    def __init__(self, cache: KVCacheManager, window: Window | None, random: random.Random, runs_ahead: bool) -> None:
        self.cache, self.window, self.random, self.runs_ahead = cache, window, random, runs_ahead
        self.batch: Sequence[ScheduledRequest] = ()
        self.starts: list[int] = []  # planned position of each of the batch
        self.tokens: dict[int, int] = {}
        self.salts: dict[int, str] = {}

    def watch(self, batch: Sequence[ScheduledRequest]) -> None:
        self.batch, self.starts = batch, [item.start for item in batch]

    def compute(self, batch: ForwardBatch, unread: UnreadInputs | None) -> torch.Tensor:
        logit_rows = set(range(len(batch.token_ids)) if batch.logit_rows is None else batch.logit_rows.tolist())
        rows, chunks = deque(enumerate(batch.token_ids.tolist())), list[Chunk]()
        for span in batch.sequences.spans:
            tokens = [rows.popleft() for _ in range(span.length)]
            num_logits = sum(row in logit_rows for row, _ in tokens)
            chunks.append(Chunk([token for _, token in tokens], span.start, span.block_table, num_logits))
        assert not rows and sum(chunk.num_logits for chunk in chunks) == len(logit_rows)
        return self.run(chunks, unread)

    def run(self, chunks: Sequence[Chunk], unread: UnreadInputs | None) -> torch.Tensor:
        pending = [index for index, item in enumerate(self.batch) if self.starts[index] >= len(item.state.token_ids)]
        assert pending == ([] if unread is None else unread.sequences)
        for chunk, item, start in zip(chunks, self.batch, self.starts, strict=True):
            known, drafts = chunk.token_ids[: item.num_tokens], chunk.token_ids[item.num_tokens :]
            assert chunk.start == start and (item.drafter or drafts == item.draft_ids)
            assert start >= len(item.state.token_ids) or known == item.state.token_ids[start : start + item.num_tokens]
        chunks = list(chunks)
        rejected = [0] * len(chunks) if unread is None or unread.rejected is None else unread.rejected.tolist()
        for index, token, by in zip(
            pending, [] if unread is None else unread.token_ids.tolist(), rejected, strict=False
        ):
            chunk = chunks[index]
            tokens = [token, *chunk.token_ids[1:]]
            chunks[index] = chunk._replace(token_ids=tokens, start=chunk.start - by)
        for chunk, item in zip(chunks, self.batch, strict=True):
            self.write(chunk, item.state.request.cache_salt)
        for chunk, item in zip(chunks, self.batch, strict=True):
            self.check_reads(chunk, item)
        return self.logits(chunks)

    def write(self, chunk: Chunk, salt: str) -> None:
        for position, token in enumerate(chunk.token_ids, start=chunk.start):
            block = chunk.block_table[position // BLOCK]
            assert self.cache.pool.references(block) == 1, "a shared block is written"
            self.tokens[block * BLOCK + position % BLOCK] = token
            self.salts[block] = salt

    def check_reads(self, chunk: Chunk, item: ScheduledRequest) -> None:
        state, start = item.state, chunk.start
        oldest = max(0, start - self.window.num_tokens + 1) if self.window else 0
        for position, token in enumerate([*state.token_ids[:start], *chunk.token_ids[: item.num_tokens]]):
            if position < oldest or len(state.token_ids) <= position < start:
                continue
            assert chunk.block_table[position // BLOCK] == state.block_table[position // BLOCK]
            slot = chunk.block_table[position // BLOCK] * BLOCK + position % BLOCK
            assert self.tokens[slot] == token, "a request reads what is not its own"
            assert self.salts[slot // BLOCK] == state.request.cache_salt, "a tenant reads another's block"

    def logits(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        drafts = [
            chunk.token_ids[len(chunk.token_ids) - row : len(chunk.token_ids) - row + 1]
            for chunk in chunks
            for row in reversed(range(chunk.num_logits))
        ]
        return torch.eye(END + 1)[[self.like(draft) for draft in drafts]]

    def like(self, draft: Sequence[int]) -> int:
        return draft[0] if draft and self.random.random() < 0.7 else drawn_token(self.random)


def drawn_token(random: random.Random) -> int:
    return random.choices([0, 1, END], [6, 6, 1])[0]


class Watched(Engine):
    """An engine that shows each scheduled batch."""

    watch: Callable[[Sequence[ScheduledRequest]], None]

    def _execute(self, batch: Sequence[ScheduledRequest]) -> None:
        self.watch(batch)
        super()._execute(batch)


class Simulation(RuleBasedStateMachine):
    """An engine without a model, which executes its plans with a worker on a `Memory`."""

    scheduling_policy: SchedulingPolicy = "fcfs"
    window: Window | None = None
    num_blocks = BLOCKS
    drafts = True
    runs_ahead = False

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCacheManager(self.num_blocks, BLOCK, window=self.window)
        config = EngineConfig(
            block_size=BLOCK,
            max_num_seqs=BATCH,
            max_num_batched_tokens=BUDGET,
            max_waiting=WAITING,
            num_speculative_tokens=3,
            draft_length="fixed",
            scheduling_policy=self.scheduling_policy,
        )
        speculator = Speculator([Sometimes()] if self.drafts else [], config)
        self.scheduler = Scheduler(config, self.cache, speculator)
        self.answers = OutputProcessor(self.scheduler, self.cache, speculator)
        self.random = random.Random(0)
        self.memory = Memory(self.cache, self.window, self.random, self.runs_ahead)
        self.engine: Any = object.__new__(Watched)
        self.engine._recorder, self.engine._unread, self.engine.watch = None, deque(), self.watch
        self.engine._scheduler, self.engine._outputs, self.engine._speculator = self.scheduler, self.answers, speculator
        self.engine._worker = Worker(self.memory, self.propose, lambda: Slots(BlockTables(BATCH, 64), BLOCK))  # type: ignore[arg-type]
        self.generated: dict[tuple[str, int], list[int]] = {}
        self.longest: dict[str, tuple[int, int]] = {}  # answers to each request: as asked, and as its grammar has it
        self.names = 0
        self.now = 0.0
        self.first: str | None = None  # the first running request of the last launched step
        self.reserved: dict[
            RequestState, int
        ] = {}  # tokens of each request for which the last launched step has blocks

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        output=st.integers(1, 12),
        predicted=st.booleans(),
        priority=st.integers(-1, 2),
        salt=st.sampled_from(["", "a"]),
        pause=st.sampled_from([0.1, 1.0, 15.0]),
        answers=st.sampled_from([1, 1, 2, 4]),
        ends=st.booleans(),
        quota=st.sampled_from([None, None, 1, 5]),
    )
    def add(
        self,
        prompt: list[int],
        output: int,
        predicted: bool,
        priority: int,
        salt: str,
        pause: float,
        answers: int,
        ends: bool,
        quota: int | None,
    ) -> None:
        self.names += 1
        self.now += pause
        draft = [0, 1, 0, 1, 1, 0] if predicted else None
        states: list[RequestState] = []
        for index in range(answers):
            state = make_state(str(self.names), prompt, output, draft, priority=priority, cache_salt=salt, n=answers)
            state.index, state.arrived = index, self.now
            state.grammar = Quota(quota) if quota else None  # type: ignore[assignment]
            state.end_ids = frozenset([END] if ends else [])
            states.append(state)
        assert self.scheduler.fits(len(prompt) + output)
        try:
            self.scheduler.check_capacity()
        except OverloadedError:
            assert len(self.scheduler.waiting) >= WAITING, "refused although the queue is not full"
        else:
            assert len(self.scheduler.waiting) < WAITING or self.num_kept_waiting() < WAITING
            self.longest[str(self.names)] = output, quota or output
            self.answers.begin(states)

    def num_kept_waiting(self) -> int:
        """The number in the queue that cannot be let in now; found by trying, on a copy."""
        twin = copy.deepcopy(self.scheduler)
        while twin.waiting and twin._admit_first():
            pass
        return len(twin.waiting)

    @precondition(lambda self: self.scheduler.requests())
    @rule()
    def step(self) -> None:
        before = {state: (len(state.token_ids), state.num_computed_tokens) for state in self.scheduler.requests()}
        self.first = None
        if not self.engine._unread:
            assert self.engine._launch()
        step = self.engine._unread[0]
        self.engine._sample(step)
        if self.runs_ahead:
            self.engine._launch()
        accepted = {state: state.drafts.accepted for state in before}
        for output in self.engine._read(step)[0]:
            self.hear(output)
        self.engine._unread.popleft()
        for state, (known, _) in before.items():
            assert state.drafts.accepted - accepted[state] <= len(state.token_ids) - known
        group = [state for state in before if state.request_id == self.first]
        moved = [(len(state.token_ids), state.num_computed_tokens) > before[state] for state in group]
        left = set(group) - set(self.scheduler.requests())
        assert left or any(moved) or not self.first, "the first always moves"

    def watch(self, batch: Sequence[ScheduledRequest]) -> None:
        """Check a scheduled batch."""
        running = self.scheduler.running
        assert sum(item.num_tokens + len(item.draft_ids) + item.num_drafts for item in batch) <= BUDGET
        ending = sum(state.ends_next for state in running)
        assert len({id(item.state) for item in batch}) == len(batch) == len(running) - ending and len(running) <= BATCH
        assert all(item.num_tokens >= 1 for item in batch)
        known = [state for state in self.scheduler.requests() if state.index == 0 or state in running]
        oldest = min(known, key=lambda state: (state.order, int(state.request_id)))
        self.first = running[0].request_id
        if self.scheduling_policy == "fcfs":  # other answers to older requests may just have got a place
            assert self.first == oldest.request_id or running[0].index > 0
        assert running == sorted(running, key=lambda state: state.order)
        self.reserved = {
            item.state: item.start + item.num_tokens + max(len(item.draft_ids), item.num_drafts) for item in batch
        }
        self.memory.watch(batch)

    def propose(self, batch: Sequence[SlotState], rows_of: Any) -> None:
        """As the draft model does: it has computed all but the last of its drafts."""
        for state in batch:
            if state.num_drafts:
                state.draft_ids = [drawn_token(self.random) for _ in range(state.num_drafts)]
                state.num_draft_computed_tokens = len(state.token_ids) + state.num_drafts - 1

    def hear(self, output: TokenOutput) -> None:
        generated = self.generated.setdefault((output.request_id, output.index), [])
        generated += output.token_ids
        if output.stats is not None:
            longest = self.longest[output.request_id]
            assert output.stats.completion_tokens == len(generated) <= min(longest)
            assert output.finish_reason == "stop" or len(generated) == longest[0]

    @precondition(lambda self: self.scheduler.requests())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        state = data.draw(st.sampled_from(self.scheduler.requests()))
        self.answers.drop(state.request_id, data.draw(st.sampled_from([None, state.index])))

    @invariant()
    def known_tokens_match_the_output(self) -> None:
        for state in self.scheduler.requests():
            generated = state.token_ids[state.num_prompt_tokens :]
            assert generated == self.generated.get((state.request_id, state.index), [])
            assert state.num_remaining_tokens > 0
            assert state.end_ids.isdisjoint(generated)
            assert not (state.grammar and state.grammar.complete)
            assert state.num_draft_computed_tokens <= state.num_computed_tokens

    @invariant()
    def every_answer_is_scheduled(self) -> None:
        answers = [state for states in self.answers._states.values() for state in states]
        held_back = [state for states in self.answers._held_back.values() for state in states]
        assert Counter(answers) == Counter([*self.scheduler.requests(), *held_back])
        for state in held_back:
            leader = next(other for other in self.scheduler.requests() if other.request_id == state.request_id)
            assert (leader.index, leader.has_begun) == (0, False)
        assert all(self.answers._states.values())

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        pool = self.cache.pool
        running = self.scheduler.running
        held = Counter(block for state in running for block in state.block_table if block != NO_BLOCK)
        assert all(pool.references(block) == held[block] for block in range(self.num_blocks))
        assert pool.num_used == len(held)
        assert not any(state.block_table for state in self.scheduler.waiting)
        for state in self.scheduler.running:
            blocks = [block for block in state.block_table if block != NO_BLOCK]
            most = max(len(state.token_ids), self.reserved.get(state, 0) if self.engine._unread else 0)
            assert len(set(blocks)) == len(blocks) <= self.cache.most_blocks_for(most)
            needed = self.cache.blocks_for(state.num_computed_tokens)
            assert needed <= len(state.block_table) <= self.cache.blocks_for(most)

    @invariant()
    def device_tables_match_the_plans(self) -> None:
        tables = self.engine._worker.slots.tables
        copy = tables.on(torch.device("cpu")).numpy().reshape(BATCH, -1)
        assert np.array_equal(copy, tables.host)
        for state in self.scheduler.running:
            if state.slot >= 0:
                planned = state.block_table[: state.num_planned_blocks]
                sent = copy[state.slot, : len(planned)].tolist()
                assert all(block in (NO_BLOCK, given) for block, given in zip(planned, sent, strict=True))

    @invariant()
    def prepared_decodes_match_the_state(self) -> None:
        assert all(state.decode is None for state in self.scheduler.waiting)
        for state in self.scheduler.running:
            if state.decode is not None:
                assert state.decode.start == len(state.token_ids) - 1 + bool(self.engine._unread)
                assert (state.decode.num_tokens, state.decode.num_samples, state.decode.num_drafts) == (1, 1, 0)

    @invariant()
    def full_blocks_can_be_found(self) -> None:
        for state in self.scheduler.running:
            behind = state.num_certain_tokens // BLOCK - state.num_registered_blocks
            may_be_behind = state.decode is not None or self.engine._unread  # until that result is processed
            assert behind == 0 or (may_be_behind and 0 < behind < BLOCKS_AT_ONCE)

    @invariant()
    def empty_slots_are_counted(self) -> None:
        filled: dict[int, int] = {}
        for state in self.scheduler.running:
            for index, block in enumerate(state.block_table):
                inside = min(max(state.num_computed_tokens - index * BLOCK, 0), BLOCK)
                filled[block] = max(filled.get(block, 0), inside)
        filled.pop(NO_BLOCK, None)
        wasted = sum(BLOCK - count for count in filled.values())
        assert self.cache.num_wasted_slots(self.scheduler.running) == wasted

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.scheduler.requests():
                break
            self.step()
        assert not self.scheduler.requests(), "a request is stuck"
        assert len(self.answers) == 0
        assert self.cache.pool.num_used == 0


class PrioritySimulation(Simulation):
    scheduling_policy: SchedulingPolicy = "priority"


class ShortestPrefillSimulation(Simulation):
    scheduling_policy: SchedulingPolicy = "shortest-prefill"


class PlainSimulation(Simulation):
    """Nothing but predictions is drafted."""

    drafts = False


class AheadSimulation(Simulation):
    """Each step is launched before the result of the one before it is read."""

    runs_ahead = True


class WindowSimulation(Simulation):
    """Requests of up to 36 tokens in a pool for 28: only the blocks in reach are ever held."""

    window = Window(6, BUDGET)
    num_blocks = 7


class AheadWindowSimulation(WindowSimulation):
    runs_ahead = True


SETTINGS = settings(stateful_step_count=40, suppress_health_check=list(HealthCheck))
SIMULATIONS = (
    *(Simulation, PrioritySimulation, ShortestPrefillSimulation, PlainSimulation, AheadSimulation),
    *(WindowSimulation, AheadWindowSimulation),
)
for simulation in SIMULATIONS:
    simulation.TestCase.settings = SETTINGS
TestSimulation = Simulation.TestCase
TestPrioritySimulation = PrioritySimulation.TestCase
TestShortestPrefillSimulation = ShortestPrefillSimulation.TestCase
TestPlainSimulation = PlainSimulation.TestCase
TestAheadSimulation = AheadSimulation.TestCase
TestWindowSimulation = WindowSimulation.TestCase
TestAheadWindowSimulation = AheadWindowSimulation.TestCase


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
    with pytest.raises(ValueError, match="released more often than it was acquired"):
        pool.release(block)


def test_decodes_continue_during_a_long_prefill() -> None:
    cache = KVCacheManager(100, BLOCK)
    scheduler = plain_scheduler(EngineConfig(block_size=BLOCK, max_num_seqs=4, max_num_batched_tokens=8), cache)
    long, short = make_state("long", [1] * 30, 4), make_state("short", [1, 2], 4)
    scheduler.add(long)
    scheduler.add(short)
    shares: list[list[tuple[str, int]]] = []
    for _ in range(5):
        batch = scheduler.schedule()
        shares.append([(item.state.request_id, item.num_tokens) for item in batch])
        for item in batch:
            caught_up = item.is_caught_up
            item.state.num_computed_tokens += item.num_tokens
            if caught_up:
                item.state.token_ids.append(0)
    assert shares[0] == [("long", 8)]
    assert shares[3] == [("long", 6), ("short", 2)]
    assert shares[4] == [("long", 1), ("short", 1)]


def paced(token_s: float, *states: RequestState, **options: Any) -> list[list[int]]:
    """Each step's tokens of each request, where a token takes `token_s`, until all prompts are there."""
    config = EngineConfig(**{"block_size": BLOCK, "max_num_batched_tokens": 512, "max_step_ms": 100, **options})
    scheduler = plain_scheduler(config, KVCacheManager(10_000, BLOCK))
    for state in states:
        scheduler.add(state)
    shares: list[list[int]] = []
    while any(state.num_computed_tokens < state.num_prompt_tokens for state in states):
        batch = scheduler.schedule()
        shares.append([item.num_tokens + len(item.draft_ids) for item in batch])
        for item in batch:
            caught_up = item.is_caught_up
            item.state.num_computed_tokens += item.num_tokens
            if caught_up:
                item.state.token_ids.append(0)
        scheduler.observe(len(batch), token_s * sum(shares[-1]))
    return shares


def test_prompts_are_cut_so_that_a_step_takes_no_longer() -> None:
    """Small pieces first, until it is known what they take; never smaller ones than that."""
    prompt = list(range(900))
    sizes = [sum(shares) for shares in paced(1e-3, make_state("a", prompt, 4))]
    assert max(sizes[:2]) <= 65
    assert all(95 <= size <= 102 for size in sizes[2:-1])
    assert sum(sizes) == 900
    assert [sum(shares) for shares in paced(1e-5, make_state("a", prompt, 4))] == [64, 65, 512, 259]
    assert [sum(shares) for shares in paced(0.1, make_state("a", prompt[:200], 4))] == [64, 65, 65, 6]
    assert [sum(shares) for shares in paced(1.0, make_state("a", prompt, 4), max_step_ms=None)] == [512, 388]


def test_many_requests_and_a_small_budget_are_no_deadlock() -> None:
    assert paced(9.0, make_state("a", [1] * 90, 4), max_num_seqs=20, max_num_batched_tokens=20) == [[20]] * 4 + [[10]]
    budget = StepBudget(0.001, least=80)  # tokens that always fit
    for _ in range(2):
        assert budget.max_prompt_tokens(512) >= 80
        budget.observe(64, 0, 1, 99.0)
        budget.observe(64, 0, 1, 99.0)


@pytest.mark.parametrize("head", [1.0, 1.4], ids=["alike", "verifying takes longer"])
def test_a_prediction_is_cut_so_that_a_step_takes_no_longer(head: float) -> None:
    """As prompts are, once it is known what verifying takes."""
    scheduler = plain_scheduler(EngineConfig(block_size=BLOCK, max_step_ms=100), KVCacheManager(1000, BLOCK))
    state = make_state("a", [1] * 20, 900, draft=[2] * 800)
    scheduler.add(state)
    sizes: list[int] = []
    while state.prediction.propose(1):
        (item,) = scheduler.schedule()
        sizes.append(len(item.draft_ids))
        state.num_computed_tokens += item.num_tokens + sizes[-1]
        state.token_ids += [2] * (sizes[-1] + 1)
        state.prediction.advance(state.token_ids, sizes[-1] + 1, sizes[-1])
        scheduler.observe(1, 1e-3 * (item.num_tokens + head * sizes[-1]))
    assert max(sizes[:2]) <= 64
    assert all(95 / head < size <= 101 / head for size in sizes[3:-2])
    assert sum(sizes) > 750


def test_a_step_has_a_bounded_number_of_logits() -> None:
    """Each draft token has a row of them, and each token of a scored prompt."""
    config = EngineConfig(block_size=BLOCK, max_num_seqs=4, max_num_batched_tokens=8192)
    scheduler = plain_scheduler(config, KVCacheManager(9000, BLOCK))
    scheduler.add(make_state("predicted", [1] * 20, 9000, draft=[2] * 5000))
    scheduler.add(make_state("scored", [1] * 900, 9, params=SamplingParams(prompt_logprobs=0)))
    predicted, scored = scheduler.schedule()
    assert (len(predicted.draft_ids), scored.num_tokens) == (2048, 512)


def test_drafts_leave_prompts_their_pace() -> None:
    """A prompt behind a request that is always drafted for gets pieces that follow the length of steps."""
    config = EngineConfig(block_size=BLOCK, max_step_ms=100, draft_length="fixed", num_speculative_tokens=4)
    speculator = Speculator([Sometimes(1.0)], config)
    scheduler = Scheduler(config, KVCacheManager(1000, BLOCK), speculator)
    first, second = make_state("a", [1] * 5, 900), make_state("z", [2] * 3000, 4)
    scheduler.add(first)
    sizes: list[int] = []
    while second.num_computed_tokens < 3000:
        batch = scheduler.schedule()
        prompt = sum(item.num_tokens - 1 for item in batch)
        sizes.append(prompt)
        for item in batch:
            caught_up = item.is_caught_up
            item.state.num_computed_tokens += item.num_tokens
            if caught_up:
                item.state.token_ids.append(0)
        token_s = 1e-3 if len(sizes) < 12 else 4e-3 / 3
        scheduler.observe(len(batch), token_s * (prompt + speculator.draft_tokens))
        if len(sizes) == 1:
            scheduler.add(second)
    assert speculator.draft_tokens > 0
    assert 90 <= sizes[8] <= 100
    assert 66 <= sizes[-3] <= 75


def test_prediction_time_is_not_charged_to_prompts() -> None:
    """Else each prompt that comes with one would make the pieces of the next prompts smaller."""
    first = make_state("a", [0] * 300, 400)  # of which the pace is learned
    predicted = [make_state(f"{index}", [index] * 40, 400, draft=[2] * 300) for index in range(1, 13)]
    shares = paced(1e-3, first, *predicted, make_state("z", [99] * 500, 400))
    assert max(step[-1] for step in shares[-4:]) > 80  # while twelve others decode


def small(scheduling_policy: SchedulingPolicy, *, batch: int = 1, blocks: int = 100) -> Scheduler:
    config = EngineConfig(
        block_size=BLOCK, max_num_seqs=batch, max_num_batched_tokens=64, scheduling_policy=scheduling_policy
    )
    return plain_scheduler(config, KVCacheManager(blocks, BLOCK))


def test_a_higher_priority_takes_the_place_of_a_running_request() -> None:
    scheduler = small("priority")
    scheduler.add(make_state("later", [1] * 5, 9, priority=1))
    assert run_step(scheduler) == ["later"]
    scheduler.add(make_state("equal", [1] * 5, 9, priority=1))
    assert run_step(scheduler) == ["later"]
    scheduler.add(make_state("urgent", [2] * 5, 9, priority=0))
    assert run_step(scheduler) == ["urgent"]
    assert [state.request_id for state in scheduler.waiting] == ["later", "equal"]
    assert scheduler.counters.preemptions == 1


def test_long_prefill_leaves_budget_to_earlier_requests() -> None:
    config = EngineConfig(block_size=BLOCK, max_num_seqs=4, max_num_batched_tokens=8, scheduling_policy="priority")
    scheduler = plain_scheduler(config, KVCacheManager(100, BLOCK))
    scheduler.add(make_state("long", [1] * 30, 9, priority=1))
    assert run_step(scheduler) == ["long"]
    scheduler.add(make_state("urgent", [2] * 3, 9, priority=0))
    assert run_step(scheduler) == ["urgent", "long"]


def test_a_higher_priority_takes_no_place_it_does_not_need() -> None:
    scheduler = small("priority", batch=2)
    scheduler.add(make_state("later", [1] * 5, 9, priority=1))
    run_step(scheduler)
    scheduler.add(make_state("urgent", [2] * 5, 9, priority=0))
    assert run_step(scheduler) == ["urgent", "later"]
    assert scheduler.counters.preemptions == 0


def test_a_higher_priority_takes_blocks_where_there_are_none() -> None:
    scheduler = small("priority", batch=2, blocks=3)
    scheduler.add(make_state("later", [1] * 9, 3, priority=1))
    run_step(scheduler)
    scheduler.add(make_state("urgent", [2] * 5, 3, priority=0))
    assert run_step(scheduler) == ["urgent"]


def test_no_preemption_without_enough_gain() -> None:
    """The last of the running alone do not have the blocks that the head of the queue needs, and the others stay."""
    scheduler = small("priority", batch=9, blocks=9)
    scheduler.add(make_state("first", [1] * 9, 3, priority=-1))
    for name in ("later", "last"):
        scheduler.add(make_state(name, [2] * 9, 3, priority=1))
    assert len(run_step(scheduler)) == 3
    scheduler.add(make_state("head", [3] * 29, 2, priority=0))
    assert len(run_step(scheduler)) == 3
    assert scheduler.counters.preemptions == 0


def test_no_preemption_while_an_earlier_prompt_uses_the_budget() -> None:
    scheduler = small("priority", batch=2)
    scheduler.add(make_state("later", [1] * 5, 99, priority=1))
    run_step(scheduler)
    long = make_state("long", [2] * 300, 9, priority=0)
    scheduler.add(long)
    run_step(scheduler)
    scheduler.add(make_state("head", [3] * 5, 9, priority=0))
    while len(long.token_ids) - long.num_computed_tokens > 64:
        assert set(run_step(scheduler)) == {"long", "later"}
    run_step(scheduler)
    assert "head" in run_step(scheduler)
    assert scheduler.counters.preemptions == 1


def test_drafts_that_a_grammar_cut_are_not_taken_for_verified() -> None:
    """Else a step without them would tell that verifying takes no time."""
    config = EngineConfig(block_size=BLOCK)
    speculator = Speculator([], config)
    scheduler = Scheduler(config, KVCacheManager(100, BLOCK), speculator)
    scheduler.add(make_state("a", [1] * 5, 90, draft=[2] * 50))
    batch = scheduler.schedule()
    assert speculator.draft_tokens > 0
    batch[0].draft_ids = []
    speculator.observe(batch, 0.01)
    assert speculator.draft_tokens == 0


def test_drafts_take_only_what_is_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrowthForecast, "peak_with", lambda *_: 0)  # two requests start, though the pool is too small
    cache = KVCacheManager(3, BLOCK)
    config = EngineConfig(
        block_size=BLOCK, max_num_seqs=2, max_num_batched_tokens=64, num_speculative_tokens=4, draft_length="fixed"
    )
    scheduler = Scheduler(config, cache, Speculator([Sometimes(1.0)], config))
    scheduler.add(make_state("a", [1] * 4, 9))
    scheduler.add(make_state("b", [2] * 3, 9))
    first, second = scheduler.schedule()
    assert (first.num_drafts, second.num_drafts) == (4, 0)  # the third block is gone
    assert scheduler.counters.preemptions == 0


def test_scheduling_needs_no_torch() -> None:
    code = (
        "import sys; import updraft.cloud_engine.engine.scheduling.scheduler; "
        "import updraft.cloud_engine.engine.output.output_processor; "
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[4]
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(root / ".typing")}, timeout=60)
