"""Drafts on a simulated clock: never much slower than without drafts, and draft lengths near the best fixed length."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.kv.kv_cache_manager import KVCacheManager
from updraft.cloud_engine.engine.output.output_processor import OutputProcessor
from updraft.cloud_engine.engine.scheduling.scheduler import Scheduler
from updraft.cloud_engine.engine.speculation.cost_table import CostTable, DraftingCosts
from updraft.cloud_engine.engine.speculation.draft_policy import DraftPolicy, Offer
from updraft.cloud_engine.engine.speculation.speculator import Speculator
from updraft.cloud_engine.engine.step import StepResult
from updraft.cloud_engine.engine.types.draft_record import Acceptance
from updraft.cloud_engine.engine.types.prediction import PredictionCursor
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.types.request_state import RequestState, ScheduledRequest
from updraft.protocol.sampling import ResolvedParams, SamplingParams

MOST = 8
CATCH_UP_S = 1e-5  # seconds per known token that the draft model has not computed


def also(*values: float) -> list[Any]:
    """Return parameters for the long run alone."""
    return [pytest.param(value, marks=pytest.mark.soak) for value in values]


@dataclass(frozen=True)
class Machine:
    """Step times in seconds: by sequences and draft tokens per sequence, and of a draft model's pass."""

    table: dict[tuple[int, int], float]
    pass_s: float

    @cached_property
    def truth(self) -> CostTable:
        return CostTable(self.table)

    def target_s(self, sequences: int, drafts: int) -> float:
        return self.truth.base_s(sequences) + float(self.truth.extra_s(sequences, np.array([float(drafts)]))[0])

    def draft_s(self, drafting: int, passes: int, lag: int) -> float:
        return passes * self.pass_s * (1 + 0.02 * drafting) + CATCH_UP_S * lag

    def policy(self) -> DraftPolicy:
        pass_s = {size: self.draft_s(size, 1, 0) for size in (1, 64)}
        return DraftPolicy(CostTable(self.table), DraftingCosts(pass_s, pass_s, CATCH_UP_S))


def linear(start: float, sequence: float, draft: float, pass_ms: float, jump: float = 0.0) -> Machine:
    """Return a machine whose times, in ms, are linear in sequences and draft tokens. `jump`: cost of any drafts."""
    table = {
        (size, length): (start + sequence * size + draft * size * length + jump * (length > 0)) / 1e3
        for size in (1, 4, 16, 64)
        for length in (0, 1, 4, 16)
    }
    return Machine(table, pass_ms / 1e3)


def measured(rows: dict[int, tuple[float, ...]], pass_ms: float) -> Machine:
    """Return a machine from a table in ms: one row per batch size, with 0, 1, 4 and 16 draft tokens per sequence."""
    lengths = (0, 1, 4, 16)
    return Machine(
        {(n, k): ms / 1e3 for n, row in rows.items() for k, ms in zip(lengths, row, strict=True)}, pass_ms / 1e3
    )


#: Memory-bound, a first draft token that is expensive, overhead-bound, arithmetic-bound; the pocket pair as measured on
#: one CPU thread on 2026-11-29; an 8B model in bf16 with a 0.6B draft model on an H100, by its roofline.
MACHINES = {
    "memory": linear(50, 0.2, 1, 1),
    "jump": linear(25, 1, 1, 1, jump=25),
    "small": linear(1, 0.13, 0.08, 0.8, jump=0.2),
    "arithmetic": linear(0, 1, 1, 0.5),
    "pocket": measured(
        {
            1: (0.73, 0.75, 0.81, 1.20),
            4: (0.80, 0.87, 1.21, 2.96),
            16: (1.14, 1.59, 3.30, 10.91),
            64: (2.47, 4.46, 11.59, 41.04),
        },
        0.3,
    ),
    "H100": linear(5.5, 0.01, 0.0105, 0.5),
}


class Fixed:
    """Fixed draft lengths."""

    pays = True

    def __init__(self, most: int) -> None:
        self.most = most

    def is_resting(self, sequences: int) -> bool:
        del sequences
        return False

    def lengths(self, offers: Sequence[Offer], sequences: int) -> list[int]:
        del sequences
        return [min(self.most, offer.limit) for offer in offers]

    expected = None

    def observe(self, sequences: int, prompt_tokens: int, drafts: int, step_s: float, expected: object) -> None:
        pass


@dataclass
class Request:
    acceptance: Acceptance
    left: int
    lag: int = 30
    is_tested: bool = False


class Run:
    """A run of requests of about 40 tokens each, as many at a time as `loads` says for each step.

    The policy sees noise of 5 % and a delay in every hundredth step; the true seconds are compared. `shares`: after
    each step, the seconds of all steps without drafts, over the seconds with drafts.

    `on`: steps in which drafts seemed to pay.
    """

    def __init__(
        self,
        machine: Machine,
        loads: Iterable[int],
        acceptance: float | Callable[[int], float],
        policy: DraftPolicy | Fixed,
    ) -> None:
        self._random = random.Random(1)
        self._chance_at = acceptance if callable(acceptance) else lambda _: acceptance
        self._all = Acceptance()
        self.tokens = 0
        self.seconds = plain_s = 0.0
        self.shares: list[float] = []
        self.on: list[bool] = []
        requests: list[Request] = []
        for sequences in loads:
            requests = [request for request in requests if request.left > 0][:sequences]
            requests += [self._request() for _ in range(sequences - len(requests))]
            before = self.tokens
            self._step(machine, requests, policy)
            plain_s += machine.target_s(sequences, 0) * (self.tokens - before) / sequences
            self.shares.append(plain_s / self.seconds)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def _request(self) -> Request:
        return Request(self._all, self._random.randint(1, 80))

    def _step(self, machine: Machine, requests: list[Request], policy: DraftPolicy | Fixed) -> None:
        sequences = len(requests)
        drafting = [request for request in requests if request.left > 1 and not policy.is_resting(sequences)]
        offers = [Offer(one.acceptance.mean, min(MOST, one.left - 1), one.lag, one.left) for one in drafting]
        lengths = policy.lengths(offers, sequences) if offers else []
        lag = sum(request.lag - 1 for request, length in zip(drafting, lengths, strict=True) if length)
        target_s = machine.target_s(sequences, sum(lengths))
        draft_s = machine.draft_s(sum(length > 0 for length in lengths), max(lengths, default=0), lag)
        self.seconds += target_s + draft_s
        self.on.append(any(lengths) and policy.pays)
        for request in requests:
            request.lag += 1
            request.left -= 1
        self.tokens += sequences
        for request, length in zip(drafting, lengths, strict=True):
            self._verify(request, length)
        noise = self._random.lognormvariate(0, 0.05) * (3 if self._random.random() < 0.01 else 1)
        expected = policy.expected if offers else None
        policy.observe(sequences, 0, sum(lengths), target_s * noise + draft_s, expected)

    def _verify(self, request: Request, length: int) -> None:
        if length == 0:
            return
        chance, accepted = self._chance_at(len(self.shares)), 0
        while accepted < length and self._random.random() < chance:
            accepted += 1
        if not request.is_tested:
            request.acceptance, request.is_tested = Acceptance(self._all.mean), True
        request.acceptance.add(accepted, length)
        self._all.add(accepted, length)
        request.lag = 1
        request.left -= accepted
        self.tokens += accepted


@pytest.mark.parametrize("acceptance", [0.0, 0.8, 1.0, *also(0.5, 0.95)])
@pytest.mark.parametrize("sequences", [1, 16, 64, *also(4)])
@pytest.mark.parametrize("machine", MACHINES)
def test_never_slower_than_without_and_near_the_best_length(machine: str, sequences: int, acceptance: float) -> None:
    costs = MACHINES[machine]
    loads = [sequences] * 1200
    adaptive = Run(costs, loads, acceptance, costs.policy())
    fixed = [Run(costs, loads[:120], acceptance, Fixed(most)).rate for most in (0, 1, 2, 4, 6, MOST)]
    assert min(adaptive.shares[1000:]) >= 0.98
    if (machine, sequences, acceptance) != ("small", 64, 1.0):  # catch-up for 64 requests at once hides a gain of 18 %
        assert adaptive.rate >= 0.85 * max(fixed)


@pytest.mark.parametrize("acceptance", [0.0, 0.95, *also(0.6)])
@pytest.mark.parametrize("sequences", [10, *also(2, 6, 24, 48)])
@pytest.mark.parametrize("machine", MACHINES)
def test_never_slower_at_other_loads(machine: str, sequences: int, acceptance: float) -> None:
    run = Run(MACHINES[machine], [sequences] * 1200, acceptance, MACHINES[machine].policy())
    assert min(run.shares[1000:]) >= 0.98


@pytest.mark.parametrize("acceptance", [0.0, 0.95])
@pytest.mark.parametrize("machine", MACHINES)
def test_never_slower_where_the_load_changes(machine: str, acceptance: float) -> None:
    rng = random.Random(2)
    stays = (itertools.repeat(rng.choice([1, 2, 4, 8, 16, 32, 64]), rng.randint(20, 200)) for _ in range(20))
    run = Run(MACHINES[machine], itertools.chain.from_iterable(stays), acceptance, MACHINES[machine].policy())
    assert min(run.shares[1000:]) >= 0.98


@pytest.mark.parametrize("sequences", [1, 4, 16])
@pytest.mark.parametrize("machine", ["memory", "jump", "pocket", "H100"])
def test_a_drafter_that_turns_bad_is_off_within_50_steps(machine: str, sequences: int) -> None:
    costs = MACHINES[machine]
    run = Run(costs, [sequences] * 800, lambda step: 0.95 if step < 400 else 0.0, costs.policy())
    if machine != "pocket" or sequences == 1:  # elsewhere drafts hardly pay
        assert sum(run.on[200:400]) > 140
    assert sum(run.on[450:]) <= 7, "beside probes, drafts are only tried in 2 % of the steps"


def test_drafts_return_when_they_become_good() -> None:
    run = Run(MACHINES["memory"], [4] * 2000, lambda step: 0.98 if step >= 1000 else 0.0, MACHINES["memory"].policy())
    assert sum(run.on[:1000]) < 100
    assert sum(run.on[1000:]) > 600


def test_requests_get_lengths_of_their_own() -> None:
    offers = [Offer(0.95, MOST), Offer(0.3, MOST), Offer(0.95, 2), Offer(0.0, MOST)]
    steady, poor, short, none = MACHINES["H100"].policy().lengths(offers, 4)
    assert steady > poor
    assert (short, none) == (2, 0)


def test_catch_up_must_pay_off_within_the_answer() -> None:
    """The draft model computes 4,000 tokens in the time of 50 steps: too long for 8 tokens, not for its next steps."""
    policy = MACHINES["pocket"].policy()
    assert policy.lengths([Offer(0.9, 7, 4000, 8)], 1) == [0]
    assert policy.lengths([Offer(0.9, 7, 1, 8)], 1) > [0]


def test_rest_ends_after_some_steps_or_with_another_batch_size() -> None:
    policy = MACHINES["arithmetic"].policy()
    assert policy.lengths([Offer(0.9, MOST)] * 8, 8) == [0] * 8
    assert policy.is_resting(8) and policy.is_resting(8, ahead=1) and policy.is_resting(15)
    assert not policy.is_resting(16)
    for _ in range(7):
        policy.observe(8, 0, 0, 0.008)
    assert policy.is_resting(8) and not policy.is_resting(8, ahead=1)
    policy.observe(8, 0, 0, 0.008)
    assert not policy.is_resting(8)


def test_cost_table_interpolates_and_extends() -> None:
    table = CostTable({(1, 0): 1.0, (1, 1): 1.5, (1, 4): 3.0, (4, 0): 2.0, (4, 1): 4.0, (4, 4): 8.0})
    assert table.extra_s(1, np.array([0.0, 1.0, 2.0, 4.0, 8.0])).tolist() == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert (table.base_s(1), table.base_s(2), table.base_s(9)) == (1.0, pytest.approx(4 / 3), 2.0)
    assert table.extra_s(4, np.array([4.0, 2.0])).tolist() == [2.0, 1.0]


def test_impossible_measurements_are_bounded() -> None:
    """Drafts cost at least nothing, and at most as much as steps for as many tokens."""
    table = CostTable({(1, 0): 1.0, (1, 1): 0.5, (1, 4): 90.0})
    assert table.extra_s(1, np.array([1.0, 4.0])).tolist() == [0.0, 4.0]


def test_observed_steps_correct_the_table() -> None:
    table = CostTable({(1, 0): 1.0, (1, 1): 1.5, (1, 4): 3.0})
    for step in range(200):
        table.observe(1, 0, 20.0 if step % 10 == 0 else 2.0)  # every tenth step is delayed
        table.observe(1, 4, 5.0)
    assert table.base_s(1) == pytest.approx(2.0, rel=0.01)
    assert table.extra_s(1, np.array([4.0]))[0] == pytest.approx(3.0, rel=0.05)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), max_size=60))
def test_acceptance_is_a_share(results: list[tuple[int, int]]) -> None:
    acceptance = Acceptance(0.4)
    assert acceptance.mean == 0.4
    for accepted, proposed in results:
        acceptance.add(min(accepted, proposed), proposed)
        assert 0.0 <= acceptance.mean <= 1.0


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_acceptance_finds_the_share(share: float) -> None:
    acceptance, rng, means = Acceptance(), random.Random(0), list[float]()
    for _ in range(600):
        acceptance.add(next((i for i in range(4) if rng.random() >= share), 4), 4)
        means.append(acceptance.mean)
    assert sum(means[100:]) / 500 == pytest.approx(share, abs=0.1)


LENGTH = 100
ANSWER = list(range(1000, 1000 + LENGTH))
USELESS = [9] * LENGTH


def _accepted(item: ScheduledRequest) -> list[int]:
    """Return the next tokens of the answer: the accepted drafts and one more. Empty while the prompt is computed."""
    begin = item.state.num_generated_tokens
    answer = (ANSWER[begin:] + ANSWER[-1:] * LENGTH)[: item.num_samples]
    wrong = (at for at, token in enumerate(item.draft_ids) if token != answer[at])
    return answer[: next(wrong, len(item.draft_ids)) + 1]


class SimulatedNode:
    """An engine without a model, whose clock follows a table of step times."""

    def __init__(self, machine: str, sequences: int) -> None:
        config = EngineConfig(max_num_seqs=sequences, max_num_batched_tokens=2048, enable_prefix_caching=False)
        cache = KVCacheManager(4000, config.block_size, enable_prefix_caching=False)
        self.truth = CostTable(MACHINES[machine].table)
        self.speculator = Speculator([], config, CostTable(MACHINES[machine].table))
        self.scheduler = Scheduler(config, cache, self.speculator)
        self.outputs = OutputProcessor(self.scheduler, cache, self.speculator)
        self.sequences = sequences

    def seconds(self, prediction: list[int]) -> float:
        """Return the seconds of a full batch of answers with this prediction."""
        for number in range(self.sequences):
            request = GenerationRequest(str(number), [1] * 30, SamplingParams(max_tokens=LENGTH), draft_ids=prediction)
            params, cursor = ResolvedParams(temperature=0.0), PredictionCursor(prediction)
            state = RequestState(request, LENGTH, params, 0, frozenset(), list(request.prompt_ids), cursor)
            self.outputs.begin([state])
        seconds = 0.0
        while batch := self.scheduler.schedule():
            rows = float(sum(item.num_tokens - 1 + len(item.draft_ids) for item in batch))
            step_s = self.truth.base_s(len(batch)) + float(self.truth.extra_s(len(batch), np.array([rows]))[0])
            new = [_accepted(item) for item in batch]
            self.scheduler.plan(batch)
            self.outputs.process(batch, StepResult(0, list(map(len, new)), list(itertools.chain.from_iterable(new))))
            self.speculator.observe(batch, step_s)
            seconds += step_s
        return seconds


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("sequences", [1, 4, 16, 64])
@pytest.mark.parametrize("machine", ["pocket", "H100", "memory", "arithmetic"])
def test_a_useless_prediction_costs_at_most_three_percent(machine: str, sequences: int, trusted: bool) -> None:
    node = SimulatedNode(machine, sequences)
    plain_s = node.seconds([])
    for _ in range(3 if trusted else 0):
        node.seconds(ANSWER)
    assert node.seconds(USELESS) <= 1.03 * plain_s


@pytest.mark.parametrize(("machine", "sequences", "share"), [("pocket", 1, 0.35), ("H100", 1, 0.1), ("H100", 16, 0.1)])
def test_a_right_prediction_saves_most_of_the_time(machine: str, sequences: int, share: float) -> None:
    node = SimulatedNode(machine, sequences)
    plain_s = node.seconds([])
    node.seconds(ANSWER)
    assert node.seconds(ANSWER) <= share * plain_s


def test_useless_predictions_are_not_verified_for_long() -> None:
    node = SimulatedNode("pocket", 1)
    plain_s = node.seconds([])
    for _ in range(10):
        node.seconds(USELESS)
    assert node.seconds(USELESS) <= 1.01 * plain_s
