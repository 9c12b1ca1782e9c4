"""Speculation: assigns drafters and draft lengths to requests. Apart from rounding, it affects only their speed.

A request's prediction is a drafter like the others, and has precedence. `DraftPolicy` decides how many tokens to take.

Imports no torch; only drafters may import it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from ..types.draft_record import Acceptance
from .draft_policy import DraftPolicy, Offer
from .drafter import Drafter

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..types.request_state import RequestState, ScheduledRequest
    from ..types.sampling_row import RowOf
    from ..types.slot_state import SlotState
    from .cost_table import CostTable

PREDICTION = "prediction"  # name of the request's prediction among the drafters


class DrafterRecord:
    """A drafter's counts of proposed and accepted tokens, and its acceptance rate, with which new requests start."""

    def __init__(self) -> None:
        self.proposed = self.accepted = 0
        self.acceptance = Acceptance()


class Speculator:
    """Grants drafts to requests, runs the drafters, and learns from the results."""

    def __init__(self, drafters: Sequence[Drafter], config: EngineConfig, costs: CostTable | None = None) -> None:
        """Without `costs`, or with fixed draft lengths, drafts are as long as possible."""
        self._drafters = tuple(drafters)
        self._most = config.num_speculative_tokens
        drafting = next((drafter.costs for drafter in drafters if drafter.costs is not None), None)
        self._policy = DraftPolicy(costs, drafting) if costs and config.draft_length == "adaptive" else None
        self._records = {name: DrafterRecord() for name in (PREDICTION, *(drafter.name for drafter in drafters))}
        self._prompt_tokens = self._speculative_steps = 0
        self.draft_tokens = 0  # draft tokens of this step: granted ones, and after the step the verified ones

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
        self.draft_tokens, self._prompt_tokens = 0, sum(item.num_tokens - 1 for item in other_items)
        drafters = self._drafters if self._policy is None or not self._policy.is_resting(sequences) else ()
        offers: list[tuple[ScheduledRequest, str, Offer]] = []
        for item in chain(decodes, other_items) if drafters else other_items:
            limit = min(budget, item.state.num_remaining_tokens - 1)
            if limit > 0 and item.is_caught_up:
                offer = self._prediction(item.state, limit, sequences) or self._best(item.state, limit, drafters)
                offers += [(item, *offer)] if offer else []
        granted_to: list[ScheduledRequest] = []
        for (item, name, _), length in zip(offers, self._lengths(offers, sequences), strict=True):
            granted = min(length, budget)
            if not granted or not grow(item.state, len(item.state.token_ids) + granted):
                continue
            self.draft_tokens += granted
            budget -= granted
            if name == PREDICTION:
                item.draft_ids = item.state.prediction.propose(granted)
            else:
                item.drafter, item.num_drafts = name, granted
                granted_to.append(item)
        return granted_to

    def may_draft(self, sequences: int) -> bool:
        """Return whether plain decodes may get drafts in the next step, which has this number of `sequences`."""
        return bool(self._drafters) and not (self._policy and self._policy.is_resting(sequences, ahead=1))

    def propose(self, batch: Sequence[SlotState], row_of: RowOf) -> None:
        """Run the drafters for the granted drafts."""
        granted = {item.drafter for item in batch}
        keeps_up = (self._policy is None or self._policy.pays) and not all(item.is_caught_up for item in batch)
        for drafter in self._drafters:
            if drafter.name in granted or (keeps_up and drafter.takes_passes):
                drafter.propose(batch, row_of)

    def record(self, item: ScheduledRequest, accepted: int, *, ends: bool) -> None:
        """Record that the target accepted `accepted` draft tokens. `ends`: whether the answer ends after them."""
        proposed = len(item.draft_ids)
        predicts_end = item.draft_ends and accepted == proposed  # a predicted end counts as a guess too
        if not (proposed or predicts_end):
            return
        right, guessed = accepted + (predicts_end and ends), proposed + predicts_end
        name, drafts = item.drafter or PREDICTION, item.state.drafts
        record = self._records[name]
        own = drafts.acceptance.setdefault(name, Acceptance(record.acceptance.mean))
        for acceptance in (own, record.acceptance):
            acceptance.add(right, guessed)
        record.proposed += proposed
        record.accepted += accepted
        if item.drafter is not None:
            drafts.proposed += proposed
            drafts.accepted += accepted

    def observe(self, batch: Sequence[ScheduledRequest], step_s: float) -> None:
        """Learn from a finished step. `step_s`: duration of the whole step, in seconds."""
        self.draft_tokens = sum(len(item.draft_ids) for item in batch) if self.draft_tokens else 0
        self._speculative_steps += self.draft_tokens > 0
        if self._policy is not None and batch:
            self._policy.observe(len(batch), self._prompt_tokens, self.draft_tokens, step_s)

    def _lengths(self, offers: Sequence[tuple[ScheduledRequest, str, Offer]], sequences: int) -> list[int]:
        if self._policy is None or not offers:
            return [offer.limit for _, _, offer in offers]
        return self._policy.lengths([offer for _, _, offer in offers], sequences, self._prompt_tokens)

    def _prediction(self, state: RequestState, limit: int, sequences: int) -> tuple[str, Offer] | None:
        """Return the offer of the request's prediction, cut short while nothing is known about the prediction."""
        predicted = len(state.prediction.propose(limit))
        if predicted and self._policy is not None and PREDICTION not in state.drafts.acceptance:
            predicted = self._policy.max_first(predicted, sequences, self._prompt_tokens)
        return (PREDICTION, Offer(self._acceptance(state, PREDICTION), predicted)) if predicted else None

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
