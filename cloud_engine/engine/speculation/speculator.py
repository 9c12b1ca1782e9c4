"""Speculation: assigns drafters and draft lengths to requests. Apart from rounding, it affects only their speed.

A request's own prediction has precedence. It is verified whole, or its first few tokens are probed
(`prediction_trust`), so that a useless prediction costs little. If the request has no prediction, drafters propose as
many tokens as `draft_length` expects to pay off.

Imports no torch; only drafters may import it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from ..types.draft_record import DRAFTER_HORIZON, Acceptance
from .draft_length import AdaptiveDraftLength, DraftCandidate, FixedDraftLength
from .drafter import Drafter, DraftWork
from .prediction_trust import PredictionTrust
from .step_costs import StepReport

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..scheduling.draft_planner import Grow
    from ..types.prediction import PredictionCursor
    from ..types.request_state import RequestState, ScheduledRequest
    from ..types.sampling_row import RowOf
    from ..types.slot_state import SlotState


class DrafterRecord:
    """A drafter's counts of proposed and accepted tokens, and its current acceptance rate."""

    def __init__(self) -> None:
        self.proposed = self.accepted = 0
        self.acceptance = Acceptance(DRAFTER_HORIZON)


class Speculator:
    """Grants drafts to requests, runs the drafters, and learns from the results."""

    def __init__(self, drafters: Sequence[Drafter], config: EngineConfig) -> None:
        self._drafters = tuple(drafters)
        self._most = config.num_speculative_tokens
        lengths = AdaptiveDraftLength if config.draft_length == "adaptive" else FixedDraftLength
        self._draft_length = lengths(self._most)
        self._work, self._draft_s = DraftWork(), 0.0
        self._granting_s = self._learning_s = 0.0  # seconds for choosing drafts, and for learning from steps
        self._records = {drafter.name: DrafterRecord() for drafter in drafters}
        self._trust = PredictionTrust()
        self._speculative_steps = 0
        self._accepted_tokens = 0  # accepted tokens of drafters in this step
        self.draft_tokens = 0  # draft tokens of this step: granted ones, and after the step the verified ones

    def counters(self) -> dict[str, int]:
        """Return the counters under their names in `EngineStats`."""
        named = {"speculative_steps": self._speculative_steps}
        for name, record in self._records.items():
            named |= {f"{name}_proposed": record.proposed, f"{name}_accepted": record.accepted}
        return named

    def grant(
        self, decodes: Sequence[ScheduledRequest], other_items: Sequence[ScheduledRequest], budget: int, grow: Grow
    ) -> list[ScheduledRequest]:
        """Implement `DraftPlanner.grant`: choose drafters and draft lengths."""
        started = time.perf_counter()
        asking: list[ScheduledRequest] = []
        sequences, self.draft_tokens = len(decodes) + len(other_items), 0
        takes_whole = partial(self._trust.takes_whole, sequences=sequences)
        drafters_work = bool(self._drafters) and not self._draft_length.is_resting(sequences)
        for item in chain(decodes, other_items) if drafters_work else other_items:
            limit = min(budget, item.state.num_remaining_tokens - 1)
            if limit <= 0 or not item.is_caught_up:
                continue
            predicted = item.state.prediction.propose(limit, takes_whole)
            if not predicted:
                asking.append(item)
            elif grow(item.state, len(item.state.token_ids) + len(predicted)):
                item.draft_ids = predicted
                self.draft_tokens += len(predicted)
                budget -= len(predicted)
        if not drafters_work:
            self._granting_s = 0.0
            return []
        granted_to = self._grant_drafters(asking, sequences, budget, grow) if asking else []
        self._granting_s = time.perf_counter() - started
        return granted_to

    def may_draft(self, sequences: int) -> bool:
        """Return whether plain decodes may get drafts in the next step, which has this number of `sequences`."""
        return bool(self._drafters) and not self._draft_length.is_resting(sequences, ahead=1)

    def propose(self, batch: Sequence[SlotState], row_of: RowOf) -> None:
        """Run the drafters for the granted drafts."""
        started = time.perf_counter()
        self._work = DraftWork()
        drafters = {item.drafter for item in batch}
        keeps_up = self._draft_length.drafts and not all(item.is_caught_up for item in batch)
        for drafter in self._drafters:
            if drafter.name in drafters or (keeps_up and drafter.takes_passes):
                work = drafter.propose(batch, row_of)
                self._work = work if drafter.takes_passes else self._work
        self._draft_s = time.perf_counter() - started

    def record(self, item: ScheduledRequest, accepted: int, *, ends: bool) -> None:
        """Record that the target accepted `accepted` draft tokens. `ends`: whether the answer ends after them."""
        proposed = len(item.draft_ids)
        predicts_end = item.draft_ends and accepted == proposed  # a predicted end counts as a guess too
        if item.drafter is None or not (proposed or predicts_end):
            return
        right, guessed = accepted + (predicts_end and ends), proposed + predicts_end
        record, drafts = self._records[item.drafter], item.state.drafts
        record.acceptance.add(right, guessed)
        drafts.acceptance.setdefault(item.drafter, Acceptance()).add(right, guessed)
        record.proposed += proposed
        record.accepted += accepted
        self._accepted_tokens += accepted
        drafts.proposed += proposed
        drafts.accepted += accepted

    def settle(self, prediction: PredictionCursor) -> None:
        """Record whether the request's prediction was correct, as soon as its first tokens are verified."""
        held = prediction.take_verdict()
        if held is not None:
            self._trust.add(held)

    def observe(self, batch: Sequence[ScheduledRequest], step_s: float) -> None:
        """Learn from a finished step. `step_s`: duration of the whole step, in seconds."""
        started = time.perf_counter()
        drafted = [item for item in batch if item.draft_ids] if self.draft_tokens else []
        self.draft_tokens = sum(len(item.draft_ids) for item in drafted)
        self._speculative_steps += bool(drafted)
        accepted, self._accepted_tokens = self._accepted_tokens, 0
        if not batch or not (self._drafters or self._trust.is_asked):
            return
        if not drafted and not self._trust.is_asked and self._draft_length.may_skip(len(batch)):
            self._draft_length.skip(len(batch), step_s)
            self._learning_s = 0.0  # too short to count
            return
        predicted = sum(len(item.draft_ids) for item in drafted if item.drafter is None)
        report = StepReport(
            sequences=len(batch),
            step_s=step_s + self._learning_s,
            prefill_tokens=predicted + sum(item.num_tokens - 1 for item in batch),  # predictions count as prefill
            draft_tokens=self.draft_tokens - predicted,
            drafting=self._work.drafting,
            passes=self._work.passes,
            lag=self._work.lag,
            draft_s=self._draft_s,
            first_pass_s=self._work.first_pass_s,
            accepted_tokens=accepted,
            deciding_s=self._granting_s + self._learning_s,
        )
        if self._trust.is_asked:
            self._trust.observe(report)
        if predicted:
            self._draft_length.skip(len(batch), step_s)  # no learning: predictions distort the times of this step
        else:
            self._draft_length.observe(report)
        self._learning_s = time.perf_counter() - started

    def _grant_drafters(
        self, asking: list[ScheduledRequest], sequences: int, budget: int, grow: Grow
    ) -> list[ScheduledRequest]:
        offers = [(item, *offer) for item in asking if (offer := self._best_offer(item.state, budget)) is not None]
        lengths = self._draft_length.plan([candidate for _, _, candidate in offers], sequences)
        granted_to: list[ScheduledRequest] = []
        for (item, drafter, _), length in zip(offers, lengths, strict=True):
            granted = min(length, budget)
            if granted and grow(item.state, len(item.state.token_ids) + granted):
                item.drafter, item.num_drafts = drafter.name, granted
                self.draft_tokens += granted
                budget -= granted
                granted_to.append(item)
        return granted_to

    def _best_offer(self, state: RequestState, budget: int) -> tuple[Drafter, DraftCandidate] | None:
        """Return the drafter with the best acceptance rate and its offer; None if no drafter offers tokens."""
        remaining = state.num_remaining_tokens
        best: tuple[Drafter, DraftCandidate] | None = None
        for drafter in self._drafters:
            limit = drafter.offer(state, min(self._most, budget, remaining - 1))
            if limit == 0:
                continue
            prior = self._records[drafter.name].acceptance.estimate()
            acceptance = state.drafts.acceptance.get(drafter.name)
            chance = prior if acceptance is None else acceptance.estimate(prior)
            if best is None or chance > best[1].acceptance:
                best = drafter, DraftCandidate(chance, limit, drafter.takes_passes, drafter.lag(state), remaining)
        return best
