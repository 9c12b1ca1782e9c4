"""The learned decision as it ships and runs: three ONNX graphs, a table of thresholds, and what they were made for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..protocol.errors import ConfigurationError
from . import features
from .features import FEATURE_VERSION, GATES, Gate, Layout
from .optional import load_module
from .thresholds import Target, Thresholds
from .views import Array, PromptView, RunView

__all__ = ["FORMAT_VERSION", "Policy", "PolicyCard", "TrainedOn"]

FORMAT_VERSION = 2
CARD_NAME = "policy.json"


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
    """`policy.json`. `files` maps each gate to the SHA-256 of its graph; `metrics` is flat, dotted names to numbers."""

    format_version: int
    feature_version: int
    models: dict[str, str]
    hidden_size: int
    gate2_tokens: int
    trained_on: TrainedOn
    thresholds: list[Target]
    files: dict[str, str]
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class Policy:
    """P(gain), the chance that the cloud's answer is better, at three moments of a request. Thread-safe, deterministic.

    `models` names the pair it was trained for; whether that is the pair in use is for the caller to check.
    """

    def __init__(self, card: PolicyCard, sessions: dict[Gate, Any]) -> None:
        self.card = card
        self.models = card.models
        self.gate2_tokens = card.gate2_tokens
        self._sessions = sessions

    @classmethod
    def load(cls, folder: Path) -> Policy:
        """Read a policy folder. Raises ConfigurationError if it is missing, damaged, or made by another version."""
        card = _read_card(folder / CARD_NAME)
        return cls(card, {gate: _open_graph(folder / f"{gate}.onnx", gate, card) for gate in GATES})

    def before(self, prompt: PromptView) -> float:
        """Gate 1: P(gain) from the question alone, in [0, 1]."""
        return self._probability("gate1", features.before(prompt))

    def during(self, view: RunView) -> float:
        """Gate 2: P(gain) from the question and the first `gate2_tokens` tokens (fewer if the answer is shorter)."""
        return self._probability("gate2", features.during(view, self.gate2_tokens))

    def after(self, view: RunView) -> float:
        """Gate 3: P(gain) from the whole run."""
        return self._probability("gate3", features.after(view))

    def thresholds(self, quality: float) -> Thresholds:
        """The thresholds for a quality target: those of the nearest calibrated target that is at least as strict.

        Raises ConfigurationError outside (0, 1] or above the strictest calibrated target.
        """
        if not 0 < quality <= 1:
            raise ConfigurationError(f"quality must be above 0 and at most 1, not {quality}.", param="quality")
        enough = [target for target in self.card.thresholds if target.quality >= quality]
        if not enough:
            best = max((target.quality for target in self.card.thresholds), default=0.0)
            raise ConfigurationError(
                f"This policy was calibrated up to quality {best}, not {quality}: lower the target or retrain it.",
                param="quality",
            )
        return min(enough, key=lambda target: target.quality).thresholds

    def _probability(self, gate: Gate, vector: Array) -> float:
        session = self._sessions[gate]
        width = Layout(gate, self.card.hidden_size).width
        if len(vector) != width:
            raise ConfigurationError(
                f"The policy expects hidden states of {self.card.hidden_size} values, the local model gives others: "
                f"it was trained for {self.models.get('local')}. Use a policy trained for this model."
            )
        return float(session.run(None, {"features": vector[None]})[0][0])


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_card(path: Path) -> PolicyCard:
    try:
        raw = path.read_bytes()
        versions = msgspec.json.decode(raw, type=dict[str, Any])
    except FileNotFoundError as error:
        raise ConfigurationError(f"There is no policy at {path.parent}: {path.name} is missing.") from error
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read as a policy ({error}): install or train it again.") from error
    for name, known in (("format_version", FORMAT_VERSION), ("feature_version", FEATURE_VERSION)):
        if versions.get(name) != known:
            raise ConfigurationError(
                f"The policy at {path.parent} has {name} {versions.get(name)}, this Updraft reads {known}: "
                "retrain it with this version (python -m updraft.classifier.train) or install the matching one."
            )
    try:
        return msgspec.json.decode(raw, type=PolicyCard)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{path} is not a valid policy ({error}): install or train it again.") from error


def _open_graph(path: Path, gate: Gate, card: PolicyCard) -> Any:
    onnxruntime = load_module("onnxruntime", "edge")
    try:
        graph = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"The policy at {path.parent} lacks {path.name}: install or train it again."
        ) from error
    if sha256(graph) != card.files.get(gate):
        raise ConfigurationError(
            f"{path} is not the file its {CARD_NAME} describes (damaged or replaced): install or train it again."
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    try:
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own tree of plain Exceptions
        raise ConfigurationError(f"{path} cannot be run by onnxruntime ({error}): train the policy again.") from error
    width = Layout(gate, card.hidden_size).width
    if session.get_inputs()[0].shape[-1] != width:
        raise ConfigurationError(
            f"{path} takes {session.get_inputs()[0].shape[-1]} features, this version makes {width}: train it again."
        )
    # The first run allocates; it belongs to loading, not to the first request.
    session.run(None, {"features": np.zeros((1, width), np.float32)})
    return session
