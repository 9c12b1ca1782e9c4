"""A second cheap opinion where gate 3 is undecided: the device answers once more, sampled, and the two are compared.

What a small model does not know it tends to say in another way each time (Wang et al., "Self-Consistency", 2023). A
small calibrated model (`again.onnx`, fitted by `second_fit.py`) turns P(gain) of gate 3 and the agreement of the two
answers into one P(gain). It is for the answers whose P(gain) lies within the band on its card, and for no others.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..protocol.errors import ConfigurationError
from ..protocol.requests import Message
from ..protocol.sampling import SamplingParams
from .agreement import Said, agree
from .calibration_rows import no_second_samples
from .graph_files import open_graph
from .targets import Target
from .views import Array

__all__ = [
    "INPUT",
    "SECOND_NAME",
    "TEMPERATURE",
    "SecondCard",
    "SecondOpinion",
    "agreement",
    "required",
    "second_sampling",
]

T = TypeVar("T")
SECOND_NAME = "again.onnx"
INPUT = "answers"
TEMPERATURE = 0.8
_WORD = re.compile(r"\w+")
# A second answer may be a little longer than the first: one that goes on and on says no more by it.
_LONGER, _MORE_TOKENS = 1.25, 8


@dataclass(frozen=True, slots=True)
class SecondCard:
    """What a policy's card says of second samples. `low`, `high`: the P(gain) of gate 3 between which one is taken.

    `temperature`: at which it is sampled. `rows`: calibration rows within the band, on which the update was fitted.
    `thresholds`: those of a policy that has a table of qualities, with second samples.
    """

    low: float
    high: float
    temperature: float
    rows: int
    thresholds: list[Target] = field(default_factory=list[Target])
    metrics: dict[str, float] = field(default_factory=dict[str, float])


def required(second: T | None) -> T:
    """What a policy has of second samples. Raises ConfigurationError if it has nothing."""
    if second is None:
        raise no_second_samples()
    return second


class SecondOpinion:
    """P(gain) with a second answer. `session`: of onnxruntime, over `again.onnx`. Thread-safe, deterministic."""

    def __init__(self, card: SecondCard, session: Any) -> None:
        self.card = card
        self._session = session

    @classmethod
    def load(cls, path: Path, expected: str | None, card: SecondCard | None) -> SecondOpinion | None:
        """None for a policy that knows no second samples. Raises as `open_graph`, and for samples of another kind."""
        if card is None:
            return None
        if card.temperature != TEMPERATURE:
            raise ConfigurationError(
                f"The second samples of {path.parent} were drawn at temperature {card.temperature}, this Updraft draws "
                f"at {TEMPERATURE}: calibrate again with this version."
            )
        return cls(card, open_graph(path, expected))

    def concerns(self, p_gain: float) -> bool:
        """Whether gate 3 is undecided at this P(gain)."""
        return self.card.low <= p_gain <= self.card.high

    def update(self, p_gain: float, first: Said, second: Said) -> float:
        """P(gain), in [0, 1], once the device has answered a second time; unchanged outside the band."""
        if not self.concerns(p_gain):
            return p_gain
        return float(self._run(np.array([[p_gain, *agreement(first, second)]], np.float32))[0])

    def reach(self, p_gain: float) -> tuple[float, float]:
        """The least and the most that `update` can make of this P(gain), whatever the second answer is.

        The score is linear in each measure of agreement, so its extremes are where these are.
        """
        if not self.concerns(p_gain):
            return p_gain, p_gain
        found = self._run(np.array([[p_gain, same, shared] for same in (0, 1) for shared in (0, 1)], np.float32))
        return float(found.min()), float(found.max())

    def _run(self, rows: Array) -> Array:
        return self._session.run(None, {INPUT: rows})[0]


def agreement(first: Said, second: Said) -> tuple[float, float]:
    """How far two answers say the same: 1 or 0 by `agree`, and the share of words they have in common, in [0, 1]."""
    if first.calls or second.calls:
        return 0.0, 0.0
    one, other = ([match[0] for match in _WORD.finditer(said.text.casefold())] for said in (first, second))
    total = len(one) + len(other)
    shared = 2.0 * sum((Counter(one) & Counter(other)).values()) / total if total else 1.0
    return float(agree(first.text, second.text)), shared


def second_sampling(first: SamplingParams, messages: Sequence[Message], tokens: int) -> SamplingParams:
    """How to sample the second answer to `messages`, of which the first took `tokens` with its end of turn, under the
    options `first`.

    The same request gives the same second answer; nothing is truncated, as in the calibration.
    """
    asked = hashlib.blake2b(repr(first.seed).encode(), digest_size=4)
    for message in messages:
        asked.update(message.text.encode("utf-8", "surrogatepass"))
    most = int(_LONGER * tokens) + _MORE_TOKENS
    return replace(
        first,
        temperature=TEMPERATURE,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        typical_p=1.0,
        seed=int.from_bytes(asked.digest()),
        max_tokens=most if first.max_tokens is None else min(most, first.max_tokens),
        min_tokens=min(first.min_tokens, most),
        logprobs=None,
        prompt_logprobs=None,
    )
