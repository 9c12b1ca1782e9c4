"""The calibrated policy of a model pair: a card, ONNX graphs and calibration rows.

`policy.json` is the card. `topics.onnx` reads the question; `gate1.onnx` decides from the question alone, `gate2.onnx`
also from the first tokens, `gate3.onnx` from question and answer. The card declares the feature blocks of each gate,
which depend on the graded rows. `calibration.npz` holds P(gain), scores and token counts of each calibration row, but
no text, so that thresholds for any target can be computed. File names contain part of the file's hash (`files.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ...model_files.identity import ModelIdentity
from ...protocol.decoding import prepare_types
from ...protocol.errors import ConfigurationError
from ...protocol.validation_messages import plain_words
from ..arrays import Floats
from ..calibration.operating_point import OperatingPoint, operating_point
from ..calibration.rows import CALIBRATION_NAME, CalibrationRows, unpack_calibration
from ..calibration.threshold_path import ThresholdPath, Thresholds
from ..features.blocks import FEATURE_VERSION, BlockName, Mode
from ..target import Target
from .calibration_scope import CalibrationScope
from .exported_gates import ExportedGates, Graphs
from .files import settled
from .graph_files import CARD_NAME, ML_OPSET, OPSET, check_versions, file_named, open_graph, read_card, read_checked

FORMAT_VERSION = 4
VERSIONS: dict[str, Any] = {
    "format_version": FORMAT_VERSION,
    "feature_version": FEATURE_VERSION,
    "opset": {"ai.onnx": OPSET, "ai.onnx.ml": ML_OPSET},
}
TOPICS_FILE = "topics.onnx"
GATE_FILES: dict[Mode, str] = {"prompt": "gate1.onnx", "opening": "gate2.onnx", "cascade": "gate3.onnx"}
Text = Annotated[str, msgspec.Meta(max_length=1000)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_REMEDY = "calibrate again with this version (updraft calibrate)"


@dataclass(frozen=True, slots=True)
class Source:
    """A file that the policy was fitted to."""

    name: Text
    # SHA-256 of the file.
    sha256: Text
    # Number of rows read from the file.
    rows: Count


@dataclass(frozen=True, slots=True)
class PolicyCard:
    """The contents of `policy.json`."""

    format_version: int
    feature_version: int
    opset: dict[str, int]
    # Models of the pair, by tier.
    models: dict[str, Text]
    data: list[Source]
    # Description of how the answers were scored.
    grading: Text
    date: Text
    rows: Count
    local_score: float
    cloud_score: float
    gain_rate: float
    # Blocks that each gate reads, in order, with their widths.
    blocks: dict[Mode, dict[BlockName, int]]
    # Blocks that no gate reads, because the rows did not have them.
    missing: list[BlockName]
    # Whether the token counts were estimated from characters.
    estimated_tokens: bool
    # Level of the promise: the share of repeated calibrations whose thresholds keep the target.
    promise_level: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    # SHA-256 of each file in the policy folder, by name.
    files: dict[str, str]
    # Number of rows that the gates were fitted on, and number of rows that thresholds are computed from.
    fitted: Count = 0
    calibrated: Count = 0
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    # Kinds of requests among the rows.
    calibrated_on: CalibrationScope = CalibrationScope()  # noqa: RUF009  # frozen
    # Identity of the local model's file; None if only the model's name is known.
    local_model: ModelIdentity | None = None

    @property
    def delta(self) -> float:
        """Return the highest probability that a target is missed."""
        return round(1 - self.promise_level, 12)


prepare_types(PolicyCard)


class Policy(ExportedGates):
    """The gates of a pair, with thresholds for any target.

    `models` names the pair that the policy was made for; callers check that it is the pair in use.
    """

    def __init__(self, card: PolicyCard, graphs: Graphs, calibration: CalibrationRows) -> None:
        super().__init__(graphs, card.blocks)
        self.card = card
        self.models = card.models
        self.calibrated_on = card.calibrated_on
        self.local_model = card.local_model
        self.calibration = calibration
        self._path = ThresholdPath.of(calibration)

    @classmethod
    def load(cls, folder: Path) -> Policy:
        """Read a policy folder; retry if another policy is written meanwhile.

        Raises ConfigurationError if the policy is missing, damaged, or made by another version.
        """
        return settled(folder, cls._load)

    @classmethod
    def _load(cls, folder: Path) -> Policy:
        card = valid_card(folder)
        graphs = Graphs(
            open_graph(*_stored(folder, card, TOPICS_FILE)),
            {mode: open_graph(*_stored(folder, card, GATE_FILES[mode])) for mode in card.blocks},
        )
        policy = cls(card, graphs, _calibration(folder, card))
        try:
            policy.warm_up()
        except Exception as error:  # onnxruntime's exceptions share no base class but Exception
            raise ConfigurationError(f"{folder} does not fit this version ({error}): {_REMEDY}.") from error
        return policy

    @property
    def typical_p_gain(self) -> Floats:
        """Gate 1's P(gain) on the calibration rows, (n,), to compare with later requests."""
        return self.calibration.before

    def operating_point(self, target: Target) -> OperatingPoint:
        """Return the thresholds that keep `target`, with the card's `promise_level` or on average."""
        return operating_point(self.calibration, target, self.card.delta, self._path)

    def thresholds_for(self, target: Target) -> Thresholds:
        return self.operating_point(target).thresholds


def valid_card(folder: Path) -> PolicyCard:
    """Return the card of a policy. Raises ConfigurationError if it is missing, damaged, or made by another version."""
    raw = read_card(folder)
    check_versions(folder, raw, VERSIONS, _REMEDY)
    if isinstance(delta := raw.pop("delta", None), int | float):  # older cards store delta, not `promise_level`
        raw.setdefault("promise_level", 1 - delta)
    try:
        return msgspec.convert(raw, PolicyCard)
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f"{folder / CARD_NAME} is not a valid policy ({plain_words(error)}): {_REMEDY}."
        ) from error


def checked_card(folder: Path) -> PolicyCard:
    """Return the card after checking the policy's files against it, without running them. Raises like `Policy.load`."""
    return settled(folder, _checked_card)


def _checked_card(folder: Path) -> PolicyCard:
    card = valid_card(folder)
    for name in (TOPICS_FILE, *(GATE_FILES[mode] for mode in card.blocks)):
        read_checked(*_stored(folder, card, name))
    _calibration(folder, card)
    return card


def _stored(folder: Path, card: PolicyCard, name: str) -> tuple[Path, str | None]:
    """Return the path of a stored file and the SHA-256 that the card names."""
    stored = file_named(card.files, name) or name
    return folder / stored, card.files.get(stored)


def _calibration(folder: Path, card: PolicyCard) -> CalibrationRows:
    path, digest = _stored(folder, card, CALIBRATION_NAME)
    rows = unpack_calibration(path, read_checked(path, digest))
    _check_whole(folder / CARD_NAME, card, rows)
    return rows


def _check_whole(path: Path, card: PolicyCard, rows: CalibrationRows) -> None:
    """Raise ConfigurationError unless the card names both models, and exactly the gates with P(gain) in `rows`."""
    if not card.models.keys() >= {"local", "cloud"}:
        raise ConfigurationError(f"{path} is not a valid policy (it does not name a pair of models): {_REMEDY}.")
    judged = {"prompt": rows.before, "opening": rows.during, "cascade": rows.after}
    if card.blocks.keys() != {mode for mode, p_gain in judged.items() if p_gain is not None}:
        raise ConfigurationError(f"{path} does not declare the gates that judged its calibration rows: {_REMEDY}.")
