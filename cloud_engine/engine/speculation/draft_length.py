"""The length of each request's draft: the one that makes the batch fastest by measured times, often none.

Drafts that are refuted cost verification and drafting, and what that costs depends on model, machine and load. So the
policy knows no constants of either: it estimates how likely each request's drafts are accepted, takes the costs from
`StepCosts`, and picks the lengths with the most expected tokens per second. Now and then it tries what it holds for
the worse, within a small share of the time, so that it finds out when that has changed.

No torch here: the whole policy can be tested on made-up costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .draft_credit import DraftCredit
from .step_costs import SHORT_LAG, StepCosts, StepReport

_TRIAL_SHARE = 0.005  # of the time may go into trying what looks worse
_MAX_CHARGED = 2.0  # for a token in verification, in steps without drafts
_UNTRIED_EACH, _UNTRIED_TOKENS = 4, 64  # for a sequence and in all: drafted where nobody knows yet what drafts cost
_TRIAL_STEPS = 3  # in a row: the first one has code and weights brought into the caches, and does not count
_REST_STEPS = 8  # for which a decision against drafts stands at least; one for each sequence, as planning takes as long
_LEARNED_OF_REST = 2  # its last steps, and the one behind it
_PAYBACK_TOKENS = 64  # a request that may go on for longer is taken to go on for this long
_MIN_GAIN = 1.02  # drafts must promise this much: below, the estimates themselves are not exact enough


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A request that could be drafted for, at most `limit` tokens, each accepted with `acceptance` if those before
    are.
    """

    acceptance: float
    limit: int
    # Each token takes a pass of a draft model, which has to catch up on `lag` tokens first.
    takes_passes: bool = False
    lag: int = 0
    # Tokens the request may still generate.
    remaining: int = _PAYBACK_TOKENS

    @property
    def payback_tokens(self) -> int:
        """Over how many tokens to come catching up has to pay."""
        return max(1, min(self.remaining, _PAYBACK_TOKENS))


@dataclass(frozen=True, slots=True)
class _Plan:
    """A way to do the next step."""

    # Drafts of each candidate.
    lengths: list[int]
    # Expected from the step.
    tokens: float
    # Expected for the step.
    seconds: float
    # Needed once, before the first such step.
    upfront_s: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class DraftLengthPolicy:
    """As many drafts as can be had, at most `most` for each request, whatever they cost."""

    #: Whether there are drafts at present, so that a draft model should not fall behind.
    drafts = True

    def __init__(self, most: int) -> None:
        self._most = most

    def rests(self, sequences: int, ahead: int = 0) -> bool:
        """Whether a decision not to draft still stands in a step over so many: then there is nothing to plan.

        `ahead`: steps that come before it and have not been observed.
        """
        del sequences, ahead
        return False

    def plan(self, candidates: Sequence[DraftCandidate], sequences: int) -> list[int]:
        """Draft lengths, one for each candidate, in a step over as many `sequences`."""
        del sequences
        return [min(self._most, candidate.limit) for candidate in candidates]

    def learns_nothing(self, sequences: int) -> bool:
        """Whether a step over so many, without drafts, need not be told about: `pass_by` will do, and is quicker."""
        del sequences
        return True

    def observe(self, step: StepReport) -> None:
        """Learn from a step, which may have had drafts or not. To be called once for every step, or `pass_by`."""

    def pass_by(self, sequences: int, step_s: float) -> None:
        """A step from which there is nothing to learn."""


class AdaptiveDraftLength(DraftLengthPolicy):
    """The lengths with the most expected tokens per second. Deterministic, given what it is told."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._costs = StepCosts()
        self._credit = DraftCredit()
        self._rest = self._rest_size = 0  # steps still to go without asking again, while the batch is of this class
        self._trial_left = self._trial_length = 0  # of drafts: steps still to go, and most tokens
        self._trial_size = 0  # class of batch size that it is for
        self._since_trial_s = 0.0
        self._drafted = False  # in the step before
        self.drafts = False

    def observe(self, step: StepReport) -> None:
        target_s = self._costs.observe(step)
        plain_s = self._costs.plain_s(step.sequences)
        if plain_s is not None:
            self._credit.settle(step.sequences, self._lost_s(step, target_s, plain_s) / plain_s)
        self._drafted = step.draft_tokens > 0
        self._count_step(step.step_s)

    def _lost_s(self, step: StepReport, target_s: float | None, plain_s: float) -> float:
        """The charge is capped: a step that takes longer than it ever should was held up by something else."""
        costs, sequences = self._costs, step.sequences
        lost_s = min(step.deciding_s, plain_s)
        if step.passes > 0:
            lost_s += min(step.draft_s, step.passes * plain_s + 2 * costs.catch_up_s(step.lag))
        elif step.draft_tokens > 0:
            lost_s += step.draft_s
        if step.draft_tokens > 0:
            if target_s is None or step.prefill_tokens > 0:  # what prompts took of it is a guess
                verify_s = costs.verify_s(sequences, step.draft_tokens, plain_s)
            else:
                verify_s = min(target_s - plain_s, _MAX_CHARGED * (1 + step.draft_tokens / sequences) * plain_s)
            lost_s += verify_s - step.accepted_tokens / sequences * plain_s
        elif self._drafted and target_s is not None and step.prefill_tokens == 0:
            lost_s += min(target_s - plain_s, _MAX_CHARGED * plain_s)  # it finds the caches full of what drafts need
        return lost_s

    def pass_by(self, sequences: int, step_s: float) -> None:
        self._credit.settle(sequences)
        self._count_step(step_s)

    def _count_step(self, step_s: float) -> None:
        self._since_trial_s += step_s
        self._rest = max(0, self._rest - 1)

    def rests(self, sequences: int, ahead: int = 0) -> bool:
        return self._rest > ahead and self._rest_size == sequences.bit_length()

    def learns_nothing(self, sequences: int) -> bool:
        return self._rest > _LEARNED_OF_REST and self._rest_size == sequences.bit_length() and not self._drafted

    def plan(self, candidates: Sequence[DraftCandidate], sequences: int) -> list[int]:
        if not candidates:  # nor need anybody look for some for a while, if looking has cost too much
            if self._credit.is_overdrawn(sequences):
                self._rest_for(max(_REST_STEPS, sequences), sequences)
            return []
        none = [0] * len(candidates)
        plain_s = self._costs.plain_s(sequences)
        if plain_s is None:
            return none  # and the step will tell what one without drafts costs
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
        """Whether there is enough time since the last trial to lose on one of `other`.

        Longer drafts than were tried need not wait for that: then it is the credit that bounds what is lost.
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
        """For as long as a trial takes: from one step, a cold one, nobody knows what drafts of a new length cost."""
        self._trial_size, self._trial_length = sequences.bit_length(), max(plan.lengths)
        self._trial_left = _TRIAL_STEPS - 1

    def _trial_length_of(self, candidate: DraftCandidate) -> int:
        """Nobody catches up for the rest of a trial: whoever came meanwhile takes no part."""
        return min(self._trial_length, candidate.limit) if candidate.lag <= SHORT_LAG else 0

    def _rest_for(self, steps: int, sequences: int) -> None:
        self._rest, self._rest_size = steps, sequences.bit_length()

    def _best_drafts(self, candidates: Sequence[DraftCandidate], sequences: int, plain: _Plan) -> _Plan | None:
        """Column by column: who is worth a first token, a second one, and so on; and where it is best to stop.

        A token is worth it if the chance that it is accepted outweighs what it takes of everybody's time.
        """
        costs = self._costs
        chances = [candidate.acceptance for candidate in candidates]
        joining_s = [costs.catch_up_s(candidate.lag) / candidate.payback_tokens for candidate in candidates]
        lengths = [0] * len(candidates)
        live: Sequence[int] = range(len(candidates))
        tokens, draft_s, drafted = plain.tokens, 0.0, 0
        best, best_length, upfront_s = plain, 0, 0.0
        most = self._max_draft_length(sequences)
        for length in range(1, most + 1):
            token_s = costs.another_token_s(sequences, length, plain.seconds)
            live = [
                i for i in live if candidates[i].limit >= length and chances[i] > (token_s + joining_s[i]) * best.rate
            ]
            if not live:
                break
            if length == 1:
                draft_s = sum(joining_s[i] for i in live)
                upfront_s = sum(costs.catch_up_s(candidates[i].lag) for i in live)
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
        """As long as is dared and there is credit for, for everybody, whatever is expected of it."""
        length, credit_s = self._max_draft_length(sequences), self._credit.of(sequences) * plain.seconds
        while length > 0:
            drafts = self._drafts_of(length, candidates, sequences, plain)
            if _lost_s(drafts, plain) <= credit_s:
                return drafts
            length //= 2
        return plain

    def _drafts_of(self, length: int, candidates: Sequence[DraftCandidate], sequences: int, plain: _Plan) -> _Plan:
        """The plan with drafts of at most `length`, at its highest cost."""
        costs = self._costs
        lengths = [min(length, candidate.limit) for candidate in candidates]
        passing = [length for length, candidate in zip(lengths, candidates, strict=True) if candidate.takes_passes]
        tokens = plain.tokens + sum(
            _expected(candidate.acceptance, length) for candidate, length in zip(candidates, lengths, strict=True)
        )
        draft_s = costs.drafting_s(len(passing), max(passing, default=0))
        verify_s = costs.verify_s(sequences, sum(lengths), plain.seconds, in_proportion=True)
        seconds = plain.seconds + verify_s + draft_s
        return _Plan(lengths, tokens, seconds, sum(costs.catch_up_s(candidate.lag) for candidate in candidates))

    def _max_draft_length(self, sequences: int) -> int:
        """The longest drafts to try: nobody knows what much longer ones cost than were measured."""
        known, unknown = self._costs.longest(sequences), min(_UNTRIED_EACH, _UNTRIED_TOKENS // sequences)
        return min(self._most, max(1, 4 * known, unknown))


def _lost_s(other: _Plan, best: _Plan) -> float:
    """On a trial."""
    return other.upfront_s + _TRIAL_STEPS * (other.seconds - other.tokens / best.rate)


def _expected(acceptance: float, length: int) -> float:
    """Accepted tokens of as many."""
    if acceptance >= 1:
        return float(length)
    return acceptance * (1 - acceptance**length) / (1 - acceptance)
