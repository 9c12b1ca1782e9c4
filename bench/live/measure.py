"""Calibrates a real local model and a stub cloud on half of the questions, routes the other half, and checks quality.

The local model answers each question once; every seed splits the same answers into two different halves. The
real router routes, and sends escalated questions over HTTP to a stub cloud that knows the answers.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...classifier.evaluation.metrics import auroc
from ...classifier.evaluation.single_signals import MEAN_LOGPROB, single_signal
from ...classifier.features.blocks import view_of
from ...classifier.graded_row import GradedRow, scores
from ...classifier.grading.grader import BY_ANSWER
from ...classifier.grading.questions import Question
from ...classifier.policy.policy import Policy, Source
from ...classifier.target import Target
from ...classifier.training.train import FitRecipe, fit_policy
from ...embedded.held_out import is_wrong, policy_probabilities
from ...local_engine.sampling.signals import TokenSignals
from ...protocol.http.wire import WireRequest
from ...router.config import RouterConfig
from ...router.factory import open_cloud
from ...router.gates.gates import PolicyGates
from ...router.router import Router
from ...router.state import Tiers
from ...router.tiers.interfaces import LocalTier
from ...router.tiers.local import EngineLocalTier
from ..shared.recorded_tier import RecordedAnswer, RecordedTier

if TYPE_CHECKING:
    from ...local_engine.engine import LocalEngine

QUALITIES = (0.95, 0.9, 0.8, 0.7)
_IN_TWO = 0.5
_ENGINE_QUALITY = 0.8


@dataclass(frozen=True, slots=True)
class RecordedPair:
    """A model pair with recorded answers. `rows`: in the order of `questions`."""

    config: RouterConfig
    model_id: str
    questions: Sequence[Question]
    rows: Sequence[GradedRow]


@dataclass(frozen=True, slots=True)
class HalfFigures:
    """Figures of one split into halves: how well the gates rank answers, and routing at each quality target."""

    # AUROC by name of the gate or signal.
    auroc: dict[str, float]
    # By quality target: the share answered locally, and the routed score over the cloud's score.
    local_share: dict[str, float]
    kept: dict[str, float]


def measure(pair: RecordedPair, seeds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return figures over all seeds, with and without the local model's hidden states."""
    rows, started = pair.rows, time.perf_counter()
    weak, strong = scores(rows)
    results: dict[str, Any] = {"questions": len(rows), "local_score": weak.mean(), "cloud_score": strong.mean()}
    variants = {"without_hidden": [replace(row, states=None) for row in rows], "with_hidden": list(rows)}
    for name, variant in variants.items():
        halves: list[HalfFigures] = []
        for seed in range(seeds):
            say(f"{name.replace('_', ' ')}, seed {seed}: fitting on half, routing the other half ...")
            halves.append(half := _half(pair, variant, seed))
            gate3, alone = half.auroc["gate3"], half.auroc[MEAN_LOGPROB]
            say(f"  AUROC of gate 3 {gate3:.3f}, of mean log-probability {alone:.3f}")
        results[name] = _summary(halves)
    return results | {"seconds": time.perf_counter() - started}


def measure_engine(pair: RecordedPair, engine: LocalEngine) -> dict[str, float]:
    """Route the second half of the questions through the running model instead of replaying its recorded answers.

    The policy is fitted on the first half and uses hidden states. Closes the engine.
    """
    fitting, held_out = divided(len(pair.rows), 0)
    with tempfile.TemporaryDirectory(prefix="updraft-live-") as folder:
        policy = fitted(pair, [pair.rows[i] for i in fitting], Path(folder) / "policy")
    started, questions = time.perf_counter(), [pair.questions[i] for i in held_out]
    routes = asyncio.run(routed(pair, policy, EngineLocalTier(engine), questions, (_ENGINE_QUALITY,)))
    ((share, score),) = routes.values()
    cloud = float(np.mean([pair.rows[i].strong for i in held_out]))
    seconds = time.perf_counter() - started
    return {"quality": _ENGINE_QUALITY, "local_share": share, "kept": score / cloud, "seconds": seconds}


def divided(rows: int, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the indices to calibrate on and the indices to route."""
    order = np.random.default_rng(seed).permutation(rows)
    return order[: round(_IN_TWO * rows)], order[round(_IN_TWO * rows) :]


def fitted(pair: RecordedPair, rows: Sequence[GradedRow], folder: Path) -> Policy:
    """Fit a policy as `updraft calibrate --live` does from the same rows."""
    models = {"local": pair.model_id, "cloud": pair.config.cloud_model}
    return fit_policy(rows, FitRecipe(models, [Source("written questions", "", len(rows))], BY_ANSWER), folder)


def _half(pair: RecordedPair, rows: Sequence[GradedRow], seed: int) -> HalfFigures:
    fitting, held_out = divided(len(rows), seed)
    with tempfile.TemporaryDirectory(prefix="updraft-live-") as folder:
        policy = fitted(pair, [rows[i] for i in fitting], Path(folder) / "policy")
    test_rows = [rows[i] for i in held_out]
    judged, wrong = policy_probabilities(policy, test_rows), is_wrong(test_rows)
    assert judged.before is not None and judged.after is not None
    tier = RecordedTier(pair.model_id, {row.prompt: _recorded(row) for row in pair.rows})
    outcomes = asyncio.run(routed(pair, policy, tier, [pair.questions[i] for i in held_out]))
    alone = single_signal(MEAN_LOGPROB, [view_of(row) for row in test_rows])
    detectors = {"gate1": judged.before, "gate3": judged.after, MEAN_LOGPROB: alone}
    return HalfFigures(
        {name: auroc(scored, wrong) for name, scored in detectors.items()},
        {name: share for name, (share, _) in outcomes.items()},
        {name: score / float(scores(test_rows)[1].mean()) for name, (_, score) in outcomes.items()},
    )


def _recorded(row: GradedRow) -> RecordedAnswer:
    assert row.signals is not None and row.states is not None
    signals = zip(row.signals.logprobs, row.signals.entropies, row.signals.margins, strict=True)
    return RecordedAnswer(
        row.answer or "",
        [TokenSignals(*map(float, values)) for values in signals],
        len(row.prompt) // 4,
        "length" if row.states.finish_reason == "length" else "stop",
        row.states.prompt_hidden,
        row.states.answer_hidden,
    )


async def routed(
    pair: RecordedPair,
    policy: Policy,
    local: LocalTier,
    questions: Sequence[Question],
    qualities: Sequence[float] = QUALITIES,
) -> dict[str, tuple[float, float]]:
    """Return, by quality, the share of questions answered locally and the share of right answers."""
    gates = PolicyGates(policy, Target("quality", QUALITIES[0]))
    router = Router(pair.config, Tiers(local, open_cloud(pair.config), gates))
    await router.start()
    try:
        return {f"quality_{quality:g}": await _asked(router, questions, quality) for quality in qualities}
    finally:
        await router.close()


async def _asked(router: Router, questions: Sequence[Question], quality: float) -> tuple[float, float]:
    kept = right = 0
    for question in questions:
        body = {"model": "auto", "messages": [{"role": "user", "content": question.prompt}]}
        request = msgspec.json.encode(body | {"updraft": {"quality": quality}})
        response = await router.chat(WireRequest("POST", "/v1/chat/completions", body=request))
        assert isinstance(response.body, bytes)
        answer = msgspec.json.decode(response.body)
        if response.status != 200:
            raise RuntimeError(f"{question.prompt!r} got {response.status}: {answer}")
        kept += answer["updraft"]["tier"] == "local"
        right += question.grade(answer["choices"][0]["message"]["content"])
    return kept / len(questions), right / len(questions)


def _summary(halves: Sequence[HalfFigures]) -> dict[str, Any]:
    """Average over the seeds. `kept_least`: quality of the worst seed; `broken`: share of seeds below the target."""
    aurocs = {name: [half.auroc[name] for half in halves] for name in halves[0].auroc}
    spread = {name: {"mean": np.mean(all_), "least": min(all_), "most": max(all_)} for name, all_ in aurocs.items()}
    summary: dict[str, Any] = {"auroc": spread}
    for quality in QUALITIES:
        name = f"quality_{quality:g}"
        shares, kept = [half.local_share[name] for half in halves], [half.kept[name] for half in halves]
        summary[name] = {
            "local_share": float(np.mean(shares)),
            "kept": float(np.mean(kept)),
            "kept_least": min(kept),
            "broken": float(np.mean([share < quality for share in kept])),
        }
    return summary
