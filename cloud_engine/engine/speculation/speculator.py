"""Speculation: assigns drafters and draft lengths to requests. Apart from rounding, it affects only their speed.

A request's prediction is a drafter like the others, and has precedence. `DraftPolicy` decides how many tokens to take.

Imports no torch; only drafters may import it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from ..types.draft_record import Acceptance, num_assumed
from ..types.request_state import RequestState, ScheduledRequest
from .draft_policy import DraftPolicy, ExpectedStep, Offer
from .drafter import Drafter

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..worker.slots import RowsOf, SlotState
    from .cost_table import CostTable

PREDICTION = "prediction"  # name of the request's prediction among the drafters


class DrafterRecord:
    """A drafter's counts of proposed and accepted tokens, and its acceptance rate, with which new requests start."""

    def __init__(self) -> None:
        self.proposed = self.accepted = 0
        self.acceptance = Acceptance()


@dataclass(slots=True)
class StepDrafts:
    """The drafting of one step, to learn from the step's time."""

    prompt_tokens: int = 0
    # Granted draft tokens; after the step, the verified ones.
    draft_tokens: int = 0
    expected: ExpectedStep | None = None


class Speculator:
    """Grants drafts to requests, runs the drafters, and learns from the results."""

    def __init__(self, drafters: Sequence[Drafter], config: EngineConfig, costs: CostTable | None = None) -> None:
        """Without `costs`, or with fixed draft lengths, drafts are as long as possible."""
        self._drafters = tuple(drafters)
        self._most = config.num_speculative_tokens
        drafting = next((drafter.costs for drafter in drafters if drafter.costs is not None), None)
        self._policy = DraftPolicy(costs, drafting) if costs and config.draft_length == "adaptive" else None
        self._records = {name: DrafterRecord() for name in (PREDICTION, *(drafter.name for drafter in drafters))}
        self._speculative_steps = 0
        self.step = StepDrafts()  # the last scheduled step

    @property
    def draft_tokens(self) -> int:
        """Draft tokens of the last scheduled step."""
        return self.step.draft_tokens

    def counters(self) -> dict[str, int]:
        """Return the counters under their names in `EngineStats`."""
        named = {"speculative_steps": self._speculative_steps}
        for drafter in self._drafters:
            record = self._records[drafter.name]
            named |= {f"{drafter.name}_proposed": record.proposed, f"{drafter.name}_accepted": record.accepted}
        return named

    def grant(
        self,
        decodes: Sequence[ScheduledRequest],
        other_items: Sequence[ScheduledRequest],
        budget: int,
        grow: Callable[[RequestState, int], bool],
    ) -> list[ScheduledRequest]:
        """Grant at most `budget` draft tokens. `grow` allocates a request's blocks, or returns False if none are free.

        `decodes` are plain decodes, which have no predictions. Returns the requests that drafters will draft for.
        """
        sequences = len(decodes) + len(other_items)
        step = self.step = StepDrafts(sum(item.num_tokens - 1 for item in other_items))
        drafters = self._drafters if self._policy is None or not self._policy.is_resting(sequences) else ()
        offers: list[tuple[ScheduledRequest, str, Offer]] = []
        for item in chain(decodes, other_items) if drafters else other_items:
            limit = min(budget, item.state.num_remaining_tokens - item.state.num_pending_tokens - 1)
            if limit > 0 and item.is_caught_up:
                offer = self._prediction(item, limit, sequences) or self._best(item.state, limit, drafters)
                offers += [(item, *offer)] if offer else []
        granted_to: list[ScheduledRequest] = []
        for (item, name, _), length in zip(offers, self._lengths(offers, sequences), strict=True):
            state = item.state
            granted = min(length, budget)
            if not granted or not grow(state, state.num_computed_tokens + item.num_tokens + granted):
                item.draft_ids = []
                continue
            step.draft_tokens += granted
            budget -= granted
            if name == PREDICTION:
                item.draft_ids = item.draft_ids[:granted]
            else:
                drafting = item if state.decode is None else ScheduledRequest(state, item.num_tokens)
                drafting.drafter, drafting.num_drafts = name, granted
                granted_to.append(drafting)
        return granted_to

    def awaits_tokens(self, sequences: int) -> bool:
        """Return whether a drafter may need the tokens of the last step to draft for the next one.

        The next step is assumed to have this number of `sequences`."""
        passes = any(drafter.takes_passes for drafter in self._drafters)
        return passes and not (self._policy and self._policy.is_resting(sequences, ahead=1))

    def propose(self, batch: Sequence[SlotState], rows_of: RowsOf) -> None:
        """Run the drafters for the granted drafts."""
        granted = {item.drafter for item in batch}
        keeps_up = (self._policy is None or self._policy.pays) and not all(item.is_caught_up for item in batch)
        for drafter in self._drafters:
            if drafter.name in granted or (keeps_up and drafter.takes_passes):
                drafter.propose(batch, rows_of)

    def record(self, item: ScheduledRequest, accepted: int, *, ends: bool) -> None:
        """Record that the target accepted `accepted` draft tokens. `ends`: whether the answer ends after them."""
        proposed = len(item.draft_ids)
        predicts_end = item.draft_ends and accepted == proposed  # a predicted end counts as a guess too
        if not (proposed or predicts_end):
            return
        right, guessed = accepted + (predicts_end and ends), proposed + predicts_end
        name, drafts = item.drafter or PREDICTION, item.state.drafts
        record = self._records[name]
        own = drafts.acceptance.get(name)
        if own is None:
            own = drafts.acceptance[name] = Acceptance(record.acceptance.mean)
        own.add(right, guessed)
        record.acceptance.add(right, guessed)
        record.proposed += proposed
        record.accepted += accepted
        if item.drafter is not None:
            drafts.proposed += proposed
            drafts.accepted += accepted

    def observe(self, batch: Sequence[ScheduledRequest], step_s: float, step: StepDrafts | None = None) -> None:
        """Learn from a finished `step` that took `step_s` seconds; None for the last scheduled step."""
        step = step or self.step
        step.draft_tokens = sum(len(item.draft_ids) for item in batch) if step.draft_tokens else 0
        self._speculative_steps += step.draft_tokens > 0
        if self._policy is not None and batch:
            self._policy.observe(len(batch), step.prompt_tokens, step.draft_tokens, step_s, step.expected)

    def _lengths(self, offers: Sequence[tuple[ScheduledRequest, str, Offer]], sequences: int) -> list[int]:
        if self._policy is None or not offers:
            return [offer.limit for _, _, offer in offers]
        lengths = self._policy.lengths([offer for _, _, offer in offers], sequences, self.step.prompt_tokens)
        self.step.expected = self._policy.expected
        return lengths

    def _prediction(self, item: ScheduledRequest, limit: int, sequences: int) -> tuple[str, Offer] | None:
        """Return the offer of the request's prediction, cut short while nothing is known about the prediction.

        The predicted tokens are the `draft_ids` of `item`, until `grant` cuts them."""
        state = item.state
        if not state.request.draft_ids:
            return None
        item.draft_ids = _predicted(state, limit)
        predicted = len(item.draft_ids)
        if predicted and self._policy is not None and PREDICTION not in state.drafts.acceptance:
            predicted = self._policy.max_first(predicted, sequences, self.step.prompt_tokens)
        if not predicted:
            item.draft_ids = []
            return None
        return PREDICTION, Offer(self._acceptance(state, PREDICTION), predicted)

    def _best(self, state: RequestState, limit: int, drafters: Sequence[Drafter]) -> tuple[str, Offer] | None:
        """Return the drafter with the most expected accepted tokens and its offer, or None if no drafter offers any."""
        best: tuple[str, Offer] | None = None
        for drafter in drafters:
            offered = drafter.offer(state, min(self._most, limit))
            if offered == 0:
                continue
            lag = drafter.lag(state) if drafter.takes_passes else None
            offer = Offer(self._acceptance(state, drafter.name), offered, lag, state.num_remaining_tokens)
            if best is None or offer.expected > best[1].expected:
                best = drafter.name, offer
        return best

    def _acceptance(self, state: RequestState, name: str) -> float:
        return (state.drafts.acceptance.get(name) or self._records[name].acceptance).mean


def _predicted(state: RequestState, limit: int) -> list[int]:
    """Return at most `limit` tokens of the request's prediction, after the tokens that the unread step may add."""
    pending = state.num_pending_tokens
    if pending:
        pending = num_assumed(pending, state.prediction.propose(pending), state.unread_drafts)
    return state.prediction.propose(limit, pending)
