"""Chooses the draft length of each request (often 0) to maximise the batch's throughput, from measured times.

Rejected drafts cost drafting and verification time, which depends on model, machine and load. So this module has no
built-in costs: it estimates each request's acceptance rate, takes the costs from `StepCosts`, and picks the lengths
with the most expected tokens per second. Occasionally it tries the alternative that looks worse, within a small share
of the time, to notice when the better choice has changed.

Imports no torch, so that everything can be tested on made-up costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .step_costs import SHORT_LAG, StepCosts, StepReport

_TRIAL_SHARE = 0.005  # share of the time that trials may lose
_MAX_CHARGED = 2.0  # maximum time charged for verifying a token, as a multiple of a step without drafts
_UNTRIED_EACH, _UNTRIED_TOKENS = 4, 64  # maximum draft tokens, per sequence and in all, while their cost is unknown
_TRIAL_STEPS = 3  # steps per trial; the first one warms the caches and does not count
_REST_STEPS = 8  # minimum steps of a pause in drafting; a larger number of sequences lengthens it
_LEARNED_OF_REST = 2  # last steps of a pause, from which the cost of steps without drafts is learned
_PAYBACK_TOKENS = 64  # a draft model's catch-up time must pay off within this number of tokens
_MIN_GAIN = 1.02  # minimum expected speed-up of drafts; the estimates are not exact enough for less
_FIRST_CREDIT = 3.0  # initial credit; the unit is the time of a step without drafts
_EARNED_SHARE = 0.01  # credit earned per step
_MAX_CREDIT = 64.0  # upper limit of the credit
_OVERDRAFT = 3.0  # debt at which drafts are suspended until it is repaid


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A request for up to `limit` draft tokens. `acceptance`: chance of a token if all before it are accepted."""

    acceptance: float
    limit: int
    # Whether each draft token needs a pass of a draft model. The model must first compute `lag` known tokens.
    takes_passes: bool = False
    lag: int = 0
    # Maximum tokens that the request may still generate.
    remaining: int = _PAYBACK_TOKENS

    @property
    def payback_tokens(self) -> int:
        """Number of future tokens that share the cost of computing `lag` tokens."""
        return max(1, min(self.remaining, _PAYBACK_TOKENS))


@dataclass(frozen=True, slots=True)
class _Plan:
    """A plan for the next step."""

    # Draft length of each candidate.
    lengths: list[int]
    # Expected tokens of the step.
    tokens: float
    # Expected seconds of the step.
    seconds: float
    # One-time cost of letting the draft model catch up on known tokens, in seconds.
    upfront_s: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class FixedDraftLength:
    """Fixed draft lengths: always as many drafts as possible, up to `most` per request."""

    #: Whether drafts are currently in use, so that a draft model should keep up with the target.
    drafts = True

    def __init__(self, most: int) -> None:
        self._most = most

    def is_resting(self, sequences: int, ahead: int = 0) -> bool:
        """Return whether a recent decision not to draft still holds for `sequences`, so that `plan` can be skipped.

        `ahead` is the number of earlier steps that have not been observed yet.
        """
        del sequences, ahead
        return False

    def plan(self, candidates: Sequence[DraftCandidate], sequences: int) -> list[int]:
        """Return a draft length for each candidate, in a step with this many `sequences`."""
        del sequences
        return [min(self._most, candidate.limit) for candidate in candidates]

    def may_skip(self, sequences: int) -> bool:
        """Return whether the faster `skip` may replace `observe` for a step of this size without drafts."""
        del sequences
        return True

    def observe(self, step: StepReport) -> None:
        """Learn from a step, with or without drafts. Call this or `skip` once per step."""

    def skip(self, sequences: int, step_s: float) -> None:
        """Count a step without learning from it."""


class AdaptiveDraftLength(FixedDraftLength):
    """Chooses the draft lengths with the most expected tokens per second. Equal step reports give equal choices."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._costs = StepCosts()
        self._credit = DraftCredit()
        self._rest = self._rest_size = 0  # current pause in drafting: remaining steps, and bit length of the batch size
        self._trial_left = self._trial_length = 0  # current trial: remaining steps, and maximum draft length
        self._trial_size = 0  # the trial's class of batch sizes
        self._since_trial_s = 0.0
        self._drafted = False  # whether the previous step had drafts
        self.drafts = False

    def observe(self, step: StepReport) -> None:
        target_s = self._costs.observe(step)
        plain_s = self._costs.plain_s(step.sequences)
        if plain_s is not None:
            self._credit.settle(step.sequences, self._lost_s(step, target_s, plain_s) / plain_s)
        self._drafted = step.draft_tokens > 0
        self._count_step(step.step_s)

    def _lost_s(self, step: StepReport, target_s: float | None, plain_s: float) -> float:
        """Return the seconds that drafts cost in this step. Capped, since other causes may delay a very slow step."""
        costs, sequences = self._costs, step.sequences
        lost_s = min(step.deciding_s, plain_s)
        if step.passes > 0:
            lost_s += min(step.draft_s, step.passes * plain_s + 2 * costs.draft_prefill_s(step.lag))
        elif step.draft_tokens > 0:
            lost_s += step.draft_s
        if step.draft_tokens > 0:
            if target_s is None or step.prefill_tokens > 0:  # estimate, because prompts hide the cost
                verify_s = costs.verify_s(sequences, step.draft_tokens, plain_s)
            else:
                verify_s = min(target_s - plain_s, _MAX_CHARGED * (1 + step.draft_tokens / sequences) * plain_s)
            lost_s += verify_s - step.accepted_tokens / sequences * plain_s
        elif self._drafted and target_s is not None and step.prefill_tokens == 0:
            lost_s += min(target_s - plain_s, _MAX_CHARGED * plain_s)  # caches are cold after drafts
        return lost_s

    def skip(self, sequences: int, step_s: float) -> None:
        self._credit.settle(sequences)
        self._count_step(step_s)

    def _count_step(self, step_s: float) -> None:
        self._since_trial_s += step_s
        self._rest = max(0, self._rest - 1)

    def is_resting(self, sequences: int, ahead: int = 0) -> bool:
        return self._rest > ahead and self._rest_size == sequences.bit_length()

    def may_skip(self, sequences: int) -> bool:
        return self._rest > _LEARNED_OF_REST and self._rest_size == sequences.bit_length() and not self._drafted

    def plan(self, candidates: Sequence[DraftCandidate], sequences: int) -> list[int]:
        if not candidates:  # pause drafting if the search for candidates has cost too much
            if self._credit.is_overdrawn(sequences):
                self._rest_for(max(_REST_STEPS, sequences), sequences)
            return []
        none = [0] * len(candidates)
        plain_s = self._costs.plain_s(sequences)
        if plain_s is None:
            return none  # first measure a step without drafts
        plain = _Plan(none, sequences, plain_s)
        if self._trial_left > 0 and self._trial_size == sequences.bit_length():
            self._trial_left -= 1
            return [self._trial_length_of(candidate) for candidate in candidates]
        self._trial_left = 0
        drafts = self._best_drafts(candidates, sequences, plain)
        is_known = self._costs.longest(sequences) > 0
        pays = is_known and drafts is not None and drafts.rate > _MIN_GAIN * plain.rate
        pays = pays and not self._credit.is_overdrawn(sequences)
        if drafts is not None and pays:
            best, other = drafts, plain
        else:
            best, other = plain, self._longest_drafts(candidates, sequences, plain)
        if (pays or any(other.lengths)) and self._may_try(other, best, sequences):
            self._begin_trial(other, sequences)
            return other.lengths
        if not pays:
            self._rest_for(max(_REST_STEPS, sequences), sequences)
        elif max(best.lengths) > self._costs.longest(sequences):
            self._repeat(best, sequences)
        self.drafts = pays
        return best.lengths

    def _may_try(self, other: _Plan, best: _Plan, sequences: int) -> bool:
        """Return whether enough time has passed since the last trial to afford a trial of `other`.

        Drafts longer than any tried before need not wait, because the credit bounds their cost.
        """
        is_new = max(other.lengths) > self._costs.longest(sequences)
        return is_new or _lost_s(other, best) <= _TRIAL_SHARE * self._since_trial_s

    def _begin_trial(self, other: _Plan, sequences: int) -> None:
        self._since_trial_s = 0.0
        if any(other.lengths):
            self._repeat(other, sequences)
        else:
            self._rest_for(_TRIAL_STEPS, sequences)

    def _repeat(self, plan: _Plan, sequences: int) -> None:
        """Repeat the plan for a whole trial, because a single step with cold caches does not show its true cost."""
        self._trial_size, self._trial_length = sequences.bit_length(), max(plan.lengths)
        self._trial_left = _TRIAL_STEPS - 1

    def _trial_length_of(self, candidate: DraftCandidate) -> int:
        """Return the draft length for a candidate in the current trial; 0 if its draft model would have to catch up."""
        return min(self._trial_length, candidate.limit) if candidate.lag <= SHORT_LAG else 0

    def _rest_for(self, steps: int, sequences: int) -> None:
        self._rest, self._rest_size = steps, sequences.bit_length()

    def _best_drafts(self, candidates: Sequence[DraftCandidate], sequences: int, plain: _Plan) -> _Plan | None:
        """Extend drafts one token at a time, for the candidates where this pays. Return the best plan found, or None.

        A draft token pays if its expected gain outweighs the time that it costs the whole batch.
        """
        costs = self._costs
        chances = [candidate.acceptance for candidate in candidates]
        joining_s = [costs.draft_prefill_s(candidate.lag) / candidate.payback_tokens for candidate in candidates]
        lengths = [0] * len(candidates)
        live: Sequence[int] = range(len(candidates))
        tokens, draft_s, drafted = plain.tokens, 0.0, 0
        best, best_length, upfront_s = plain, 0, 0.0
        most = self._max_draft_length(sequences)
        for length in range(1, most + 1):
            token_s = costs.further_token_s(sequences, length, plain.seconds)
            live = [
                i for i in live if candidates[i].limit >= length and chances[i] > (token_s + joining_s[i]) * best.rate
            ]
            if not live:
                break
            if length == 1:
                draft_s = sum(joining_s[i] for i in live)
                upfront_s = sum(costs.draft_prefill_s(candidates[i].lag) for i in live)
                joining_s = [0.0] * len(candidates)
            passing = sum(candidates[i].takes_passes for i in live)
            draft_s += costs.drafting_s(passing, length) - costs.drafting_s(passing, length - 1) if passing else 0.0
            drafted += len(live)
            for i in live:
                tokens += chances[i]
                chances[i] *= candidates[i].acceptance
                lengths[i] = length
            seconds = plain.seconds + costs.verify_s(sequences, drafted, plain.seconds) + draft_s
            if best_length == 0 or tokens / seconds > best.rate:
                best, best_length = _Plan([], tokens, seconds, upfront_s), length
        if best_length == 0:
            return None
        return replace(best, lengths=[min(length, best_length) for length in lengths])

    def _longest_drafts(self, candidates: Sequence[DraftCandidate], sequences: int, plain: _Plan) -> _Plan:
        """Return the plan that gives all candidates the longest drafts within the limits and the credit."""
        length, credit_s = self._max_draft_length(sequences), self._credit.of(sequences) * plain.seconds
        while length > 0:
            drafts = self._drafts_of(length, candidates, sequences, plain)
            if _lost_s(drafts, plain) <= credit_s:
                return drafts
            length //= 2
        return plain

    def _drafts_of(self, length: int, candidates: Sequence[DraftCandidate], sequences: int, plain: _Plan) -> _Plan:
        """Return the plan with drafts of at most `length` tokens. Its cost is an upper estimate."""
        costs = self._costs
        lengths = [min(length, candidate.limit) for candidate in candidates]
        passing = [length for length, candidate in zip(lengths, candidates, strict=True) if candidate.takes_passes]
        tokens = plain.tokens + sum(
            _expected(candidate.acceptance, length) for candidate, length in zip(candidates, lengths, strict=True)
        )
        draft_s = costs.drafting_s(len(passing), max(passing, default=0))
        verify_s = costs.verify_s(sequences, sum(lengths), plain.seconds, in_proportion=True)
        seconds = plain.seconds + verify_s + draft_s
        return _Plan(lengths, tokens, seconds, sum(costs.draft_prefill_s(candidate.lag) for candidate in candidates))

    def _max_draft_length(self, sequences: int) -> int:
        """Return the longest draft to try. It grows with the measured lengths, because longer drafts may be slow."""
        known, unknown = self._costs.longest(sequences), min(_UNTRIED_EACH, _UNTRIED_TOKENS // sequences)
        return min(self._most, max(1, 4 * known, unknown))


def _lost_s(other: _Plan, best: _Plan) -> float:
    """Return the seconds that a trial of `other` is expected to lose against `best`."""
    return other.upfront_s + _TRIAL_STEPS * (other.seconds - other.tokens / best.rate)


def _expected(acceptance: float, length: int) -> float:
    """Return the expected number of accepted tokens of a draft."""
    if acceptance >= 1:
        return float(length)
    return acceptance * (1 - acceptance**length) / (1 - acceptance)


class DraftCredit:
    """Credit that bounds the time lost to drafts, for each class of batch sizes (powers of two).

    Trials may only spend credit. Each step earns a small amount, and drafts that save time earn the time saved. So
    drafts never slow the engine much in total (Wu, Shariff, Lattimore and Szepesvari, "Conservative Bandits", ICML
    2016). The unit is the time of a step without drafts.
    """

    def __init__(self) -> None:
        self._credit: dict[int, float] = {}
        self._overdrawn: set[int] = set()

    def of(self, sequences: int) -> float:
        return self._credit.get(sequences.bit_length(), _FIRST_CREDIT)

    def is_overdrawn(self, sequences: int) -> bool:
        """Return whether drafts are suspended because they have lost too much time."""
        return sequences.bit_length() in self._overdrawn

    def settle(self, sequences: int, loss: float = 0.0) -> None:
        """Account for a step in which drafts lost `loss` (negative: gained), in units of a step without drafts."""
        size = sequences.bit_length()
        credit = self._credit[size] = min(self.of(sequences) + _EARNED_SHARE - loss, _MAX_CREDIT)
        if credit < -_OVERDRAFT:
            self._overdrawn.add(size)
        elif credit >= 0:
            self._overdrawn.discard(size)
