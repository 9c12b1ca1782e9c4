"""The choice of draft lengths: the most expected tokens per second of the batch, by acceptance and step costs.

Imports no torch and reads no clock, so that the same steps always give the same choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from .cost_table import CostTable, DraftingCosts, Floats

#: Plans differ in the minimum chance of acceptance and in the maximum length. The fastest plan is taken.
_CHANCES, _LENGTHS = (
    grid.reshape(-1, 1) for grid in np.meshgrid([0.9, 0.7, 0.5, 0.3, 0.15, 0.05], [1, 2, 3, 4, 6, 8, np.inf])
)
_MAX_ACCEPTANCE = 0.999
_MIN_GAIN = 1.02  # minimum expected speed-up of drafts; the estimates are not exact enough for less
_PROBE_SHARE = 0.0075  # share of the time that probes may lose
_PROBE_TOKENS = 4  # draft tokens of a probe
_FIRST_SHARE = 0.02  # share of an answer's time that verifying the first tokens of its prediction may take
_REST_STEPS = 8  # steps until drafts that do not pay are considered again
_PAYBACK_TOKENS = 64  # a draft model's catch-up must pay off within this number of tokens


class Offer(msgspec.Struct, frozen=True):
    """A drafter's offer of up to `limit` tokens, each accepted with chance `acceptance` if those before it are."""

    acceptance: float
    limit: int
    # Known tokens that a draft model must compute first; None if drafting takes no time.
    lag: int | None = None
    # Maximum tokens that the request may still generate.
    remaining: int = _PAYBACK_TOKENS

    @property
    def expected(self) -> float:
        """Expected number of accepted tokens if all offered tokens are verified."""
        chance = min(self.acceptance, _MAX_ACCEPTANCE)
        return chance * (1 - chance**self.limit) / (1 - chance)


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """Expectations of a step with drafts."""

    # Seconds of drafting.
    draft_s: float = 0.0
    # Seconds that the tokens of a probe usually take; None without a probe.
    probe_worth_s: float | None = None


class DraftPolicy:
    """Grants the draft lengths with the most expected tokens per second, and rarely probes drafts that do not pay."""

    def __init__(self, costs: CostTable, drafting: DraftingCosts | None = None) -> None:
        """`drafting`: the costs of the draft model, if there is one."""
        self._costs = costs
        self._drafting = drafting or DraftingCosts({1: 0.0}, {1: 0.0}, 0.0)
        self._allowance_s = 0.0  # seconds that the next probe may lose
        self._rest = self._rest_size = 0  # remaining steps of a pause in drafting, and bit length of its batch size
        self.expected = ExpectedStep()  # expectations of the last step with offers
        self.pays = False  # whether the last drafts were expected to pay

    def is_resting(self, sequences: int, ahead: int = 0) -> bool:
        """Return whether to draft nothing for steps of this size, in this step or `ahead` steps later."""
        return self._rest > ahead and self._rest_size == sequences.bit_length()

    def max_first(self, predicted: int, sequences: int, prompt_tokens: int) -> int:
        """Return how many of a prediction's first tokens to verify while nothing is known about the prediction."""
        rows = np.arange(predicted + 1.0) + prompt_tokens
        extra_s = self._costs.extra_s(sequences, rows)
        allowed_s = _FIRST_SHARE * predicted * self._costs.base_s(sequences) / sequences
        return int((extra_s - extra_s[0] <= allowed_s).sum()) - 1

    def lengths(self, offers: Sequence[Offer], sequences: int, prompt_tokens: int = 0) -> list[int]:
        """Return the number of tokens to take from each offer, in a step that also computes `prompt_tokens`."""
        batch = _Batch(offers, sequences, prompt_tokens, self._costs, self._drafting)
        plain, drafts = batch.plan(np.zeros(len(offers))), batch.fastest(batch.acceptance)
        self.pays = drafts.rate > _MIN_GAIN * plain.rate
        best, worth_s = self._probed(drafts, plain) if self.pays else self._probed(plain, batch.probe(plain))
        if not self.pays and best is plain:
            self._rest, self._rest_size = _REST_STEPS, sequences.bit_length()
        self.expected = ExpectedStep(best.draft_s, worth_s)
        return [int(length) for length in best.lengths]

    def observe(
        self, sequences: int, prompt_tokens: int, drafts: int, step_s: float, expected: ExpectedStep | None = None
    ) -> None:
        """Learn from a finished step. `expected`: its expectations, the value of `expected` after `lengths`; None if no
        drafts were offered."""
        expected = expected or ExpectedStep()
        self._allowance_s += _PROBE_SHARE * step_s
        if expected.probe_worth_s is not None:
            self._allowance_s -= max(0.0, step_s - expected.probe_worth_s)
        self._rest = max(0, self._rest - 1)
        if prompt_tokens == 0:
            self._costs.observe(sequences, drafts, step_s - expected.draft_s)

    def _probed(self, best: _Plan, other: _Plan) -> tuple[_Plan, float | None]:
        """Return the `other` plan if probes may lose as much time as it is expected to lose, else the `best`.

        Also returns the seconds that the tokens of the `other` plan usually take, or None for the `best` plan."""
        worth_s = other.tokens / best.rate
        if other is best or other.taken_s - worth_s > self._allowance_s:
            return best, None
        return other, worth_s


@dataclass(frozen=True, slots=True)
class _Plan:
    """Draft lengths of a step by offer, with the step's expected tokens."""

    lengths: Floats
    tokens: float
    # Expected seconds, with the share of the draft model's catch-up that future tokens do not have to pay back.
    seconds: float
    # Expected seconds of the target, and of drafting with all of the catch-up.
    target_s: float
    draft_s: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def taken_s(self) -> float:
        return self.target_s + self.draft_s


class _Batch:
    """The offers of a step as arrays, and its costs."""

    def __init__(
        self,
        offers: Sequence[Offer],
        sequences: int,
        prompt_tokens: int,
        costs: CostTable,
        drafting: DraftingCosts,
    ) -> None:
        self.sequences = sequences
        self.limits = np.array([offer.limit for offer in offers])
        self.lags = np.array([offer.lag or 0 for offer in offers])
        self.base_s = costs.base_s(sequences)
        self._costs, self._drafting, self._prompt_tokens = costs, drafting, prompt_tokens
        self._takes_passes = np.array([offer.lag is not None for offer in offers])
        payback = np.array([max(1, min(offer.remaining, _PAYBACK_TOKENS)) for offer in offers])
        self._catch_up_s = self.lags * drafting.token_s / payback  # seconds of catching up per future token
        acceptance = np.array([offer.acceptance for offer in offers])
        #: Chances of acceptance, 0 for offers whose catch-up takes longer than the accepted tokens could save.
        self.acceptance = np.where(self._catch_up_s < acceptance * self.base_s / sequences, acceptance, 0.0)

    def fastest(self, acceptance: Floats) -> _Plan:
        """Return the fastest plan. Its drafts end before tokens that are too unlikely, or at a maximum length."""
        chances = np.clip(acceptance, 1e-9, _MAX_ACCEPTANCE)
        likely = np.floor(np.log(_CHANCES) / np.log(chances))
        return self._fastest(np.minimum(np.minimum(likely, _LENGTHS), self.limits), chances)

    def probe(self, plain: _Plan) -> _Plan:
        """Return a plan with a few tokens for the offer with the least catch-up.

        Returns `plain`, the plan without drafts, if drafts would not pay even if all of them were accepted.
        """
        if self.fastest(np.full(len(self.limits), _MAX_ACCEPTANCE)).rate <= _MIN_GAIN * plain.rate:
            return plain
        lengths = np.zeros(len(self.limits))
        number = int(np.argmin(self.lags))
        lengths[number] = min(self.limits[number], _PROBE_TOKENS)
        return self.plan(lengths)

    def plan(self, lengths: Floats) -> _Plan:
        return self._fastest(lengths[None, :], np.clip(self.acceptance, 1e-9, _MAX_ACCEPTANCE))

    def _fastest(self, lengths: Floats, chances: Floats) -> _Plan:
        """Return the fastest of the plans whose draft `lengths` (plans, offers) are given."""
        tokens = self.sequences + (chances * (1 - chances**lengths) / (1 - chances)).sum(1)
        passes = lengths * self._takes_passes
        drafts = passes > 0
        passes_s = self._drafting.seconds(drafts.sum(1), passes.max(1))
        extra_s = self._costs.extra_s(self.sequences, np.append(0.0, lengths.sum(1)) + self._prompt_tokens)
        target_s = self.base_s + extra_s[1:] - extra_s[0]
        seconds = target_s + passes_s + (drafts * self._catch_up_s).sum(1) * tokens / self.sequences
        best = int(np.argmax(tokens / seconds))
        draft_s = passes_s[best] + (drafts[best] * self.lags).sum() * self._drafting.token_s
        return _Plan(lengths[best], float(tokens[best]), float(seconds[best]), float(target_s[best]), float(draft_s))
