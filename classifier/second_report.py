"""What second samples are worth and what they cost, on graded runs that a policy was not fitted on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .agreement import Said
from .aim import Aim
from .metrics import Bools, Floats, auroc
from .outcomes import Outcome
from .policy import Policy
from .second import SecondOpinion, required
from .targets import CascadeRows, simulate
from .text_policy import TextPolicy
from .thresholds import Thresholds

__all__ = ["figures", "updated"]


def figures(policy: Policy | TextPolicy, rows: Sequence[Outcome], quality: float) -> dict[str, float]:
    """How gate 3 ranks `rows`, and what a target of `quality` comes to, without second samples and with them (`again`).

    `taken`: the share of requests for which one is taken, those only where it could turn the decision; `tokens`: how
    much more the device writes for all requests together, over what it wrote, by the lengths of the texts. Raises
    ConfigurationError if the policy knows no second samples, ValueError if an undecided row has none.
    """
    second, aim = required(policy.second), Aim("quality", quality)
    first = CascadeRows(
        before=np.array([policy.before(row.view.prompt) for row in rows]),
        during=np.array([policy.during(row.view) for row in rows]),
        after=np.array([policy.after(row.view) for row in rows]),
        local_score=np.array([row.local_score for row in rows]),
        cloud_score=np.array([row.cloud_score for row in rows]),
    )
    again = replace(first, after=updated(second, first.after, rows))
    gain = first.cloud_score > first.local_score
    undecided = np.array([second.concerns(p_gain) for p_gain in first.after])
    found = {
        "rows": float(len(rows)),
        "undecided": float(undecided.mean()),
        "auroc": auroc(first.after, gain),
        "auroc_again": auroc(again.after, gain),
        "auroc_undecided": auroc(first.after[undecided], gain[undecided]),
        "auroc_undecided_again": auroc(again.after[undecided], gain[undecided]),
    }
    for name, seen, thresholds in (
        ("", first, policy.thresholds_for(aim)),
        ("_again", again, policy.thresholds_for(aim, second_sample=True)),
    ):
        routed = simulate(seen, thresholds)
        found |= {f"quality{name}": routed.quality, f"cloud_share{name}": routed.cloud_share}
    taken = _taken(second, first, policy.thresholds_for(aim, second_sample=True))
    written = np.array([len(row.view.answer) for row in rows], np.float64)
    more = np.array([len(row.second or "") for row in rows], np.float64)
    return found | {"taken": float(taken.mean()), "tokens": float(more[taken].sum() / written.sum())}


def updated(second: SecondOpinion, p_gain: Floats, rows: Sequence[Outcome]) -> Floats:
    """(n,) P(gain) with the second samples of `rows`. Raises ValueError if an undecided one has none."""
    found = p_gain.astype(np.float64)
    for i, row in enumerate(rows):
        if second.concerns(found[i]):
            if row.second is None:
                raise ValueError(f"row {i} is undecided and has no second answer")
            found[i] = second.update(found[i], Said(row.view.answer), Said(row.second))
    return found


def _taken(second: SecondOpinion, rows: CascadeRows, thresholds: Thresholds) -> Bools:
    """(n,) for which a router takes one: they come as far as gate 3, and it could turn what that says."""
    reached = (rows.before <= thresholds.before) & (rows.during <= thresholds.during)
    reach = np.array([second.reach(p_gain) for p_gain in rows.after])
    return reached & (reach[:, 0] <= thresholds.after) & (thresholds.after < reach[:, 1])
