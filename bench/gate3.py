"""How well gate 3 judges local answers: every question is answered on the device and scored by the policy.

In a routed run gate 3 sees only what gates 1 and 2 let through; here it judges all of them, beside the best signal
that needs no training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..classifier.grading.questions import Question
from ..protocol.requests import Message
from ..protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from ..classifier.features.gate_inputs import RunView
    from ..classifier.policy.trace_policy import Policy
    from ..local_engine.engine import LocalEngine

ROWS_PER_BIN = 50


@dataclass(frozen=True, slots=True)
class Judgement:
    """Gate 3's P(gain) for one local answer, and the run that it judged."""

    right: bool
    p_gain: float
    view: RunView


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
    """AUROC for "local is wrong" and for gain, calibration error of P(gain), and AUROC of each untrained token signal.

    The calibration error is over 15 bins, fewer where they would hold less than 50 rows and so mostly chance.
    `cloud_right[i]` says whether the cloud alone got the question of `judged[i]` right. None where undefined, as
    with no wrong answer among them.
    """
    from ..classifier.evaluation.metrics import ECE_BINS, auroc, ece
    from ..classifier.training.leave_one_out import SINGLE_SIGNALS

    p_gain = np.array([judgement.p_gain for judgement in judged])
    wrong = np.array([not judgement.right for judgement in judged], dtype=np.bool_)
    gain = wrong & np.array(cloud_right, dtype=np.bool_)
    untrained = {
        name: _number(auroc(np.array([signal(judgement.view) for judgement in judged]), wrong))
        for name, signal in SINGLE_SIGNALS.items()
    }
    known = {name: value for name, value in untrained.items() if value is not None}
    return {
        "n": len(judged),
        "auroc": _number(auroc(p_gain, wrong)),
        "auroc_gain": _number(auroc(p_gain, gain)),
        "ece": _number(ece(p_gain, gain, bins=min(ECE_BINS, max(1, len(judged) // ROWS_PER_BIN)))),
        "token_signals": untrained,
        "best_token_signal": max(known, key=known.__getitem__) if known else None,
    }


def _judge_one(engine: LocalEngine, policy: Policy, question: Question) -> Judgement:
    from ..classifier.features.gate_inputs import RunView

    messages = [Message("user", question.prompt)]
    run = engine.start(messages, SamplingParams(temperature=0.0))
    try:
        for _token in run:
            pass
        view = RunView.of(messages, run, run.signals)
        return Judgement(question.grade(run.text), policy.after(view), view)
    finally:
        run.close()


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
