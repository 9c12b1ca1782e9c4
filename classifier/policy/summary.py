"""A calibration in words and numbers, for a person: thresholds, the guarantee, the floors that no method beats."""

from __future__ import annotations

from math import ceil
from typing import Any

from ..calibration.operating_point import OperatingPoint, floor_of_risk, rows_needed
from ..target import Target
from .policy import Policy, PolicyCard


def figures(policy: Policy, target: Target) -> dict[str, Any]:
    """The operating point of `target` and the floors, as flat numbers; `floor_*` where a quality promises a risk."""
    point = policy.operating_point(target)
    found: dict[str, Any] = {
        "rows": policy.card.rows,
        "fitted": policy.card.fitted,
        "calibrated": policy.card.calibrated,
        "local_score": policy.card.local_score,
        "cloud_score": policy.card.cloud_score,
        "gain_rate": policy.card.gain_rate,
        "target": str(target),
        "threshold_before": point.thresholds.before,
        "threshold_during": point.thresholds.during,
        "threshold_after": point.thresholds.after,
        "risk": point.risk,
        "quality": point.quality,
        "cloud_share": point.cloud_share,
        "escalated_score": point.escalated_score,
        "before_share": point.before_share,
        "cost_per_1000": None if target.prices is None else point.cost,
        **policy.card.metrics,
    }
    if target.name != "cost" and target.promise == "confidence":
        found["delta"] = point.delta
    if point.alpha is not None:
        found |= {"alpha": point.alpha, "floor_cloud_share": floor_of_risk(policy.card.gain_rate, point.alpha)}
    return found


def sentences(policy: Policy, target: Target) -> list[str]:
    """The same in words."""
    card, point = policy.card, policy.operating_point(target)
    lines = [
        f"{card.rows} prompts, graded by {card.grading}. {card.fitted} fitted the gates; thresholds come from "
        f"{card.calibrated} that the gates never saw.",
        f"Local {card.local_score:.1%}, cloud {card.cloud_score:.1%}; only the cloud is right on {card.gain_rate:.1%}.",
        f"Target {target}: {point.cloud_share:.1%} go to the cloud ({point.before_share:.1%} before generation), "
        f"{point.quality:.1%} of the cloud's score, {_cost(target, point)}"
        + (", by estimated token counts." if card.estimated_tokens else "."),
        *_escalated(policy, point),
        _promise(target, point),
    ]
    for metric, other in (("judge.matching", "shared words"), ("judge.matching_embedding", "embeddings")):
        if (matching := card.metrics.get(metric)) is not None:
            told = f"Without the judge {other} would grade: they say the same on {matching:.0%} of its prompts."
            lines.insert(1, told)
    rows = policy.calibration
    if rows.evidence < len(rows.local):
        lines.insert(1, f"Some ask the same: {len(rows.local)} rows count as {rows.evidence} in what is promised.")
    if point.alpha is not None:
        floor = floor_of_risk(card.gain_rate, point.alpha)
        lines.append(f"Floor: to lose at most {point.alpha:.2%} of all requests any method must send up {floor:.1%}.")
        lines += _bolder(policy, point)
    return lines


def _escalated(policy: Policy, point: OperatingPoint) -> list[str]:
    """The cloud's score on harder requests, which is less than a user expects of it."""
    if point.escalated_score is None or point.cloud_share == 1:
        return []
    solo = float(policy.calibration.cloud.mean())
    return [f"The cloud scores {point.escalated_score:.1%} on those that go to it, and {solo:.1%} on all."]


def _bolder(policy: Policy, point: OperatingPoint) -> list[str]:
    """The further rows that bolder thresholds take."""
    card, known = policy.card, policy.calibration.evidence
    needed = rows_needed(policy.calibration, point.target, card.delta)
    if needed is None:
        return []
    lines: list[str] = []
    if point.cloud_share == 1:
        lines.append("Nothing less than all could be shown safe: calibrate with more prompts, or lower the target.")
    if known < needed.at_least:
        lines.append(
            f"To keep anything local takes at least {needed.at_least} held-out rows without a loss: there are {known}. "
            f"That is about {_prompts(card, needed.at_least - known)} more graded prompts."
        )
    if needed.rows > max(known, needed.at_least) and needed.local > 1 - point.cloud_share:
        lines.append(
            f"To keep {needed.local:.0%} local, of which {needed.lost:.2%} of all requests were lost, takes "
            f"{needed.rows} held-out rows: about {_prompts(card, needed.rows - known)} more graded prompts."
        )
    return lines


def _prompts(card: PolicyCard, held_out: int) -> int:
    """The number of graded prompts that bring so many held-out ones."""
    return ceil(held_out * card.rows / max(1, card.calibrated))


def _cost(target: Target, point: OperatingPoint) -> str:
    if target.prices is None:
        return "at a cost that nobody knows without prices"
    return f"{point.cost:.4f} US dollars per 1,000 requests"


def _promise(target: Target, point: OperatingPoint) -> str:
    if target.name == "cost":
        return (
            f"Expected, on requests like these: at most {target.value:g} US dollars per 1,000 requests. "
            "That is no promise, as rare long answers may be missing in the rows: for a limit that holds set a budget."
        )
    if target.promise == "mean":
        sure = "On average over calibrations, of which this is one, on requests like these"
    else:
        sure = f"With {1 - point.delta:.0%} confidence, on requests like these"
    if point.alpha is not None:
        return (
            f"{sure}: at most {point.alpha:.2%} stay local although only the cloud is right (observed "
            f"{point.risk:.2%}), so at least {target.value:.1%} of the cloud's score is kept."
        )
    return f"{sure}: at most {target.value:.1%} go to the cloud."
