"""The choice of draft lengths on made-up machines: never much slower than without drafts, and near the best length."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.cloud_engine.engine.speculation.draft_length import AdaptiveDraftLength, DraftCandidate, FixedDraftLength
from updraft.cloud_engine.engine.speculation.step_costs import StepCosts, StepReport
from updraft.cloud_engine.engine.types.draft_record import DRAFTER_HORIZON, Acceptance
from updraft.cloud_engine.engine.types.recent_median import RecentMedian

MOST = 8
CATCH_UP_S = 1e-5  # per token


def also(*values: float) -> list[Any]:
    """Parameters for the long run alone."""
    return [pytest.param(value, marks=pytest.mark.soak) for value in values]


@dataclass(frozen=True)
class Machine:
    """Seconds of a plain step: `start_s` + `sequence_s` for each sequence; of verification: `verify_s` per draft token,
    and `jump_s` once; of a draft pass: `pass_s`, and 2 % more for each sequence in it."""

    start_s: float
    sequence_s: float
    verify_s: float
    pass_s: float
    jump_s: float = 0.0

    def step(self, sequences: int, lengths: list[int], lag: int) -> tuple[float, float, float]:
        """(target, draft, of that the first pass) in seconds, without noise."""
        target_s = self.start_s + self.sequence_s * sequences
        if not any(lengths):
            return target_s, 0.0, 0.0
        one_s = self.pass_s * (1 + 0.02 * sum(length > 0 for length in lengths))
        first_s = one_s + CATCH_UP_S * lag
        return target_s + self.jump_s + self.verify_s * sum(lengths), first_s + one_s * (max(lengths) - 1), first_s


#: Memory-bound, one whose first extra token is dear, one bound by its own overhead, and one bound by arithmetic.
MACHINES = {
    "memory": Machine(0.05, 0.0002, 0.001, 0.001),
    "jump": Machine(0.025, 0.001, 0.001, 0.001, jump_s=0.025),
    "small": Machine(0.001, 0.00013, 0.00008, 0.0008, jump_s=0.0002),
    "arithmetic": Machine(0.0, 0.001, 0.001, 0.0005),
}


@dataclass
class Asker:
    acceptance: float
    left: int
    lag: int = 30
    observed: Acceptance = field(default_factory=Acceptance)


class Run:
    """As many requests as `loads` says for each step, of about 40 tokens each.

    The choice sees noise of 5 % and some steps that are held up; what is compared are the true seconds. `shares`: after
    each step, what all steps so far would have taken without drafts over what they took.
    """

    def __init__(self, machine: Machine, loads: Iterable[int], acceptance: float, chooser: FixedDraftLength):
        self._random = random.Random(1)
        self._acceptance = acceptance
        self._all = Acceptance(DRAFTER_HORIZON)
        self.drafted = self.tokens = 0
        self.seconds = plain_s = 0.0
        self.shares: list[float] = []
        askers: list[Asker] = []
        for sequences in loads:
            askers = askers[:sequences] + [self._asker() for _ in range(sequences - len(askers))]
            candidates = [self._candidate(asker) for asker in askers]
            lengths = [0] * sequences if chooser.is_resting(sequences) else chooser.plan(candidates, sequences)
            before = self.tokens
            report = self._step(machine, askers, lengths)
            if not any(lengths) and chooser.may_skip(sequences):
                chooser.skip(sequences, report.step_s)
            else:
                chooser.observe(report)
            plain_s += machine.step(sequences, [0], 0)[0] * (self.tokens - before) / sequences
            self.shares.append(plain_s / self.seconds)
            askers = [asker if asker.left > 0 else self._asker() for asker in askers]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def _asker(self) -> Asker:
        return Asker(self._acceptance, self._random.randint(1, 80))

    def _candidate(self, asker: Asker) -> DraftCandidate:
        chance = asker.observed.estimate(self._all.estimate())
        return DraftCandidate(chance, min(MOST, asker.left - 1), True, asker.lag, asker.left)

    def _step(self, machine: Machine, askers: list[Asker], lengths: list[int]) -> StepReport:
        lag = sum(asker.lag for asker, length in zip(askers, lengths, strict=True) if length)
        target_s, draft_s, first_s = machine.step(len(askers), lengths, lag)
        self.seconds += target_s + draft_s
        target_s *= self._random.lognormvariate(0, 0.05) * (3 if self._random.random() < 0.01 else 1)
        accepted = sum(self._verify(asker, length) for asker, length in zip(askers, lengths, strict=True))
        self.drafted += any(lengths)
        drafting = sum(length > 0 for length in lengths)
        passes = max(lengths)
        step_s, tokens = target_s + draft_s, sum(lengths)
        return StepReport(len(askers), step_s, 0, tokens, drafting, passes, lag, draft_s, first_s, accepted)

    def _verify(self, asker: Asker, length: int) -> int:
        accepted = 0
        while accepted < length and self._random.random() < asker.acceptance:
            accepted += 1
        if length:
            asker.observed.add(accepted, length)
            self._all.add(accepted, length)
        asker.lag = 1 if length else asker.lag + 1
        asker.left -= accepted + 1
        self.tokens += accepted + 1
        return accepted


@pytest.mark.parametrize("acceptance", [0.0, 0.8, 1.0, *also(0.5, 0.95)])
@pytest.mark.parametrize("sequences", [1, 16, 64, *also(4)])
@pytest.mark.parametrize("machine", MACHINES)
def test_never_slower_than_without_and_near_the_best_length(machine: str, sequences: int, acceptance: float) -> None:
    costs = MACHINES[machine]
    loads = [sequences] * max(1200, 16_000 // (sequences + 7))
    adaptive = Run(costs, loads, acceptance, AdaptiveDraftLength(MOST))
    fixed = [Run(costs, loads[:120], acceptance, FixedDraftLength(most)).rate for most in (0, 1, 2, 4, 6, MOST)]
    assert min(adaptive.shares[1000:]) >= 0.98
    assert adaptive.rate >= 0.85 * max(fixed)


@pytest.mark.parametrize("acceptance", [0.0, 0.95, *also(0.6)])
@pytest.mark.parametrize("sequences", [2, 10, *also(6, 24, 48)])
@pytest.mark.parametrize("machine", MACHINES)
def test_never_slower_at_other_loads(machine: str, sequences: int, acceptance: float) -> None:
    run = Run(MACHINES[machine], [sequences] * 1200, acceptance, AdaptiveDraftLength(MOST))
    assert min(run.shares[1000:]) >= 0.98


@pytest.mark.parametrize("acceptance", [0.0, 0.95])
@pytest.mark.parametrize("machine", MACHINES)
def test_never_slower_where_the_load_changes(machine: str, acceptance: float) -> None:
    """Drafts may lose as much before they are known for each class of batch size."""
    rng = random.Random(2)
    stays = (itertools.repeat(rng.choice([1, 2, 4, 8, 16, 32, 64]), rng.randint(20, 200)) for _ in range(50))
    run = Run(MACHINES[machine], itertools.chain.from_iterable(stays), acceptance, AdaptiveDraftLength(MOST))
    assert min(run.shares[4000:]) >= 0.98


def test_length_recovers_when_drafts_become_good() -> None:
    chooser = AdaptiveDraftLength(MOST)
    poor = Run(MACHINES["memory"], [4] * 1000, 0.0, chooser)
    good = Run(MACHINES["memory"], [4] * 1000, 0.98, chooser)
    assert poor.drafted < 100
    assert good.drafted > 600


def test_requests_get_lengths_of_their_own() -> None:
    chooser = AdaptiveDraftLength(MOST)
    mixed = [DraftCandidate(0.95, MOST), DraftCandidate(0.3, MOST), DraftCandidate(0.95, 2), DraftCandidate(0.0, MOST)]
    for lengths in ([0] * 4, [0] * 4, [1] * 4, [1] * 4, [1] * 4, [8] * 4, [8] * 4):
        chooser.observe(StepReport(4, 0.01 + 0.0005 * sum(lengths), 0, sum(lengths)))
    chooser.plan(mixed, 4)  # a trial may be due
    steady, poor, short, none = chooser.plan(mixed, 4)
    assert steady > poor
    assert (short, none) == (2, 0)


def test_short_remainders_do_not_catch_up() -> None:
    """A draft model as slow at reading as the target is at writing: not worth a long prompt for a few tokens."""
    chooser = AdaptiveDraftLength(MOST)
    for _ in range(3):
        chooser.observe(StepReport(1, 0.01))
        chooser.observe(StepReport(1, 0.0125, 0, 2, 1, 2, 1, 0.002, 0.001))
        chooser.observe(StepReport(1, 0.3, 0, 2, 1, 2, 400, 0.29, 0.289))
    for _ in range(20):  # well behind the trials that are due
        chooser.plan([DraftCandidate(0.9, 8, True, 1, 8)], 1)
        chooser.observe(StepReport(1, 0.01))
    assert chooser.plan([DraftCandidate(0.9, 8, True, 400, 8)], 1) == [0]
    assert chooser.plan([DraftCandidate(0.9, 8, True, 1, 8)], 1) > [0]


def test_the_first_step_of_its_kind_does_not_count() -> None:
    """It finds caches full of what the steps before it needed, in which those that follow it are not."""
    costs = StepCosts()
    for _ in range(3):
        costs.observe(StepReport(4, 0.01))
        costs.observe(StepReport(4, 0.01))
        costs.observe(StepReport(4, 0.9, 0, 16, 4, 4, 8, 0.4, 0.1))  # cold
        costs.observe(StepReport(4, 0.036, 0, 16, 4, 4, 8, 0.016, 0.004))
        costs.observe(StepReport(4, 0.036, 0, 16, 4, 4, 8, 0.016, 0.004))
        costs.observe(StepReport(4, 0.5))  # cold
    assert costs.plain_s(4) == pytest.approx(0.01)
    assert costs.verify_s(4, 16, 0.01) == pytest.approx(0.01)
    assert costs.drafting_s(4, 4) == pytest.approx(0.016)
    assert costs.drafting_s(4, 0) == 0


def test_catch_up_cost_is_known_after_one_step() -> None:
    """Such a step is mostly the first of its kind. The time of an ordinary pass is subtracted."""
    costs = StepCosts()
    costs.observe(StepReport(4, 0.01))
    costs.observe(StepReport(4, 0.5, 0, 16, 4, 4, 1000, 0.2, 0.1))
    assert costs.draft_prefill_s(500) == pytest.approx((0.1 - 0.1 / 3) / 2)


def test_cold_steps_are_better_than_nothing() -> None:
    """N-grams are mostly drafted for one step at a time: such steps never become warm."""
    costs = StepCosts()
    for _ in range(2):
        costs.observe(StepReport(1, 0.01))
        costs.observe(StepReport(1, 0.01))
        costs.observe(StepReport(1, 0.05, 0, 4))
    assert costs.verify_s(1, 4, 0.01) == pytest.approx(0.04)


def test_drafts_without_passes_that_come_and_go_are_not_tried_for_ever() -> None:
    """A useless n-gram every other step, where a draft token takes as long as a step."""
    chooser = AdaptiveDraftLength(MOST)
    seconds = tokens = 0.0
    for step in range(4000):
        candidates = [DraftCandidate(0.2, MOST)] if step % 2 else []
        lengths = [0] * len(candidates) if chooser.is_resting(1) else chooser.plan(candidates, 1)
        step_s = 0.01 * (1 + sum(lengths))
        chooser.observe(StepReport(1, step_s, 0, sum(lengths)))
        seconds += step_s
        tokens += 1
    assert tokens / seconds > 0.98 * 100


@pytest.mark.parametrize("cold_s", [0.0005, 0.002, 0.005, 0.02])
@pytest.mark.parametrize(("share", "acceptance"), [(0.5, 0.3), (0.1, 0.6), (0.1, 0.9), (0.02, 0.3)])
def test_cost_of_switching_drafts_off_is_charged_to_drafts(cold_s: float, share: float, acceptance: float) -> None:
    """N-gram drafts are intermittent: each step after one finds the wrong data in the CPU caches."""
    chooser, rng = AdaptiveDraftLength(MOST), random.Random(2)
    seconds = tokens = 0.0
    drafted = False
    for _ in range(3000):
        candidates = [DraftCandidate(acceptance, rng.randint(1, MOST))] if rng.random() < share else []
        length = sum(chooser.plan(candidates, 1)) if candidates and not chooser.is_resting(1) else 0
        accepted = next((n for n in range(length) if rng.random() >= acceptance), length)
        step_s = 0.01 + 0.0005 * length + cold_s * (drafted != (length > 0))
        drafted = length > 0
        chooser.observe(StepReport(1, step_s * rng.lognormvariate(0, 0.05), 0, length, accepted_tokens=accepted))
        seconds, tokens = seconds + step_s, tokens + 1 + accepted
    assert 0.01 * tokens / seconds >= 0.98


def test_drafts_that_take_no_pass_are_not_free() -> None:
    """They are looked up, which may take long; what it takes is no part of what is estimated."""
    chooser = AdaptiveDraftLength(MOST)
    seconds = tokens = 0.0
    for _ in range(4000):
        (length,) = [0] if chooser.is_resting(1) else chooser.plan([DraftCandidate(0.9, 2)], 1)
        draft_s = 0.03 if length else 0.0
        chooser.observe(StepReport(1, 0.01 + draft_s, 0, length, draft_s=draft_s, accepted_tokens=length))
        seconds += 0.01 + draft_s
        tokens += 1 + length
    assert tokens / seconds > 0.98 * 100


def test_steps_without_drafting_requests_decide_nothing() -> None:
    chooser = AdaptiveDraftLength(MOST)
    chooser.observe(StepReport(1, 0.01))
    assert chooser.plan([], 1) == []
    assert not chooser.is_resting(1)


def test_verification_cost_is_learned_per_batch_size_class() -> None:
    """That it was free for a few sequences says nothing of many."""
    costs = StepCosts()
    for _ in range(3):
        costs.observe(StepReport(31, 0.01))
    for _ in range(4):
        costs.observe(StepReport(31, 0.02, 0, 8 * 31))
    assert costs.longest(17) == 8
    assert costs.longest(32) == 0


def test_a_trial_ends_where_the_batch_changes_and_nobody_catches_up_for_it() -> None:
    chooser = AdaptiveDraftLength(MOST)
    for sequences in (1, 1, 1, 32, 32, 32):
        chooser.observe(StepReport(sequences, 0.01))
    assert chooser.plan([DraftCandidate(0.9, MOST, True, 1)], 1) == [4]
    assert chooser.plan([DraftCandidate(0.9, MOST, True, 4000, 5)], 1) == [0]
    assert chooser.plan([DraftCandidate(0.9, MOST, True, 1)] * 32, 32) == [2] * 32  # a trial of its own


def test_cost_of_further_passes_depends_on_their_number() -> None:
    """Of one call for all of them a part does not depend on how many there are."""
    costs = StepCosts()
    for passes in (8, 8, 2, 2):
        costs.observe(StepReport(1, 0.02, 0, passes, 1, passes, 1, 0.004 + 0.0001 * (passes - 1), 0.001))
    assert costs.drafting_s(1, 1) == pytest.approx(0.001)
    assert costs.drafting_s(1, 2) == pytest.approx(0.0041)
    assert costs.drafting_s(1, 5) == pytest.approx(0.0044)
    assert costs.drafting_s(1, 8) == pytest.approx(0.0047)
    assert costs.drafting_s(1, 12) == pytest.approx(0.0051)


def test_a_trial_is_several_steps_long_and_of_long_drafts() -> None:
    chooser = AdaptiveDraftLength(MOST)
    hopeless = [DraftCandidate(0.01, MOST, True, 1, 64)]
    for _ in range(3):
        chooser.observe(StepReport(1, 0.01))
    lengths: list[int] = []
    for _ in range(6):
        (length,) = [0] if chooser.is_resting(1) else chooser.plan(hopeless, 1)
        lengths.append(length)
        chooser.observe(
            StepReport(1, 0.01 + 0.01 * length, 0, length, min(length, 1), length, 1, 0.005 * length, 0.005)
        )
    assert lengths == [2, 2, 2, 0, 0, 0]


def test_new_draft_lengths_are_tried_until_their_cost_is_known() -> None:
    """Their first step is cold and dear, and no reason to go back to none."""
    chooser = AdaptiveDraftLength(MOST)
    good = [DraftCandidate(0.95, MOST, True, 1, 64)] * 64
    for length in (0, 0, 0, 1, 1, 1):
        chooser.observe(step_of_64(length, 0.0005 * length))
    lengths: list[int] = []
    for draft_s in (0.2, 0.002, 0.002, 0.002):
        lengths.append(0 if chooser.is_resting(64) else max(chooser.plan(good, 64)))
        chooser.observe(step_of_64(lengths[-1], draft_s))
    assert lengths == [4, 4, 4, 8]


def step_of_64(length: int, draft_s: float) -> StepReport:
    target_s = 0.01 + 0.002 * length
    return StepReport(64, target_s + draft_s, 0, 64 * length, 64, length, 64, draft_s, draft_s / 4)


def test_a_decision_against_drafts_stands_while_the_batch_is_of_its_size() -> None:
    chooser = AdaptiveDraftLength(MOST)
    useless = [DraftCandidate(0.0, MOST)] * 64
    for length in (0, 0, 0, 8, 8, 8):
        chooser.observe(step_of_64(length, 0.0))
    assert not any(chooser.plan(useless, 64))
    for _ in range(63):
        chooser.observe(step_of_64(0, 0.0))
        assert chooser.is_resting(64)
        assert not chooser.is_resting(1)
    chooser.observe(step_of_64(0, 0.0))
    assert not chooser.is_resting(64)


def test_where_drafts_are_useless_trials_take_a_small_share_of_the_time() -> None:
    run = Run(MACHINES["arithmetic"], [1] * 50_000, 0.0, AdaptiveDraftLength(MOST))
    assert run.drafted > 6  # it goes on trying
    assert run.shares[-1] > 0.99


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), max_size=60))
def test_acceptance_is_a_share(results: list[tuple[int, int]]) -> None:
    acceptance = Acceptance()
    assert acceptance.estimate(0.4) == pytest.approx(0.4)
    for accepted, proposed in results:
        acceptance.add(min(accepted, proposed), proposed)
        assert 0.0 <= acceptance.estimate() <= 1.0


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_acceptance_finds_the_share(share: float) -> None:
    acceptance, rng = Acceptance(DRAFTER_HORIZON), random.Random(0)
    for _ in range(600):
        acceptance.add(next((i for i in range(4) if rng.random() >= share), 4), 4)
    assert acceptance.estimate() == pytest.approx(share, abs=0.06)


def test_one_step_that_was_held_up_does_not_count() -> None:
    recent = RecentMedian()
    for seconds in (0.9, 0.1, 0.1, 0.8, 0.1):
        recent.add(seconds)
        assert recent.median == 0.1 or not recent.is_reliable
    assert recent.median == 0.1


def test_pause_counts_steps_in_flight() -> None:
    chooser = AdaptiveDraftLength(4)
    chooser._rest_for(2, 8)
    assert chooser.is_resting(8) and chooser.is_resting(8, ahead=1) and chooser.is_resting(15)
    assert not chooser.is_resting(16)
    chooser.skip(8, 0.01)
    assert chooser.is_resting(8) and not chooser.is_resting(8, ahead=1)
    chooser.skip(8, 0.01)
    assert not chooser.is_resting(8)


def test_slow_long_drafts_do_not_count_against_short_ones() -> None:
    """They were tried in a bad moment; a first token each was verified as fast as none."""
    chooser = AdaptiveDraftLength(MOST)
    good = [DraftCandidate(0.9, MOST, True, 1)] * 64
    for _ in range(3):
        chooser.observe(StepReport(64, 0.01))
    for length, step_s in ((1, 0.012), (1, 0.012), (1, 0.012), (4, 0.07), (4, 0.07)):
        chooser.observe(
            StepReport(64, step_s, 0, 64 * length, 64, length, 64, 0.001 * length, 0.001, accepted_tokens=58 * length)
        )
    chosen: list[int] = []
    for _ in range(40):
        length = 0 if chooser.is_resting(64) else max(chooser.plan(good, 64))
        chosen.append(length)
        drafting = 64 * (length > 0)
        step_s, draft_s = 0.01 + 0.002 * length, 0.001 * length
        chooser.observe(StepReport(64, step_s, 0, 64 * length, drafting, length, 64, draft_s, 0.001, 58 * length))
    assert chosen.count(0) <= 3


def test_one_step_that_was_held_up_is_not_what_a_step_costs() -> None:
    """Measured by it, drafts would look as good as free, and hardly a step without would come to tell otherwise."""
    costs = StepCosts()
    costs.observe(StepReport(15, 0.03))
    assert costs.plain_s(15) is None and costs.plain_s(16) is None
    costs.observe(StepReport(16, 0.01))
    assert costs.plain_s(15) == pytest.approx(0.01 * (15 / 16) ** 0.5)
    for _ in range(4):
        costs.observe(StepReport(16, 0.01))
    costs.observe(StepReport(12, 0.5))
    assert costs.plain_s(15) == pytest.approx(0.01 * (15 / 16) ** 0.5)
    assert costs.plain_s(13) == pytest.approx(0.01 * (13 / 16) ** 0.5)
    for _ in range(3):
        costs.observe(StepReport(15, 0.012))
    assert costs.plain_s(15) == 0.012


def test_costly_lookups_pause_drafting() -> None:
    """Lookups that find nothing are not free: they pay as drafts do."""
    chooser = AdaptiveDraftLength(MOST)
    for _ in range(40):
        chooser.plan([], 4)
        chooser.observe(StepReport(4, 0.013, deciding_s=0.003))
    chooser.plan([], 4)
    assert chooser.is_resting(4) and chooser.may_skip(4)
    assert not chooser.is_resting(64)


def test_decision_time_is_not_part_of_a_plain_step() -> None:
    costs = StepCosts()
    for _ in range(3):
        costs.observe(StepReport(4, 0.013, deciding_s=0.003))
    assert costs.plain_s(4) == pytest.approx(0.01)
