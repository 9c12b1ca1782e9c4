"""Gate 0: rules that choose the tiers from the request, the settings and the deadline. Every rule gives its reason."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from ...protocol.errors import (
    BudgetExceededError,
    InvalidRequestError,
    UnknownFieldError,
    UnsupportedFeatureError,
    UpdraftError,
)
from ..privacy.unreadable import UNREADABLE
from ..request.chat_request import RoutingRequest

_NOT_CONFIGURED = "local_not_configured"
_MAX_REASON = 200  # maximum characters of an error message in a reason
_REMEMBERED = 64
PlannedTiers = Literal["both", "one", "local", "cloud"]


@dataclass(frozen=True, slots=True)
class TierAvailability:
    """Availability of the tiers. `local_missing` and `cloud_missing`: why a tier is absent, or None."""

    local_missing: UpdraftError | None
    cloud_missing: UpdraftError | None
    offline: bool
    # Whether the local model can call tools.
    local_tools: bool = False
    # Error of the exceeded budget, if nothing may be spent on the cloud.
    over_budget: BudgetExceededError | None = None


@dataclass(frozen=True, slots=True)
class Ruling:
    """Tiers that may answer a request, with the reason."""

    local: bool
    cloud: bool
    reason: str

    @property
    def open(self) -> bool:
        """Return whether both tiers may answer, so that gates 1 to 3 decide."""
        return self.local and self.cloud


def no_local_configured() -> InvalidRequestError:
    return InvalidRequestError(
        "No local model is configured. Set local to a GGUF file or to a model fetched with `updraft pull`.",
        param="model",
        code=_NOT_CONFIGURED,
    )


def no_cloud_configured() -> InvalidRequestError:
    return InvalidRequestError(
        "No cloud is configured. Set cloud_url to an OpenAI-compatible endpoint.",
        param="model",
        code="cloud_not_configured",
    )


def offline_mode() -> InvalidRequestError:
    return InvalidRequestError(
        "This router is in offline mode and sends nothing to the cloud. Use model='auto' or 'local', or set "
        "offline=false.",
        param="model",
        code="offline",
    )


def rule(job: RoutingRequest, availability: TierAvailability) -> Ruling:
    """Apply the rules. Raises the error of the missing tier if no tier may answer."""
    no_cloud = offline_mode() if availability.offline else availability.cloud_missing or availability.over_budget
    if job.requested_tier == "cloud":
        if job.privacy_rule is not None:
            raise device_only_error(job.privacy_rule)
        if no_cloud is not None:
            raise no_cloud
        return Ruling(local=False, cloud=True, reason="the request asked for the cloud")
    unsupported = job.unsupported or (_no_tools() if job.has_tools and not availability.local_tools else None)
    no_local = availability.local_missing or unsupported
    if job.only_local:
        if no_local is not None:
            raise no_local if job.privacy_rule is None else device_only_error(job.privacy_rule, no_local)
        return Ruling(local=True, cloud=False, reason=_why_local(job))
    if no_local is not None:
        if no_cloud is not None:
            if isinstance(no_cloud, BudgetExceededError):
                raise no_cloud
            raise (no_local if availability.local_missing is None else _no_tier(availability.local_missing, no_cloud))
        return Ruling(local=False, cloud=True, reason=_why_not_local(availability, no_local))
    if no_cloud is not None:
        return Ruling(local=True, cloud=False, reason=_why_not_cloud(availability))
    if job.chat is not None and job.chat.num_answers > 1:
        return Ruling(local=False, cloud=True, reason="n: the gates judge only single answers")
    return Ruling(local=True, cloud=True, reason="both tiers may answer")


def device_only_error(privacy_rule: str, no_local: UpdraftError | None = None) -> InvalidRequestError:
    """Return the error for a request that must stay on the device. `no_local`: why the device cannot answer it."""
    cause = f"the privacy rule {privacy_rule!r}"
    if privacy_rule in UNREADABLE:
        cause = f"privacy rules that cannot read {privacy_rule}"
    fault = ": model='cloud' and embeddings are refused. Use model='auto' or 'local', or remove the private content."
    if no_local is not None:
        fault = f", but the device cannot answer it: {no_local.message}"
    return InvalidRequestError(f"This request must stay on the device because of {cause}{fault}", code="private")


def _why_local(job: RoutingRequest) -> str:
    if job.private:
        return "private: never leaves this device"
    if job.privacy_rule is not None:
        if job.privacy_rule in UNREADABLE:
            return f"private: no rule can read {job.privacy_rule}, so the request stays on this device"
        return f"private: the rule {job.privacy_rule} keeps the request on this device"
    return "the request asked for the device"


def _no_tools() -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        "tools: the local model's chat template has no supported format for tool calls. Set "
        "tool_call_parser (serve --tool-call-parser), for example to hermes, to describe tools in the prompt.",
        param="tools",
    )


def _why_not_cloud(availability: TierAvailability) -> str:
    if availability.offline:
        return "offline mode"
    if availability.cloud_missing is not None or availability.over_budget is None:
        return "the device is the only tier: no cloud is configured"
    return availability.over_budget.message


def _why_not_local(availability: TierAvailability, no_local: UpdraftError) -> str:
    if availability.local_missing is not None:
        if availability.local_missing.code == _NOT_CONFIGURED:
            return "no model on the device is configured"
        return f"no model on the device: {availability.local_missing.message[:_MAX_REASON]}"
    unknown = isinstance(no_local, UnknownFieldError)
    why = "an unknown field" if unknown else no_local.message[:_MAX_REASON]
    return f"beyond the device: {why}"


def _no_tier(no_local: UpdraftError, no_cloud: UpdraftError) -> UpdraftError:
    if no_local.code != _NOT_CONFIGURED:
        return no_local
    return InvalidRequestError(f"{no_local.message} {no_cloud.message}", param="model", code="no_tier")


class LatencyEstimates:
    """Recent durations of each kind of work, in seconds."""

    def __init__(self) -> None:
        #: Number of local runs that run or wait now.
        self.on_device = 0
        self._durations: dict[str, deque[float]] = {}

    def observe(self, work: str, seconds: float) -> None:
        self._durations.setdefault(work, deque(maxlen=_REMEMBERED)).append(seconds)

    def local_s(self, at_once: int) -> float | None:
        """Return the expected duration of a further local run, if the device generates `at_once` answers at once. The
        runs that wait for a place take as long as a recent run each time that all places are filled."""
        seconds = self.expected_s("local")
        return None if seconds is None else seconds * self.turns(at_once)

    def turns(self, at_once: int) -> int:
        """Return how many local runs a further one takes part in or waits for, one after the other."""
        return 1 + self.on_device // at_once

    def expected_s(self, work: str) -> float | None:
        """Return the 90th percentile of the recent durations of `work`, or None before the first measurement."""
        durations = sorted(self._durations.get(work, ()))
        return durations[min(len(durations) - 1, int(0.9 * len(durations)))] if durations else None


@dataclass(frozen=True, slots=True)
class DeadlinePlan:
    """Tiers whose expected time fits a deadline. "one": either tier fits, but not both in sequence."""

    tiers: PlannedTiers
    reason: str = ""


def plan(remaining_s: float, local_s: float | None, cloud_s: float | None) -> DeadlinePlan:
    """Plan both tiers if their times fit in sequence or are unknown, "one" if each fits alone, else the faster tier."""
    if local_s is None or cloud_s is None or local_s + cloud_s <= remaining_s:
        return DeadlinePlan("both")
    why = f"deadline: {remaining_s:.1f} s left, the device takes {local_s:.1f} s and the cloud {cloud_s:.1f} s"
    if local_s <= remaining_s and cloud_s <= remaining_s:
        return DeadlinePlan("one", f"{why}: there is time for only one tier")
    if local_s <= remaining_s or (cloud_s > remaining_s and local_s <= cloud_s):
        return DeadlinePlan("local", f"{why}: the device is faster")
    return DeadlinePlan("cloud", f"{why}: the cloud is faster")
