"""The second sample: the device answers once more where gate 3 is undecided, and the answers are compared.

It never is the answer, nor the draft of one. What it costs is time and the tokens that it writes, as its prompt lies in
the device's cache; both are in the ledger.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...classifier.aim import Aim
from ...protocol.errors import UpdraftError
from ...protocol.requests import Message
from ..gates.gates import CalibratedPolicy, PolicyGates, Verdict, run_view
from ..tiers.interfaces import LocalAnswer
from .escalation import work_of

if TYPE_CHECKING:
    from ...classifier.agreement import Said
    from ...classifier.thresholds import Thresholds
    from .cascade import Cascade

__all__ = ["SecondSampleGates", "sample_again", "sample_fits"]


class SecondSampleGates(PolicyGates):
    """The gates of a policy that knows second samples, with thresholds for a router that takes them.

    Gate 3 asks for one only where it could turn the decision. Without it, such a request goes the way that breaks no
    target: up for a quality, and nowhere for a limit on share or cost. So whatever keeps samples from being taken, the
    promise holds. Raises ConfigurationError for a policy that knows none.
    """

    def __init__(self, policy: CalibratedPolicy, aim: Aim, caveat: str = "") -> None:
        from ...classifier.second import required

        super().__init__(policy, aim, caveat)
        self._second = required(policy.second)

    def after(
        self, messages: Sequence[Message], answer: LocalAnswer, quality: float | None, second: Said | None = None
    ) -> Verdict:
        p_gain = float(self._policy.after(run_view(messages, answer, answer.signals)))
        threshold, promised = self._at(quality).after, self._promised(quality)
        if second is not None:
            return self._with(second, p_gain, answer, threshold, promised)
        least, most = self._second.reach(p_gain)
        if least <= threshold < most:
            up = self._aim_of(quality).name == "quality"
            reason = (
                f"{self._caveat}P(gain) {p_gain:.3f} after generation{promised}, undecided at {threshold:.3f}: "
                f"{'goes up' if up else 'stays'} unless a second sample says otherwise"
            )
            return Verdict(3, up, reason, p_gain, threshold, undecided=True)
        if least == most:
            return self._against(3, f"after generation{promised}", p_gain, threshold)
        # What the update makes of it counts, not what it was before.
        settled = self._against(3, f"after generation{promised}, whatever a second sample says", most, threshold)
        return replace(settled, p_gain=p_gain)

    def _with(self, second: Said, p_gain: float, answer: LocalAnswer, threshold: float, promised: str) -> Verdict:
        from ...classifier.agreement import Said
        from ...classifier.second import agreement

        first = Said(answer.text)
        says = "agrees" if agreement(first, second)[0] else "disagrees"
        moment = f"after a second sample that {says}{promised}"
        return self._against(3, moment, self._second.update(p_gain, first, second), threshold)

    def _thresholds_for(self, aim: Aim) -> Thresholds:
        return self._policy.thresholds_for(aim, second_sample=True)


def sample_fits(cascade: Cascade, answer: LocalAnswer) -> bool:
    """Whether the device may answer once more: `answer` calls no tools, and the deadline leaves time for it."""
    from ..feedback.comparable_answer import device_said

    if cascade.tools is not None and device_said(answer, cascade.tools).calls:
        return False
    fits = _time_s(cascade) >= cascade.record.local_s
    cascade.record.momentary |= not fits
    return fits


async def sample_again(cascade: Cascade, answer: LocalAnswer) -> Said | None:
    """What the device says the second time; None if it came to no end: it failed, time ran out, or a race was lost."""
    from ...classifier.second import second_sampling
    from ..feedback.comparable_answer import device_said

    chat, left_s, began = cascade.chat, _time_s(cascade), time.monotonic()
    params = second_sampling(chat.sampling(), chat.messages, len(answer.signals))
    try:
        async with asyncio.timeout(None if math.isinf(left_s) else left_s):
            run = await cascade.begin_local(params)
            try:
                while await cascade.escalation.beside_race(anext(run, None)) is not None:
                    pass
            finally:
                cascade.record.count_second(run.answer, time.monotonic() - began)
                await run.aclose()
    except TimeoutError:
        cascade.record.momentary = True
        return None
    except UpdraftError:
        return None
    return None if run.answer.finish_reason is None else device_said(run.answer, cascade.tools)


def _time_s(cascade: Cascade) -> float:
    """What the deadline leaves for it, if the cloud is to have its usual time afterwards; infinite without one."""
    remaining, cloud_s = cascade.job.remaining_s, cascade.shared.pace.expected_s(work_of(cascade.job.body))
    return remaining / 2 if cloud_s is None else remaining - cloud_s
