"""The learned decision as it ships and runs: three ONNX graphs, a table of thresholds, and what they were made for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...protocol.errors import ConfigurationError
from ..arrays import Array
from ..calibration.drift import UsualGains
from ..calibration.operating_point import operating_point
from ..calibration.rows import CALIBRATION_NAME, CalibrationRows, unpack_calibration
from ..calibration.threshold_path import Thresholds
from ..calibration.trace_targets import CONFIDENCE, CalibratedTarget
from ..features import vectors as features
from ..features.answer_parts import parts_of
from ..features.gate_inputs import QUESTIONS_AT_ONCE, PromptView, RunView
from ..features.parsed_question import ParsedQuestion
from ..features.token_signals import prompt_signals
from ..features.vectors import FEATURE_VERSION, GATES, FeatureLayout, Gate
from ..target import Target
from .answer_reader import AnswerReader
from .bounded_cache import BoundedCache
from .calibrated_on import CalibratedOn
from .graph_files import CARD_NAME, check_versions, open_graph, read_card, read_checked, sha256

__all__ = ["CARD_NAME", "FORMAT_VERSION", "Policy", "PolicyCard", "TrainedOn", "sha256"]

FORMAT_VERSION = 2


@dataclass(frozen=True, slots=True)
class TrainedOn:
    """The rows behind a policy: how many, how often each tier was right and the cloud gained, when, which seed."""

    rows: int
    kinds: int
    local_score: float
    cloud_score: float
    gain_rate: float
    date: str
    seed: int


@dataclass(frozen=True, slots=True)
class PolicyCard:
    """`policy.json`. `files` maps each gate to the SHA-256 of its graph, and `calibration.npz`, if there is one, to its
    own; `metrics` is flat, dotted names to numbers.
    """

    format_version: int
    feature_version: int
    models: dict[str, str]
    hidden_size: int
    gate2_tokens: int
    trained_on: TrainedOn
    thresholds: list[CalibratedTarget]
    files: dict[str, str]
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    calibrated_on: CalibratedOn = CalibratedOn()  # noqa: RUF009  # frozen


class Policy:
    """P(gain), the chance that the cloud's answer is better, at three moments of a request. Thread-safe, deterministic.

    `models` names the pair it was trained for; whether that is the pair in use is for the caller to check.
    """

    def __init__(self, card: PolicyCard, sessions: dict[Gate, Any], calibration: CalibrationRows | None = None) -> None:
        self.card = card
        self.calibration = calibration
        self.models = card.models
        self.calibrated_on = card.calibrated_on
        self.local_model = None
        self.gate2_tokens = card.gate2_tokens
        self._sessions = sessions
        # Gate 3 asks about a question that gate 1 has read a moment ago.
        self._parsed: BoundedCache[str, ParsedQuestion] = BoundedCache()
        self._answers = AnswerReader(parts_of, QUESTIONS_AT_ONCE)
        # Gate 3 asks about a prompt that gate 2 has seen; its log-probabilities are known by their bytes.
        self._surprise: BoundedCache[bytes, Array] = BoundedCache()

    @classmethod
    def load(cls, folder: Path) -> Policy:
        """Read a policy folder. Raises ConfigurationError if it is missing, damaged, or made by another version."""
        card = _read_card(folder)
        sessions: dict[Gate, Any] = {gate: _open_graph(folder / f"{gate}.onnx", gate, card) for gate in GATES}
        return cls(card, sessions, _read_calibration(folder / CALIBRATION_NAME, card))

    def before(self, prompt: PromptView) -> float:
        """Gate 1: P(gain) from the question alone, in [0, 1]."""
        return self._probability("gate1", features.before(prompt, self._asked(prompt.text)))

    def during(self, view: RunView) -> float:
        """Gate 2: P(gain) from the question and the first `gate2_tokens` tokens (fewer if the answer is shorter)."""
        asked, surprise = self._asked(view.prompt.text), self._surprised(view)
        return self._probability("gate2", features.during(view, self.gate2_tokens, asked, surprise))

    def read_ahead(self, prompt: PromptView) -> None:
        """Do what gate 3 needs of the question, while the local model is busy."""
        asked = self._asked(prompt.text)
        _ = asked.structure, asked.ngrams, asked.mentioned

    def read_lines(self, answer: str) -> None:
        """Do what gate 3 needs of the complete lines of an answer that has come so far."""
        self._answers.read_ahead(answer)

    def after(self, view: RunView) -> float:
        """Gate 3: P(gain) from the whole run."""
        asked, parts = self._asked(view.prompt.text), self._answers.read(view.answer)
        return self._probability("gate3", features.after(view, asked, parts, self._surprised(view)))

    def _surprised(self, view: RunView) -> Array:
        return self._surprise.find(np.asarray(view.prompt_logprobs, np.float32).tobytes(), _surprise)

    def _asked(self, text: str) -> ParsedQuestion:
        return self._parsed.find(text, ParsedQuestion.of)

    @property
    def usual(self) -> UsualGains | None:
        """Gate 1's P(gain) of requests like the calibration's, if it was kept."""
        return None if self.calibration is None else self.calibration.usual

    def thresholds(self, quality: float) -> Thresholds:
        """The thresholds for a quality target: those of the nearest calibrated target that is at least as strict.

        Raises ConfigurationError outside (0, 1] or above the strictest calibrated target.
        """
        if not 0 < quality <= 1:
            raise ConfigurationError(f"quality must be above 0 and at most 1, not {quality}.", param="quality")
        calibrated = self.card.thresholds
        enough = [target for target in calibrated if target.quality >= quality]
        if not enough:
            best = max((target.quality for target in calibrated), default=0.0)
            raise ConfigurationError(
                f"This policy was calibrated up to quality {best}, not {quality}: lower the target or retrain it.",
                param="quality",
            )
        return min(enough, key=lambda target: target.quality).thresholds

    def thresholds_for(self, target: Target) -> Thresholds:
        """The thresholds for any target. A limit on share or cost is kept by the calibration rows, as confidently as a
        quality; a promise on average is theirs too.

        Raises ConfigurationError for a quality that was not calibrated, and for the others if the rows were not kept.
        """
        if target.name == "quality" and target.promise == "confidence":
            return self.thresholds(target.value)
        if self.calibration is None:
            raise ConfigurationError(
                f"This policy keeps no calibration rows, which {target} needs: state a quality with promise = "
                "'confidence', or train it again.",
                param=target.name,
            )
        return operating_point(self.calibration, target, 1.0 - CONFIDENCE).thresholds

    def _probability(self, gate: Gate, vector: Array) -> float:
        session = self._sessions[gate]
        width = FeatureLayout(gate, self.card.hidden_size).width
        if len(vector) != width:
            raise ConfigurationError(
                f"The policy expects hidden states of {self.card.hidden_size} values, the local model gives others: "
                f"it was trained for {self.models.get('local')}. Use a policy trained for this model."
            )
        return float(session.run(None, {"features": vector[None]})[0][0])


def _surprise(logprobs: bytes) -> Array:
    return prompt_signals(np.frombuffer(logprobs, np.float32))


def _read_card(folder: Path) -> PolicyCard:
    raw = read_card(folder)
    known = {"format_version": FORMAT_VERSION, "feature_version": FEATURE_VERSION}
    check_versions(
        folder, raw, known, "retrain it with this version (python -m updraft.classifier.training.train_trace)"
    )
    try:
        return msgspec.convert(raw, PolicyCard)
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f"{folder / CARD_NAME} is not a valid policy ({error}): install or train it again."
        ) from error


def _read_calibration(path: Path, card: PolicyCard) -> CalibrationRows | None:
    expected = card.files.get(CALIBRATION_NAME)
    return None if expected is None else unpack_calibration(path, read_checked(path, expected))


def _open_graph(path: Path, gate: Gate, card: PolicyCard) -> Any:
    session = open_graph(path, card.files.get(gate))
    width = FeatureLayout(gate, card.hidden_size).width
    if session.get_inputs()[0].shape[-1] != width:
        raise ConfigurationError(
            f"{path} takes {session.get_inputs()[0].shape[-1]} features, this version makes {width}: train it again."
        )
    # The first run allocates; it belongs to loading, not to the first request.
    session.run(None, {"features": np.zeros((1, width), np.float32)})
    return session
