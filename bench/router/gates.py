"""The packaged gates on held-out tasks: ranking, calibration, promises, stability under noise, and decision time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...classifier.arrays import Floats
from ...classifier.evaluation.metrics import auroc, ece, ece_by_chance
from ...classifier.evaluation.single_signals import SINGLE_SIGNALS, single_signal
from ...classifier.features.blocks import view_of
from ...classifier.features.gate_inputs import PromptView
from ...classifier.graded_row import GradedRow
from ...classifier.policy.policy import Policy
from ...classifier.target import COUNTED, Target
from ...embedded import pocket
from ...embedded.collect import collect
from ...embedded.held_out import is_wrong, policy_probabilities
from ...embedded.tasks import make_tasks
from .coverage import ALPHAS, half_splits
from .coverage import promised as rule_of
from .measure import split_figures
from .robustness import busy_processes, long_prompts, timed, unchanged_by_noise

_QUALITIES = (0.9, 0.95, 0.98)
_NOISY = 500
_SPLIT = 2_000  # number of rows to split in halves
_LINE = 4  # characters per piece of a streamed answer


def measure(tasks: int, draws: int, beside: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return figures over `draws` times `tasks` unseen tasks. `beside`: number of busy processes while timing."""
    policy = Policy.load(pocket.policy_folder())
    rows: list[GradedRow] = []
    for seed in range(draws):
        say(f"Draw {seed + 1} of {draws}: both models answer {tasks} tasks ...")
        questions = make_tasks("test", tasks, seed=seed)
        rows += collect(questions, pocket.pocket_small_gguf(), pocket.pocket_large_folder())
    with busy_processes(beside):
        decisions = {"gate1": timed(_gate1(policy, rows)), "gate3": timed(_gate3(policy, rows))}
    return {
        **_judged(policy, rows),
        "unchanged": _unchanged_share(policy, [outcome.prompt for outcome in rows[:_NOISY]]),
        "decision_ms": decisions,
    }


def _judged(policy: Policy, outcomes: Sequence[GradedRow]) -> dict[str, Any]:
    wrong, judged = is_wrong(outcomes), policy_probabilities(policy, outcomes)
    gain, p_gains = judged.gain, {"gate1": judged.before, "gate2": judged.during, "gate3": judged.after}
    figures: dict[str, Any] = {
        gate: {"auroc_wrong": auroc(p_gain, wrong), "ece": ece(p_gain, gain), "ece_by_chance": ece_by_chance(p_gain)}
        for gate, p_gain in p_gains.items()
        if p_gain is not None
    }
    views = [view_of(outcome) for outcome in outcomes]
    promised: dict[str, float] = {}
    for promise in COUNTED:
        for alpha in ALPHAS:
            of = f"{alpha:g}" if promise == "no-loss" else f"{promise}_{alpha:g}"
            halves = half_splits(judged.judged[:_SPLIT], gain[:_SPLIT], alpha, rule_of(alpha, promise))
            promised |= split_figures(halves, of)
    best = max(auroc(single_signal(name, views), wrong) for name in SINGLE_SIGNALS)
    return {"tasks": len(outcomes), **figures, "best_single_signal": best, **promised}


def _unchanged_share(policy: Policy, prompts: Sequence[str]) -> dict[str, float]:
    """Return the share of gate 1's decisions that each noise in the prompt leaves unchanged, over several targets."""
    thresholds = [policy.thresholds_for(Target("quality", quality)).before for quality in _QUALITIES]

    def judged(noisy: Sequence[str]) -> Floats:
        return np.array([policy.before(PromptView(prompt)) for prompt in noisy])

    return unchanged_by_noise(judged, prompts, thresholds)


def _gate1(policy: Policy, outcomes: Sequence[GradedRow]) -> Callable[[int], Callable[[], object]]:
    prompts = long_prompts([outcome.prompt for outcome in outcomes[:400]])
    return lambda i: lambda: policy.before(PromptView(f"{i} {prompts[i % len(prompts)]}"))  # a new `i` misses caches


def _gate3(policy: Policy, outcomes: Sequence[GradedRow]) -> Callable[[int], Callable[[], object]]:
    """Prepare gate 3 as in a request: the question and the complete lines are parsed, and gate 2 has run."""

    def prepared(i: int) -> Callable[[], object]:
        view = view_of(outcomes[i % len(outcomes)])
        policy.read_ahead(view.prompt)
        policy.during(view)
        for end in range(_LINE, len(view.answer), _LINE):
            policy.read_lines(view.answer[:end])
        return lambda: policy.after(view)

    return prepared
