"""Human-readable summary of a calibration: thresholds, guarantee, and the lowest cloud share that any router needs."""

from __future__ import annotations

from math import ceil
from typing import Any

from ..calibration.operating_point import OperatingPoint, least_cloud_share, rows_needed
from ..target import Target
from .policy import Policy, PolicyCard


def figures(policy: Policy, target: Target) -> dict[str, Any]:
    """Return the operating point of `target` as named numbers; `alpha` and `floor_cloud_share` only for quality."""
    point = policy.operating_point(target)
    numbers: dict[str, Any] = {
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
    if target.name != "cost" and target.promise != "mean":
        numbers |= {"promise_level": policy.card.promise_level, "delta": point.delta}  # `delta`: former name
    if point.alpha is not None:
        numbers |= {"alpha": point.alpha, "floor_cloud_share": least_cloud_share(policy.card.gain_rate, point.alpha)}
    return numbers


def sentences(policy: Policy, target: Target) -> list[str]:
    card, point = policy.card, policy.operating_point(target)
    lines = [
        f"{card.rows} prompts, graded by {card.grading}. {card.fitted} trained the gates; the thresholds come from "
        f"{card.calibrated} others.",
        f"Local {card.local_score:.1%}, cloud {card.cloud_score:.1%}; only the cloud is right on {card.gain_rate:.1%}.",
        f"Target {target}: {point.cloud_share:.1%} go to the cloud ({point.before_share:.1%} before generation), "
        f"{point.quality:.1%} of the cloud's score, {_cost(target, point)}"
        + (", with estimated token counts." if card.estimated_tokens else "."),
    ]
    if point.escalated_score is not None and point.cloud_share != 1:  # escalated requests are harder than average
        solo = float(policy.calibration.cloud.mean())
        lines.append(f"The cloud scores {point.escalated_score:.1%} on escalated requests and {solo:.1%} on all.")
    lines.append(_promise(target, point))
    for metric, other in (("judge.matching", "shared words"), ("judge.matching_embedding", "embeddings")):
        if (matching := card.metrics.get(metric)) is not None:
            lines.insert(1, f"Grading by {other} gives the judge's verdict on {matching:.0%} of the judged prompts.")
    rows = policy.calibration
    if rows.evidence < len(rows.local):
        lines.insert(1, f"Some prompts repeat: {len(rows.local)} rows count as {rows.evidence} in the promise.")
    if point.alpha is not None:
        least = least_cloud_share(card.gain_rate, point.alpha)
        lines.append(f"Every method that leaves only {point.alpha:.2%} wrongly local escalates at least {least:.1%}.")
    if target.name == "quality":
        lines += _rows_for_more_local(policy, point)
    return lines


def _rows_for_more_local(policy: Policy, point: OperatingPoint) -> list[str]:
    """Report how many more rows are needed to keep more requests local."""
    card, evidence = policy.card, policy.calibration.evidence
    needed = rows_needed(policy.calibration, point.target, card.delta)
    if needed is None:
        return []
    lines: list[str] = []
    if point.cloud_share == 1:
        lines.append("No threshold provably keeps the target, so all escalate: add prompts, or lower the target.")
    if evidence < needed.at_least:
        lines.append(
            f"Keeping any request local takes {needed.at_least} held-out rows without a loss, and there are "
            f"{evidence}. That is about {_prompts(card, needed.at_least - evidence)} more graded prompts."
        )
    if needed.rows > max(evidence, needed.at_least) and needed.local > 1 - point.cloud_share:
        lines.append(
            f"Keeping {needed.local:.0%} local, including {needed.lost:.2%} on which only the cloud is right, takes "
            f"{needed.rows} held-out rows: about {_prompts(card, needed.rows - evidence)} more graded prompts."
        )
    return lines


def _prompts(card: PolicyCard, held_out: int) -> int:
    """Return the number of graded prompts that yield `held_out` calibration rows."""
    return ceil(held_out * card.rows / max(1, card.calibrated))


def _cost(target: Target, point: OperatingPoint) -> str:
    if target.prices is None:
        return "cost unknown (no prices configured)"
    return f"{point.cost:.4f} US dollars per 1,000 requests"


def _promise(target: Target, point: OperatingPoint) -> str:
    if target.name == "cost":
        return (
            f"Expected, on requests like these: at most {target.value:g} US dollars per 1,000 requests. "
            "This is not a promise: the rows may lack rare long answers. For a firm limit, set a budget."
        )
    if target.promise == "mean":
        sure = "On average over repeated calibrations, on requests like these"
    else:
        sure = f"At a promise level of {1 - point.delta:.0%}, on requests like these"
    if point.alpha is not None:
        return (
            f"{sure}: at most {point.alpha:.2%} stay local although only the cloud is right (observed "
            f"{point.risk:.2%}), so at least {target.value:.1%} of the cloud's score is kept."
        )
    if target.name == "quality":
        return (
            f"{sure}: routed answers score on average at least {target.value:.1%} of the cloud's score "
            f"(observed {point.quality:.1%})."
        )
    return f"{sure}: at most {target.value:.1%} go to the cloud."
