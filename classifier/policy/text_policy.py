"""The policy of a pair that is known by graded prompts, as it ships and runs: a card, ONNX graphs, calibration numbers.

`policy.json` is the card, `gate1.onnx` decides by the question, `gate3.onnx` (where the data had the local model's
answers) by question and answer, `gate2.onnx` (where it had token signals too) by question and first tokens;
`calibration.npz` holds each calibration row's P(gain), scores and token counts, no text, so that any target can be
turned into thresholds when it is asked for. The card has them under these names, or under longer ones that end in a
hash, as `policy_files.py` puts them there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from ...model_files.identity import ModelIdentity
from ...protocol.errors import ConfigurationError
from ..calibration.drift import UsualGains
from ..calibration.operating_point import OperatingPoint, operating_point
from ..calibration.rows import CALIBRATION_NAME, CalibrationRows, unpack_calibration
from ..calibration.threshold_path import NEVER, Path, Thresholds
from ..features.gate_inputs import QUESTIONS_AT_ONCE, PromptView, RunView
from ..features.parsed_question import ParsedQuestion
from ..features.text_vectors import OPENING_TOKENS, TEXT_FEATURE_VERSION, Answered, Mode, vector
from ..graded_row import AnswerSignals, GradedRow
from ..target import Target
from .answer_reader import AnswerReader
from .bounded_cache import BoundedCache
from .calibrated_on import CalibratedOn
from .graph_files import CARD_NAME, ML_OPSET, OPSET, check_versions, file_named, open_graph, read_card, read_checked
from .text_gate import Read, TextGate

__all__ = [
    "KIND",
    "TEXT_FORMAT_VERSION",
    "Point",
    "Source",
    "TextPolicy",
    "TextPolicyCard",
]

KIND = "text"
TEXT_FORMAT_VERSION = 3
_FORMER_FORMAT = 2  # knew no gate 2; what it wrote is read
VERSIONS: dict[str, Any] = {
    "format_version": TEXT_FORMAT_VERSION,
    "feature_version": TEXT_FEATURE_VERSION,
    "opset": {"ai.onnx": OPSET, "ai.onnx.ml": ML_OPSET},
}
GATE_FILES: dict[Mode, str] = {"prompt": "gate1.onnx", "opening": "gate2.onnx", "cascade": "gate3.onnx"}
_NO_GATE_2 = 2**31
_REMEDY = "calibrate again with this version (updraft calibrate)"


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
class TextPolicyCard:
    """What `card.json` of a text policy says."""

    kind: Literal["text"]
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
    # Whether gates 2 and 3 read token signals.
    signals: bool
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
    # The local model's file, as it ran; None where only its name is known.
    local_model: ModelIdentity | None = None


class TextPolicy:
    """P(gain) before and, if the data had answers, after generation; during it, if they had token signals. Thread-safe,
    deterministic.

    Without a gate 2 or 3 the question has decided, and `during` and `after` repeat it.
    """

    def __init__(self, card: TextPolicyCard, gates: dict[Mode, TextGate], calibration: CalibrationRows) -> None:
        self.card = card
        self.models = card.models
        self.calibrated_on = card.calibrated_on
        self.local_model = card.local_model
        self.calibration = calibration
        self._gates = gates
        # Gate 3 asks about a question that gate 1 has read a moment ago.
        self._parsed: BoundedCache[str, ParsedQuestion] = BoundedCache()
        self._answers = AnswerReader(Answered.of, QUESTIONS_AT_ONCE)
        self._topics: BoundedCache[str, Read] = BoundedCache()
        self._path = Path.of(calibration)

    @classmethod
    def load(cls, folder: FilePath) -> TextPolicy:
        """Read a policy folder. Raises ConfigurationError if it is missing, damaged, or made by another version."""
        raw = read_card(folder)
        former = {"format_version": _FORMER_FORMAT} if raw.get("format_version") == _FORMER_FORMAT else {}
        check_versions(folder, raw, VERSIONS | former, _REMEDY)
        try:
            card = msgspec.convert(raw, TextPolicyCard)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"{folder / CARD_NAME} is not a valid policy ({error}): {_REMEDY}.") from error
        names = (*GATE_FILES.values(), CALIBRATION_NAME)
        files = {name: file_named(card.files, name) or name for name in names}
        gates: dict[Mode, TextGate] = {
            mode: TextGate(open_graph(folder / files[name], card.files.get(files[name])))
            for mode, name in GATE_FILES.items()
            if mode == "prompt" or files[name] in card.files
        }
        calibration = folder / files[CALIBRATION_NAME]
        data = read_checked(calibration, card.files.get(calibration.name))
        policy = cls(card, gates, unpack_calibration(calibration, data))
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
        return self._early("prompt", GradedRow(prompt.text, 0.0, 0.0))

    def during(self, view: RunView) -> float:
        """Gate 2: P(gain) from the question and the first `gate2_tokens` tokens."""
        if "opening" not in self._gates:
            return self.before(view.prompt)
        return self._early("opening", graded_run(view, signals=True))

    def read_ahead(self, prompt: PromptView) -> None:
        """Do what gate 3 needs of the question, while the local model is busy."""
        if self.reads_answers:
            asked = self._asked(prompt.text)
            _ = asked.mentioned, asked.given
            self._read(prompt.text)

    def read_lines(self, answer: str) -> None:
        """Do what gate 3 needs of the complete lines of an answer that has come so far."""
        if self.reads_answers:
            self._answers.read_ahead(answer)

    def after(self, view: RunView) -> float:
        """Gate 3: P(gain) from question and answer."""
        if not self.reads_answers:
            return self.before(view.prompt)
        row = graded_run(view, signals=self.card.signals)
        measures, _ = vector(row, "cascade", self._asked(row.prompt), self._answers.read(view.answer))
        return self._gates["cascade"].decide(self._read(row.prompt), measures)

    def operating_point(self, target: Target) -> OperatingPoint:
        """What `target` comes to, with the card's confidence or on average."""
        return operating_point(self.calibration, target, self.card.delta, self._path)

    def thresholds_for(self, target: Target) -> Thresholds:
        return self.operating_point(target).thresholds

    def _early(self, mode: Mode, row: GradedRow) -> float:
        gate = self._gates[mode]
        measures, counts = vector(row, mode, self._asked(row.prompt))
        return gate.decide(gate.read(counts), measures)

    def _asked(self, text: str) -> ParsedQuestion:
        return self._parsed.find(text, ParsedQuestion.of)

    def _read(self, text: str) -> Read:
        return self._topics.find(text, lambda text: self._gates["cascade"].read(self._asked(text).counts))

    def _warm_up(self, folder: FilePath) -> None:
        """The first run allocates, and shows whether the graphs take the features that this version makes."""
        nothing = np.zeros(3, np.float32)
        row = GradedRow("What is 2 + 2?", 0.0, 0.0, "", "4", AnswerSignals(nothing, nothing, nothing))
        row = row if self.card.signals else GradedRow(row.prompt, 0.0, 0.0, "", row.answer)
        for mode, gate in self._gates.items():
            measures, counts = vector(row, mode)
            try:
                gate.decide(gate.read(counts), measures)
            except Exception as error:  # onnxruntime raises its own tree of plain Exceptions
                raise ConfigurationError(f"{folder} does not fit this version ({error}): {_REMEDY}.") from error


def graded_run(view: RunView, *, signals: bool) -> GradedRow:
    """A local run as the row of a graded file, without grades."""
    told = AnswerSignals(view.logprobs, view.entropies, view.margins) if signals else None
    return GradedRow(view.prompt.text, 0.0, 0.0, "", view.answer, told)
