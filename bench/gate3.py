"""How well gate 3 judges local answers: every question is answered on the device and scored by the policy.

In a routed run gate 3 sees only what gates 1 and 2 let through; here it judges all of them, beside the best signal
that needs no training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..protocol.requests import Message
from ..protocol.sampling import SamplingParams
from .questions import Question

if TYPE_CHECKING:
    from ..classifier.policy import Policy
    from ..local_engine.engine import LocalEngine, LocalRun


@dataclass(frozen=True, slots=True)
class Judgement:
    """Gate 3's P(gain) for one local answer, and what token confidence alone would say (higher: more doubtful)."""

    question: Question
    right: bool
    p_gain: float
    signals: dict[str, float]


def judge(
    engine: LocalEngine, policy: Policy, questions: Sequence[Question], on_done: Callable[[], None] = lambda: None
) -> list[Judgement]:
    """Answer each question on the device, one at a time, and score the answer."""
    judged: list[Judgement] = []
    for question in questions:
        judged.append(_judge_one(engine, policy, question))
        on_done()
    return judged


def gate3_figures(judged: Sequence[Judgement], cloud_right: Sequence[bool]) -> dict[str, Any]:
    """AUROC for "local is wrong" and for gain, calibration error of P(gain), and the best untrained signal.

    `cloud_right[i]` says whether the cloud alone got the question of `judged[i]` right. None where undefined.
    """
    from ..classifier.metrics import auroc, ece

    if not judged:
        return {"n": 0, "auroc": None, "auroc_gain": None, "ece": None, "token_confidence": {}}
    p_gain = np.array([judgement.p_gain for judgement in judged])
    wrong = np.array([not judgement.right for judgement in judged])
    gain = wrong & np.array(cloud_right, dtype=bool)
    names = judged[0].signals
    untrained = {name: auroc(np.array([judgement.signals[name] for judgement in judged]), wrong) for name in names}
    return {
        "n": len(judged),
        "auroc": _number(auroc(p_gain, wrong)),
        "auroc_gain": _number(auroc(p_gain, gain)),
        "ece": _number(ece(p_gain, gain)),
        "token_confidence": {name: _number(value) for name, value in untrained.items()},
    }


def _judge_one(engine: LocalEngine, policy: Policy, question: Question) -> Judgement:
    from ..classifier.features import PromptView

    messages = [Message("user", question.prompt)]
    run = engine.start(messages, SamplingParams())
    try:
        for _token in run:
            pass
        view = _view(run, PromptView.of(messages))
        return Judgement(question, question.grade(run.text), policy.after(view), _doubt(view.logprobs, view.margins))
    finally:
        run.close()


def _view(run: LocalRun, prompt: Any) -> Any:
    from ..classifier.features import RunView

    signals = np.array([(s.logprob, s.entropy, s.margin) for s in run.signals], dtype=np.float32).reshape(-1, 3)
    return RunView(
        prompt=prompt,
        answer=run.text,
        logprobs=signals[:, 0],
        entropies=signals[:, 1],
        margins=signals[:, 2],
        prompt_logprobs=run.prompt_logprobs,
        prompt_hidden=run.prompt_hidden,
        answer_hidden=run.answer_hidden,
        finish_reason=run.finish_reason or "stop",
    )


def _doubt(logprobs: np.ndarray, margins: np.ndarray) -> dict[str, float]:
    return {
        "mean_logprob": -float(logprobs.mean()),
        "min_logprob": -float(logprobs.min()),
        "min_margin": -float(margins.min()),
    }


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
