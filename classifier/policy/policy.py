"""A pair's calibrated policy as it ships and runs: a card, ONNX graphs, calibration numbers.

`policy.json` is the card. `topics.onnx` reads the question, `gate1.onnx` decides by it, `gate2.onnx` also by the first
tokens, `gate3.onnx` by question and answer. Which blocks of features each gate reads is declared in the card: it
depends on what the rows had. `calibration.npz` holds each calibration row's P(gain), scores and token counts, no text,
so that any target can be turned into thresholds when it is asked for. The files carry a part of their hash in their
names (`files.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Annotated, Any

import msgspec
import numpy as np

from ...protocol.errors import ConfigurationError
from ..arrays import Array
from ..calibration.drift import UsualGains
from ..calibration.operating_point import OperatingPoint, operating_point
from ..calibration.rows import CALIBRATION_NAME, CalibrationRows, unpack_calibration
from ..calibration.threshold_path import NEVER, Path, Thresholds
from ..features.blocks import BLOCKS, FEATURE_VERSION, OPENING_TOKENS, Answered, BlockName, Mode, ReadRun
from ..features.gate_inputs import QUESTIONS_AT_ONCE, PromptView, RunView
from ..features.parsed_question import ParsedQuestion
from ..target import Target
from .answer_reader import AnswerReader
from .bounded_cache import BoundedCache
from .calibrated_on import CalibratedOn
from .exported_gate import ExportedGate, ExportedTopics
from .files import settled
from .graph_files import CARD_NAME, ML_OPSET, OPSET, check_versions, file_named, open_graph, read_card, read_checked

__all__ = ["FORMAT_VERSION", "GATE_FILES", "TOPICS_FILE", "VERSIONS", "Point", "Policy", "PolicyCard", "Source"]

FORMAT_VERSION = 4
VERSIONS: dict[str, Any] = {
    "format_version": FORMAT_VERSION,
    "feature_version": FEATURE_VERSION,
    "opset": {"ai.onnx": OPSET, "ai.onnx.ml": ML_OPSET},
}
TOPICS_FILE = "topics.onnx"
GATE_FILES: dict[Mode, str] = {"prompt": "gate1.onnx", "opening": "gate2.onnx", "cascade": "gate3.onnx"}
_NO_GATE_2 = 2**31
_REMEDY = "calibrate again with this version (updraft calibrate)"
_EMPTY = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Source:
    """A file the policy learned from: its name, the SHA-256 of its bytes, and how many rows were read from it."""

    name: str
    sha256: str
    rows: int


@dataclass(frozen=True, slots=True)
class Point:
    """What a target came to on the calibration rows, for people; the router computes its own from `calibration.npz`."""

    target: str
    before: float
    after: float
    alpha: float | None
    risk: float
    quality: float
    cloud_share: float
    during: float = NEVER


@dataclass(frozen=True, slots=True)
class PolicyCard:
    """What `policy.json` says."""

    format_version: int
    feature_version: int
    opset: dict[str, int]
    # The pair, by tier.
    models: dict[str, str]
    data: list[Source]
    # What the scores are.
    grading: str
    date: str
    rows: int
    local_score: float
    cloud_score: float
    gain_rate: float
    # The blocks that each gate reads, in order, with their widths.
    blocks: dict[Mode, dict[BlockName, int]]
    # Blocks that no gate reads, as the rows did not have them.
    missing: list[BlockName]
    # Whether the token counts were estimated from characters.
    estimated_tokens: bool
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    # At confidence 1 - `delta`, or "on average" over calibrations where they say so.
    points: list[Point]
    # SHA-256 of each file.
    files: dict[str, str]
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    # What kinds of requests the rows were.
    calibrated_on: CalibratedOn = CalibratedOn()  # noqa: RUF009  # frozen


class Policy:
    """P(gain), the chance that the cloud's answer is better, at three moments of a request.

    Without a gate 2 or 3 the question has decided, and `during` and `after` repeat it. Thread-safe, deterministic.
    `models` names the pair it was made for; whether that is the pair in use is for the caller to check.
    """

    def __init__(
        self, card: PolicyCard, topics: ExportedTopics, gates: Mapping[Mode, ExportedGate], calibration: CalibrationRows
    ) -> None:
        self.card = card
        self.models = card.models
        self.calibrated_on = card.calibrated_on
        self.calibration = calibration
        self._topics_graph = topics
        self._gates = gates
        # Gate 3 asks about a question that gate 1 has read a moment ago.
        self._parsed: BoundedCache[str, ParsedQuestion] = BoundedCache()
        self._answers = AnswerReader(Answered.of, QUESTIONS_AT_ONCE)
        self._topics: BoundedCache[str, Array] = BoundedCache()
        self._path = Path.of(calibration)

    @classmethod
    def load(cls, folder: FilePath) -> Policy:
        """Read a policy folder, again if another policy is put there meanwhile.

        Raises ConfigurationError if it is missing, damaged, or made by another version.
        """
        return settled(folder, cls._load)

    @classmethod
    def _load(cls, folder: FilePath) -> Policy:
        raw = read_card(folder)
        check_versions(folder, raw, VERSIONS, _REMEDY)
        try:
            card = msgspec.convert(raw, PolicyCard)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"{folder / CARD_NAME} is not a valid policy ({error}): {_REMEDY}.") from error

        def path_of(name: str) -> tuple[FilePath, str | None]:
            stored = file_named(card.files, name) or name
            return folder / stored, card.files.get(stored)

        topics = ExportedTopics(open_graph(*path_of(TOPICS_FILE)))
        gates = {mode: ExportedGate(open_graph(*path_of(GATE_FILES[mode]))) for mode in card.blocks}
        stored, digest = path_of(CALIBRATION_NAME)
        policy = cls(card, topics, gates, unpack_calibration(stored, read_checked(stored, digest)))
        policy._warm_up(folder)
        return policy

    @property
    def usual(self) -> UsualGains:
        """Gate 1's P(gain) of requests like the calibration's."""
        return self.calibration.usual

    @property
    def gate2_tokens(self) -> int:
        """How many tokens gate 2 waits for; without one more than any answer has."""
        return OPENING_TOKENS if "opening" in self._gates else _NO_GATE_2

    @property
    def reads_answers(self) -> bool:
        return "cascade" in self._gates

    def before(self, prompt: PromptView) -> float:
        """Gate 1: P(gain) from the question alone, in [0, 1]."""
        nothing = RunView(prompt, "", _EMPTY, _EMPTY, _EMPTY, _EMPTY, _EMPTY, None, "")
        return self._decide("prompt", ReadRun(nothing, self._asked(prompt.text)))

    def during(self, view: RunView) -> float:
        """Gate 2: P(gain) from the question and the first `gate2_tokens` tokens."""
        if "opening" not in self._gates:
            return self.before(view.prompt)
        return self._decide("opening", ReadRun(view, self._asked(view.prompt.text)))

    def read_ahead(self, prompt: PromptView) -> None:
        """Do what gate 3 needs of the question, while the local model is busy."""
        if self.reads_answers:
            asked = self._asked(prompt.text)
            _ = asked.mentioned, asked.given
            self._topics_of(asked, prompt.text)

    def read_lines(self, answer: str) -> None:
        """Do what gate 3 needs of the complete lines of an answer that has come so far."""
        if self.reads_answers:
            self._answers.read_ahead(answer)

    def after(self, view: RunView) -> float:
        """Gate 3: P(gain) from question and answer."""
        if not self.reads_answers:
            return self.before(view.prompt)
        return self._decide("cascade", ReadRun(view, self._asked(view.prompt.text), self._answers.read(view.answer)))

    def operating_point(self, target: Target) -> OperatingPoint:
        """What `target` comes to, with the card's confidence or on average."""
        return operating_point(self.calibration, target, self.card.delta, self._path)

    def thresholds_for(self, target: Target) -> Thresholds:
        return self.operating_point(target).thresholds

    def _decide(self, mode: Mode, run: ReadRun) -> float:
        declared = self.card.blocks[mode]
        blocks = {name: BLOCKS[name].compute(run) for name in declared}
        other = [name for name, block in blocks.items() if len(block) != declared[name]]
        if other:
            raise ConfigurationError(
                f"The policy reads {declared[other[0]]} values of {other[0]}, the local model gives "
                f"{len(blocks[other[0]])}: it was made for {self.models.get('local')}. Use a policy made for this model."
            )
        topics = self._topics_of(run.asked, run.view.prompt.text)
        return self._gates[mode].decide(topics, np.concatenate(list(blocks.values())))

    def _asked(self, text: str) -> ParsedQuestion:
        return self._parsed.find(text, ParsedQuestion.of)

    def _topics_of(self, asked: ParsedQuestion, text: str) -> Array:
        return self._topics.find(text, lambda _: self._topics_graph.read(asked.counts))

    def _warm_up(self, folder: FilePath) -> None:
        """The first run allocates, and shows whether the graphs take the features that this version makes."""
        asked = ParsedQuestion.of("What is 2 + 2?")
        try:
            topics = self._topics_graph.read(asked.counts)
            for mode, declared in self.card.blocks.items():
                made = {name: BLOCKS[name].width or width for name, width in declared.items()}
                self._gates[mode].decide(topics, np.zeros(sum(made.values()), np.float32))
        except Exception as error:  # onnxruntime raises its own tree of plain Exceptions
            raise ConfigurationError(f"{folder} does not fit this version ({error}): {_REMEDY}.") from error
