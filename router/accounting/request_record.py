"""The record of one request: the source of its `updraft` object, its headers and its ledger row."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from ...accounting.reported_usage import ReportedUsage
from ...accounting.token_estimate import BYTES_PER_TOKEN
from ...protocol.http.wire import new_id
from ...protocol.responses import UpdraftInfo, Usage
from ...protocol.telemetry.tracing import Attributes, Span, usage
from ..gates.gates import GateDecision
from ..request.chat_request import Caller
from ..tiers.failures import CloudFailure
from ..tiers.interfaces import LocalAnswer
from .budget import NO_CHARGE, NO_DEMAND, Charge, Demand, Reservation
from .ledger import LedgerRow
from .prices import Prices

# Maximum characters of the model name and of the reason in a row. Both may contain callers' input of any length.
MAX_MODEL_CHARS, MAX_REASON_CHARS = 100, 500

# A note on a field without effect; the group is the name of the request's field.
_NO_EFFECT = re.compile(r"(\w+)[^\s:]*: no effect")

Route = Literal["local", "cloud", "escalated", "fallback", "cache"]


@dataclass(slots=True)
class CloudCall:
    model: str
    # Charge as a function of the answer's length.
    demand: Demand = NO_DEMAND
    # Completion tokens that are charged if the cloud reports no usage.
    unreported_tokens: int = 0
    # Usage reported by the cloud so far.
    counted: ReportedUsage = field(default_factory=ReportedUsage)
    # Notes on hints that the cloud ignores.
    hints: list[str] = field(default_factory=list[str])
    # Whether the call is free: the cloud refused it or was not reached.
    unbilled: bool = False
    # Whether the connection broke, so that `counted` is an estimate.
    is_broken: bool = False
    # Whether the answer may contain hidden tokens, such as reasoning.
    is_reasoning: bool = False

    @property
    def booked(self) -> ReportedUsage:
        """Usage for ledger and budgets: the cloud's report, or the estimate in `demand` if the report is incomplete."""
        counted, read = self.counted, self.demand.fixed.cloud_tokens
        if self.unbilled or (counted.prompt_tokens and counted.has_completion and not self.is_broken):
            return counted
        read = read if self.is_broken else counted.prompt_tokens or read
        written = max(counted.completion_tokens, self.unreported_tokens)
        return replace(counted, prompt_tokens=read, completion_tokens=written)

    @property
    def prompt_estimate(self) -> int:
        """Estimated prompt tokens, for clouds that report only the total tokens."""
        return self.demand.fixed.cloud_tokens // BYTES_PER_TOKEN

    def usd(self, prices: Prices) -> float | None:
        """Return the cost in US dollars, or None if the model has no price.

        A prompt that no cloud has counted costs what is reserved for it, which includes the highest price of a cache.
        """
        if self.unbilled:
            return 0.0
        if self.counted.prompt_tokens and not self.is_broken:
            return prices.cloud(self.model, self.booked)
        written = prices.cloud(self.model, ReportedUsage(completion_tokens=self.booked.completion_tokens))
        return None if written is None else self.demand.fixed.usd + written

    def charge(self, prices: Prices) -> Charge:
        """Return the call's tokens and dollars."""
        tokens = self.booked.prompt_tokens + self.booked.completion_tokens
        # An unknown price may count as 0, because dollar budgets require a price for every model.
        return Charge(cloud_tokens=tokens, usd=self.usd(prices) or 0.0)


@dataclass(slots=True)
class RequestRecord:
    """The facts of one request, filled in while it is processed."""

    prices: Prices
    # Model name of the best cloud.
    top_model: str
    request_id: str = field(default_factory=lambda: new_id("chatcmpl"))
    # Model name that the caller gave.
    model: str = ""
    caller: Caller = field(default_factory=Caller)
    # Id of the request's task, or an empty string.
    task: str = ""
    # Time of arrival, by `time.monotonic()`.
    started: float = field(default_factory=time.monotonic)
    # Time of arrival, in seconds since the epoch.
    timestamp: float = field(default_factory=time.time)
    # Route of the answer. None: there is no answer yet.
    route: Route | None = None
    # Gate decision that determined the route.
    decision: GateDecision = field(default_factory=lambda: GateDecision(0, False, "refused before routing"))
    # Decisions of all gates, in order.
    decisions: list[GateDecision] = field(default_factory=list[GateDecision])
    # Text appended to the decision's reason in the answer.
    note: str = ""
    # Notes on parts of the request's JSON schema that were not enforced.
    notes: tuple[str, ...] = ()
    # Notes on accepted parts of the request that have no effect, such as unknown headers.
    hints: tuple[str, ...] = ()
    # Notes on hints that the device ignores.
    device_hints: tuple[str, ...] = ()
    # The `x-ratelimit-*` headers of the cloud's last response, which the caller gets too.
    rate_limits: dict[str, str] = field(default_factory=dict[str, str])
    # Notes on parts of the request that had to be changed for the API of the last cloud.
    call_notes: list[str] = field(default_factory=list[str])
    # Names of fields that the last cloud received unchanged. Notes do not list these fields as ignored.
    native_fields: list[str] = field(default_factory=list[str])
    # Note for the answer if the budget capped its length, else empty.
    budget_note: str = ""
    # Reason why a cloud call failed.
    failure: str = ""
    # Prompt tokens of all local runs.
    local_prompt_tokens: int = 0
    # Prompt tokens that local runs took from the prefix cache.
    local_cached_tokens: int = 0
    # Completion tokens of all local runs.
    local_tokens: int = 0
    # Duration of all local runs, in seconds.
    local_s: float = 0.0
    cloud_calls: list[CloudCall] = field(default_factory=list[CloudCall])
    # Duration of all cloud calls, in seconds.
    cloud_s: float = 0.0
    # Reservation in the budgets for the cloud calls.
    reserved: Reservation | None = None
    # Function that keeps a ledger row in case the process is killed. None: there is no ledger.
    keep: Callable[[LedgerRow], object] | None = None
    # Time until which the request waits for free budget, by `time.monotonic()`. 0: do not wait.
    waits_until: float = 0.0
    # Whether the route depended on the current state, such as load or budgets, so that the answer must not be cached.
    time_dependent: bool = False
    # Tier that generated the cached answer (None: the answer is not from the cache), and the tokens it used.
    cached_tier: Literal["local", "cloud"] | None = None
    cached_usage: ReportedUsage = field(default_factory=ReportedUsage)
    span: Span = field(default_factory=Span)

    @property
    def tier(self) -> Literal["local", "cloud"]:
        return self.cached_tier or ("cloud" if self.route in ("cloud", "escalated") else "local")

    @property
    def reason(self) -> str:
        note = self.note or (self.failure if self.tier == "cloud" else "")  # of a cloud that another one replaced
        return f"{self.decision.reason}; {note}" if note else self.decision.reason

    @property
    def latency_ms(self) -> float:
        return (time.monotonic() - self.started) * 1e3

    @property
    def cloud(self) -> ReportedUsage:
        """Usage of the last cloud call."""
        return self.cloud_calls[-1].counted if self.cloud_calls else ReportedUsage()

    @property
    def cloud_model(self) -> str:
        """Model of the last cloud call, or an empty string."""
        return self.cloud_calls[-1].model if self.cloud_calls else ""

    @property
    def cloud_prompt_tokens(self) -> int:
        """Prompt tokens of all cloud calls."""
        return sum(each.booked.prompt_tokens for each in self.cloud_calls)

    @property
    def cloud_tokens(self) -> int:
        """Completion tokens of all cloud calls."""
        return sum(each.booked.completion_tokens for each in self.cloud_calls)

    @property
    def cost_usd(self) -> float | None:
        """Total cost in US dollars; None if a cloud model without a price was called."""
        costs = [each.usd(self.prices) for each in self.cloud_calls]
        return None if None in costs else sum(filter(None, costs), self._local_usd)

    @property
    def _local_usd(self) -> float:
        return self.prices.local(self.local_prompt_tokens, self.local_tokens)

    @property
    def saved_usd(self) -> float | None:
        """US dollars saved (negative: lost) compared with an equally long answer of `top_model`. None: no price."""
        if self.route is None:
            return 0.0
        if self.cached_tier is not None:
            alone = self.cached_usage
        elif self.tier == "cloud":
            alone = self.cloud_calls[-1].booked if self.cloud_calls else ReportedUsage()
        else:
            alone = ReportedUsage(self.local_prompt_tokens, self.local_tokens)
        cost, cost_alone = self.cost_usd, self.prices.cloud(self.top_model, alone)
        return None if cost_alone is None or cost is None else cost_alone - cost

    @property
    def charge(self) -> Charge:
        """Amounts that this request takes from its budgets."""
        clouds = sum((each.charge(self.prices) for each in self.cloud_calls), NO_CHARGE)
        asks = int(clouds.cloud_tokens > 0)
        return Charge(1, asks, clouds.cloud_tokens, self._local_usd + clouds.usd)

    def judged(self, decision: GateDecision) -> None:
        """Add a gate decision. A gate-2 decision replaces a previous gate-2 decision that let the answer continue."""
        last = self.decisions[-1] if self.decisions else None
        if last is not None and last.gate == decision.gate == 2 and not last.escalate:
            self.decisions.pop()
        self.decisions.append(_brief(decision))

    def decide(self, decision: GateDecision) -> None:
        """Add a gate decision, and report it in the answer as the reason for the route."""
        self.judged(decision)
        self.decision = self.decisions[-1]

    def repeat(self, tier: Literal["local", "cloud"], usage: dict[str, Any], age_s: float) -> None:
        """Record that the answer comes from the cache: `tier` generated it `age_s` seconds ago, with `usage`."""
        counted = ReportedUsage.of({"usage": usage}) or ReportedUsage()
        self.route, self.cached_tier = "cache", tier
        self.cached_usage = ReportedUsage(counted.prompt_tokens, counted.completion_tokens)
        self.decide(GateDecision(0, escalate=False, reason=f"cached answer of the {tier} tier, {age_s:.0f} s old"))

    def usage(self) -> Usage:
        """Return the tokens of the answer, as counted by the tier that generated it."""
        if self.tier == "local":
            return Usage.of(self.local_prompt_tokens, self.local_tokens, cached=self.local_cached_tokens)
        return Usage.of(self.cloud.prompt_tokens, self.cloud.completion_tokens, cached=self.cloud.cached_tokens)

    def passed_over(self, model: str, failure: CloudFailure) -> None:
        """Record that the cloud of `model` failed and that the next cloud is called."""
        self.failure = f"{model} failed: {failure.cause}"[:MAX_REASON_CHARS]
        self.judged(GateDecision(0, escalate=True, reason=f"next cloud: {self.failure}"))

    def fell_back(self, failure: CloudFailure) -> None:
        """Record that the local answer replaces the answer of a failed cloud call."""
        self.route = "fallback"
        self.failure = failure.cause[:MAX_REASON_CHARS]
        self.note = f"fallback, because {failure.phrase}"

    def failed(self, failure: CloudFailure) -> None:
        """Record that a cloud call failed and that no local answer replaces it."""
        self.failure, self.note = failure.cause[:MAX_REASON_CHARS], failure.phrase

    def count_local(self, answer: LocalAnswer, seconds: float) -> None:
        """Add the tokens and the duration of a finished local run."""
        self.local_s += seconds
        self.local_prompt_tokens += answer.prompt_tokens
        self.local_cached_tokens += answer.cached_tokens
        self.local_tokens += len(answer.tokens)

    def counted(self, usage: ReportedUsage | None) -> None:
        """Set the usage of the last cloud call; None if the cloud reported none."""
        self.cloud_calls[-1].counted = usage or ReportedUsage()

    def keep_interrupted_row(self) -> None:
        """Keep a row to commit if the process is killed now, with the current cloud call charged as reserved, or as
        estimated without a budget."""
        if self.keep is None:
            return
        *ended, call = self.cloud_calls
        tokens = call.demand.wanted.likely
        if self.reserved is not None:
            earlier = sum((each.charge(self.prices).cloud_tokens for each in ended), call.demand.fixed.cloud_tokens)
            tokens = self.reserved.charge.cloud_tokens - earlier
        call = replace(call, unreported_tokens=max(tokens, call.unreported_tokens), counted=ReportedUsage())
        failure = "the process was killed during the request"
        killed = replace(self, route=None, cloud_calls=[*ended, call], failure=failure)
        self.keep(killed.row(499))

    @contextmanager
    def in_cloud(self) -> Generator[None]:
        """Add the duration of the `with` block to `cloud_s`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.cloud_s += time.monotonic() - began

    @property
    def answer_notes(self) -> list[str]:
        """Notes that a cached answer repeats: on hints, on the constraint, and on changes for the cloud's API."""
        calls = self.cloud_calls if self.tier == "cloud" else []
        ignored = () if self.cached_tier else calls[-1].hints if calls else self.device_hints
        return [*ignored, *self.notes, *self.call_notes]

    def info(self) -> UpdraftInfo:
        native = self.native_fields if self.tier == "cloud" else ()
        hints = [note for note in self.hints if not ((field := _NO_EFFECT.match(note)) and field[1] in native)]
        return UpdraftInfo(
            request_id=self.request_id,
            tier=self.tier,
            route=self.route or "local",
            task=self.task or UNSET,
            confidence=self.decision.confidence,
            notes=[*hints, *self.answer_notes, *filter(None, [self.budget_note])] or UNSET,
            **self._facts(),
        )

    def _facts(self) -> dict[str, Any]:
        """Return the fields that the `updraft` object and the ledger row share."""
        return {
            "reason": self.reason,
            "gate": self.decision.gate,
            "p_gain": self.decision.p_gain,
            "threshold": self.decision.threshold,
            "cost_usd": self.cost_usd,
            "saved_usd": self.saved_usd,
            "local_tokens": self.local_tokens,
            "cloud_tokens": self.cloud_tokens,
            "draft_proposed": self.cloud.accepted + self.cloud.rejected,
            "draft_accepted": self.cloud.accepted,
            "latency_ms": self.latency_ms,
        }

    def traced(self, status: int) -> Attributes:
        """Return the attributes of the request's trace span."""
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
            cached_tokens=sum(each.counted.cached_tokens for each in self.cloud_calls),
            status=status,
            key=self.caller.key,
            user=self.caller.user,
            task=self.task,
            cloud_model=self.cloud_model,
            failure=self.failure,
            decisions=msgspec.json.encode(self.decisions).decode(),
            local_prompt_tokens=self.local_prompt_tokens,
            cloud_prompt_tokens=self.cloud_prompt_tokens,
            local_ms=self.local_s * 1e3,
            cloud_ms=self.cloud_s * 1e3,
            **self._facts(),
        )


def _brief(decision: GateDecision) -> GateDecision:
    if len(decision.reason) <= MAX_REASON_CHARS:
        return decision
    return replace(decision, reason=f"{decision.reason[: MAX_REASON_CHARS - 3]}...")
