"""Decisions on requests that nobody answers, and the cost and quality to expect."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from ..accounting.reported_usage import ReportedUsage
from ..accounting.token_estimate import answer_size, prompt_tokens
from .cascade.cascade import Cascade, State
from .config import RouterConfig
from .gates.exploration import ExplorationGates
from .gates.gates import PolicyGates


class RouteForecast(msgspec.Struct, kw_only=True):
    """Decision on a request without an answer."""

    # `local`, `cloud`, or `judged`: the gates would judge the local answer.
    tier: Literal["local", "cloud", "judged"]
    reason: str
    # Id of the request's task; empty without learning.
    task: str
    # P(gain) before generation; None: not computed.
    p_gain: float | None
    # Probability that the cloud answers. For `judged`, it is the calibrated share. None: unknown.
    cloud_chance: float | None
    # Estimated cost of the cloud's answer in US dollars. None: no price is set, or nothing bounds the answer's length.
    cloud_usd: float | None
    # `cloud_chance` times `cloud_usd`; None if one of them is unknown.
    expected_usd: float | None
    # Share of the cloud's score that the policy kept on its calibration rows; None if no policy decides.
    expected_quality: float | None


async def forecast(cascade: Cascade, config: RouterConfig, body: bytes) -> RouteForecast:
    """Decide on the request of an unobserved `cascade` without an answer. `body` is the JSON of the request.

    The length of the cloud's answer is the mean of the policy's rows, or the limit of the request.
    Raises UpdraftError if no tier can answer.
    """
    state = await cascade.decide_only(generates=False)
    record, calibrated = cascade.record, _calibrated(cascade) if cascade.ruling.open else None
    is_judged = state is State.LOCAL and cascade.ruling.open
    size = answer_size(cascade.job.body, "chat/completions")
    point, written = None, size.limit
    if calibrated is not None:
        policy, target = calibrated.policy, calibrated.target_of(cascade.job.quality)
        point = await asyncio.to_thread(policy.operating_point, target)
        mean = round(float(policy.calibration.written.mean()))
        written = mean if written is None else min(mean, written)
    chance: float | None = float(state is State.CLOUD)
    if is_judged:  # the share of the calibration rows that escalate after gate 1
        chance = None if point is None else (point.cloud_share - point.before_share) / max(1e-9, 1 - point.before_share)
    usd = None
    if written is not None:
        usage = ReportedUsage(prompt_tokens=prompt_tokens(body), completion_tokens=written * size.answers)
        usd = config.prices.cloud(config.cloud_model, usage)
    decisions = [each.p_gain for each in record.decisions if each.p_gain is not None]
    return RouteForecast(
        tier="judged" if is_judged else "cloud" if state is State.CLOUD else "local",
        reason=record.reason,
        task=record.task,
        p_gain=decisions[-1] if decisions else None,
        cloud_chance=chance,
        cloud_usd=usd,
        expected_usd=None if usd is None or chance is None else chance * usd,
        expected_quality=None if point is None else point.quality,
    )


def _calibrated(cascade: Cascade) -> PolicyGates | None:
    """Return the calibrated gates that decide on the request; None if others decide."""
    gates = cascade.tiers.gates
    decides = cascade.job.requested_tier == "auto" and cascade.job.confidence is None and not cascade.follows_task
    return gates.calibrated if decides and isinstance(gates, ExplorationGates) else None
