"""The record of one request: the facts behind its `updraft` object, its headers and its ledger row."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from ...protocol.http.ids import new_id
from ...protocol.responses import UpdraftInfo, Usage
from ...protocol.telemetry.tracing import Attributes, Span, usage
from ..gates.gates import GateDecision
from ..request.caller import Caller
from ..tiers.failures import CloudFailure
from ..tiers.interfaces import CloudUsage, LocalAnswer
from .budget import NOTHING, Charge, Demand, Reservation
from .ledger import LedgerRow
from .prices import Prices

# Characters. What a caller sent may be in either, and a ledger is no place to write as much as one likes into.
MAX_MODEL_CHARS, MAX_REASON_CHARS = 100, 500

Route = Literal["local", "cloud", "escalated", "fallback", "cache"]


@dataclass(frozen=True, slots=True)
class Repeated:
    """An answer that was kept: who gave it, and what it took then."""

    tier: Literal["local", "cloud"]
    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class CloudCall:
    """One call to a cloud."""

    model: str
    # Its charge as a function of the answer's tokens, where there are budgets.
    demand: Demand | None = None
    # Tokens of the answer that are charged if the cloud does not report them.
    unreported_tokens: int = 0
    # The tokens that the cloud counted, as far as they are known.
    counted: CloudUsage = field(default_factory=CloudUsage)
    # The cloud refused, or was never reached.
    unbilled: bool = False
    # An attempt that broke: `counted` is an estimate, and the budgets are charged what was demanded.
    is_broken: bool = False
    # Whether the answer may have tokens that it does not show.
    is_reasoning: bool = False

    def usd(self, prices: Prices) -> float | None:
        """None where the model has no price."""
        if self.unbilled:
            return 0.0
        counted = self.counted
        return prices.cloud(self.model, counted.prompt_tokens, counted.completion_tokens, counted.cached_tokens)

    def charge(self, prices: Prices) -> Charge:
        """Return the tokens and dollars of the call: as the cloud counted them, or else as they were demanded."""
        if self.is_broken or not (self.unbilled or self.counted.prompt_tokens):
            return NOTHING if self.demand is None else self.demand.charge(self.unreported_tokens)
        tokens = self.counted.prompt_tokens + self.counted.completion_tokens
        return Charge(cloud_tokens=tokens, usd=self.usd(prices) or 0.0)  # a budget in dollars has all prices


@dataclass(slots=True)
class RequestRecord:
    """Filled in as the request goes its way."""

    prices: Prices
    # The best cloud's model.
    top_model: str
    request_id: str = field(default_factory=lambda: new_id("chatcmpl"))
    # As the caller named it.
    model: str = ""
    caller: Caller = field(default_factory=Caller)
    # `time.monotonic` seconds.
    started: float = field(default_factory=time.monotonic)
    # `time.time` seconds.
    timestamp: float = field(default_factory=time.time)
    # None: no answer yet.
    route: Route | None = None
    # The one that counts.
    decision: GateDecision = field(default_factory=lambda: GateDecision(0, False, "refused before routing"))
    # All of them, in order.
    decisions: list[GateDecision] = field(default_factory=list[GateDecision])
    # Added to the reason.
    note: str = ""
    # The parts of the request's schema that the answer was not held to.
    notes: tuple[str, ...] = ()
    # Where the budget capped the answer.
    budget_note: str = ""
    # Why a cloud gave no answer.
    failure: str = ""
    # Over all local runs of the request.
    local_prompt_tokens: int = 0
    # Over all local runs.
    local_tokens: int = 0
    # Seconds over all local runs.
    local_s: float = 0.0
    # In order.
    cloud_calls: list[CloudCall] = field(default_factory=list[CloudCall])
    # Seconds over all cloud calls.
    cloud_s: float = 0.0
    # Taken from the budgets for the cloud calls.
    reserved: Reservation | None = None
    # Until when it waits for room in the budgets, in `time.monotonic` seconds. 0: it does not wait.
    waits_until: float = 0.0
    # The request would have gone another way at another time.
    time_dependent: bool = False
    # The answer was kept from an earlier request.
    repeated: Repeated | None = None
    # Of its trace.
    span: Span = field(default_factory=Span)

    @property
    def tier(self) -> Literal["local", "cloud"]:
        if self.repeated is not None:
            return self.repeated.tier
        return "cloud" if self.route in ("cloud", "escalated") else "local"

    @property
    def reason(self) -> str:
        return f"{self.decision.reason}; {self.note}" if self.note else self.decision.reason

    @property
    def latency_ms(self) -> float:
        return (time.monotonic() - self.started) * 1e3

    @property
    def cloud(self) -> CloudUsage:
        """The count of the last cloud that was called."""
        return self.cloud_calls[-1].counted if self.cloud_calls else CloudUsage()

    @property
    def cloud_model(self) -> str:
        """The one that was asked last; empty if none was."""
        return self.cloud_calls[-1].model if self.cloud_calls else ""

    @property
    def cloud_prompt_tokens(self) -> int:
        """The prompt tokens of all clouds."""
        return sum(each.counted.prompt_tokens for each in self.cloud_calls)

    @property
    def cloud_tokens(self) -> int:
        """The completion tokens of all clouds."""
        return sum(each.counted.completion_tokens for each in self.cloud_calls)

    @property
    def cost_usd(self) -> float | None:
        """None where a cloud was asked whose model has no price."""
        total = self._local_usd
        for each in self.cloud_calls:
            if (usd := each.usd(self.prices)) is None:
                return None
            total += usd
        return total

    @property
    def _local_usd(self) -> float:
        return self.prices.local(self.local_prompt_tokens, self.local_tokens)

    @property
    def saved_usd(self) -> float | None:
        """Against `top_model` alone with an answer of this length; below 0 where paid local work was in vain.

        None where a price is missing.
        """
        if self.route is None:
            return 0.0
        if self.repeated is not None:
            alone = CloudUsage(self.repeated.prompt_tokens, self.repeated.completion_tokens)
        elif self.tier == "cloud":
            alone = self.cloud
        else:
            alone = CloudUsage(self.local_prompt_tokens, self.local_tokens)
        cost, cost_alone = self.cost_usd, CloudCall(self.top_model, counted=alone).usd(self.prices)
        return None if cost_alone is None or cost is None else cost_alone - cost

    @property
    def charge(self) -> Charge:
        """The charge for the budgets."""
        clouds = sum((each.charge(self.prices) for each in self.cloud_calls), NOTHING)
        asks = int(clouds.cloud_tokens > 0)
        return Charge(1, asks, clouds.cloud_tokens, self._local_usd + clouds.usd)

    def judged(self, decision: GateDecision) -> None:
        """One more verdict to explain the request with; of a gate 2 that let it pass again and again, the last."""
        self._keep(_brief(decision))

    def decide(self, decision: GateDecision) -> None:
        """One more verdict, and the one that the answer names."""
        self.decision = _brief(decision)
        self._keep(self.decision)

    def _keep(self, decision: GateDecision) -> None:
        last = self.decisions[-1] if self.decisions else None
        if last is not None and last.gate == decision.gate == 2 and not last.escalate:
            self.decisions.pop()
        self.decisions.append(decision)

    def repeat(self, tier: Literal["local", "cloud"], usage: dict[str, Any], age_s: float) -> None:
        """The answer is the one that `tier` gave `age_s` seconds ago to the same request, with that `usage`."""
        counted = CloudUsage.of({"usage": usage}) or CloudUsage()
        self.route = "cache"
        self.repeated = Repeated(tier, counted.prompt_tokens, counted.completion_tokens)
        self.decide(
            GateDecision(0, escalate=False, reason=f"answered by the {tier} tier {age_s:.0f} s ago, kept since")
        )

    def usage(self) -> Usage:
        """The tokens of the answer, as the tier that gave it counted them."""
        if self.tier == "local":
            return Usage.of(self.local_prompt_tokens, self.local_tokens)
        return Usage.of(self.cloud.prompt_tokens, self.cloud.completion_tokens)

    def fell_back(self, failure: CloudFailure) -> None:
        """The local answer stands in for the one that the cloud did not give."""
        self.route = "fallback"
        self.failure = failure.cause[:MAX_REASON_CHARS]
        self.note = f"fallback, because {failure.phrase}"

    def failed(self, failure: CloudFailure) -> None:
        """No answer stands in for the one that the cloud did not give."""
        self.failure, self.note = failure.cause[:MAX_REASON_CHARS], failure.phrase

    def count_local(self, answer: LocalAnswer, seconds: float) -> None:
        """Add one ended local run."""
        self.local_s += seconds
        self.local_prompt_tokens += answer.prompt_tokens
        self.local_tokens += len(answer.tokens)

    def counted(self, usage: CloudUsage | None) -> None:
        """The cloud that was asked last says what it counted; None: it did not say."""
        self.cloud_calls[-1].counted = usage or CloudUsage()

    @contextmanager
    def in_cloud(self) -> Generator[None]:
        """Time in here was spent waiting for the cloud."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.cloud_s += time.monotonic() - began

    def info(self) -> UpdraftInfo:
        p_gain = self.decision.p_gain
        return UpdraftInfo(
            request_id=self.request_id,
            tier=self.tier,
            route=self.route or "local",
            reason=self.reason,
            gate=self.decision.gate,
            p_gain=p_gain,
            confidence=None if p_gain is None else 1.0 - p_gain,
            threshold=self.decision.threshold,
            cost_usd=self.cost_usd,
            saved_usd=self.saved_usd,
            local_tokens=self.local_tokens,
            cloud_tokens=self.cloud_tokens,
            draft_proposed=self.cloud.accepted + self.cloud.rejected,
            draft_accepted=self.cloud.accepted,
            latency_ms=self.latency_ms,
            notes=[*self.notes, *filter(None, [self.budget_note])] or UNSET,
        )

    def traced(self, status: int) -> Attributes:
        """The attributes of the request's span."""
        about = {"gen_ai.request.model": self.model[:MAX_MODEL_CHARS], "http.response.status_code": status}
        tokens = usage(self.local_prompt_tokens + self.cloud_prompt_tokens, self.local_tokens + self.cloud_tokens)
        return {**about, **tokens, "updraft.route": self.route or "none", "updraft.gate": self.decision.gate}

    def row(self, status: int) -> LedgerRow:
        return LedgerRow(
            id=self.request_id,
            started_at=self.timestamp,
            model=self.model[:MAX_MODEL_CHARS],
            route=self.route or "none",
            tier=self.tier if self.route is not None else "none",
            gate=self.decision.gate,
            reason=self.reason,
            p_gain=self.decision.p_gain,
            threshold=self.decision.threshold,
            local_tokens=self.local_tokens,
            cloud_tokens=self.cloud_tokens,
            draft_proposed=self.cloud.accepted + self.cloud.rejected,
            draft_accepted=self.cloud.accepted,
            cached_tokens=sum(each.counted.cached_tokens for each in self.cloud_calls),
            cost_usd=self.cost_usd,
            saved_usd=self.saved_usd,
            latency_ms=self.latency_ms,
            status=status,
            key=self.caller.key,
            user=self.caller.user,
            cloud_model=self.cloud_model,
            failure=self.failure,
            decisions=msgspec.json.encode(self.decisions).decode(),
            local_prompt_tokens=self.local_prompt_tokens,
            cloud_prompt_tokens=self.cloud_prompt_tokens,
            local_ms=self.local_s * 1e3,
            cloud_ms=self.cloud_s * 1e3,
        )


def _brief(decision: GateDecision) -> GateDecision:
    if len(decision.reason) <= MAX_REASON_CHARS:
        return decision
    return replace(decision, reason=f"{decision.reason[: MAX_REASON_CHARS - 3]}...")
