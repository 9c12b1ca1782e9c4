"""Fitting of a policy from graded rows: fit the gates, export and check them, and write the policy folder.

Every P(gain) in the calibration rows comes from the shipped gates, which were fitted on other rows (decision 059).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...model_files.identity import ModelIdentity
from ..arrays import Floats
from ..calibration.operating_point import PROMISE_LEVEL
from ..calibration.rows import CALIBRATION_NAME, CalibrationRows, pack_calibration
from ..evaluation import cost_quality as curve
from ..evaluation.metrics import auroc, ece
from ..features.blocks import BLOCKS, Mode, blocks_of_all, prompt_of
from ..features.feature_rows import FeatureRows, has_opening, read_rows
from ..features.parsed_question import repeated_question
from ..graded_row import GradedRow, scores
from ..optional_imports import load_onnxruntime
from ..policy.calibration_scope import CalibrationScope
from ..policy.exported_gates import Graphs
from ..policy.files import policy_folder, put_policy, stored_name
from ..policy.graph_files import sha256
from ..policy.policy import GATE_FILES, TOPICS_FILE, VERSIONS, Policy, PolicyCard, Source
from .export import gate_to_onnx, topics_to_onnx
from .gates import FittedGates, TrainingData, fit_gates
from .router_model import Labels, RouterModel

_CHARS_PER_TOKEN = 4.0
_ANSWER_TOKENS = 256.0
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class FitRecipe:
    """Seed of the fit, and card entries that the rows do not determine. The same seed and rows give the same files."""

    models: dict[str, str]
    data: list[Source]
    grading: str
    date: str = ""
    # Level of the promise: the share of repeated calibrations whose thresholds keep the target.
    promise_level: float = PROMISE_LEVEL
    seed: int = 0
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    calibrated_on: CalibrationScope = CalibrationScope()  # noqa: RUF009  # frozen
    # Identity of the local model's file, copied into the card.
    local_model: ModelIdentity | None = None


def fit_policy(rows: Sequence[GradedRow], recipe: FitRecipe, out: Path) -> Policy:
    """Fit on `rows`, write the folder `out`, and return the policy loaded from there.

    Raises InvalidRequestError as `fit_router` does, or if `out` is not a folder or cannot be written.
    """
    recipe = replace(recipe, calibrated_on=CalibrationScope.of(rows))
    return fit_training_data(training_data_of(rows), recipe, policy_folder(out))


def training_data_of(rows: Sequence[GradedRow]) -> TrainingData:
    """Convert rows to training data for the gates, with the blocks common to all rows.

    Gate 3 needs answers. Gate 2 also needs token signals, and enough answers longer than the opening that it reads.
    """
    blocks = blocks_of_all(rows)
    features = read_rows(rows, blocks)
    has: dict[Mode, bool] = {"prompt": True, "opening": "opening" in blocks, "cascade": "checks" in blocks}
    return TrainingData(
        features={mode: features.of_gate(mode) for mode, there in has.items() if there},
        labels=Labels.of(*scores(rows), _group_numbers([repeated_question(prompt_of(row)) for row in rows])),
        tokens=estimated_tokens(rows),
        opened=np.array([has_opening(row) for row in rows]) if has["opening"] else None,
    )


def _group_numbers(questions: Sequence[str]) -> NDArray[np.intp]:
    """Return a number for each text, (n,), equal for equal texts. Numpy would pad an array of texts to the longest."""
    numbers = {question: number for number, question in enumerate(sorted(set(questions)))}
    return np.array([numbers[question] for question in questions])


def fit_training_data(material: TrainingData, recipe: FitRecipe, out: Path) -> Policy:
    """Fit a policy on features from any source. Raises InvalidRequestError, like `fit_router`."""
    return write_policy(fit_gates(material, recipe.seed), material, recipe, policy_folder(out))


def write_policy(fitted: FittedGates, material: TrainingData, recipe: FitRecipe, folder: Path) -> Policy:
    """Write fitted gates into `folder`, and load the policy from there."""
    calibration, labels = fitted.calibration, material.labels
    features: dict[Mode, FeatureRows] = {mode: material.features[mode] for mode in fitted.routers}
    contents = _exported(fitted.routers, features) | {CALIBRATION_NAME: pack_calibration(calibration)}
    files = {stored_name(name, data): data for name, data in contents.items()}
    card = PolicyCard(
        **VERSIONS,
        models=recipe.models,
        data=recipe.data,
        grading=recipe.grading,
        date=recipe.date,
        # Rows of weight 0 are not counted: they repeat another row, with the grades used for the promise.
        rows=int(np.count_nonzero(labels.weight)),
        fitted=int(np.count_nonzero(labels.weight[fitted.fitting])),
        calibrated=len(calibration.local),
        local_score=float(labels.weak[labels.representative_rows].mean()),
        cloud_score=float(labels.strong[labels.representative_rows].mean()),
        gain_rate=float(labels.strong_wins[labels.representative_rows].mean()),
        blocks={mode: rows.widths for mode, rows in features.items()},
        missing=[name for name in BLOCKS if not any(name in rows.blocks for rows in features.values())],
        estimated_tokens=material.tokens[2],
        promise_level=recipe.promise_level,
        files={name: sha256(data) for name, data in files.items()},
        metrics=_metrics(calibration) | recipe.metrics,
        calibrated_on=recipe.calibrated_on,
        local_model=recipe.local_model,
    )
    put_policy(folder, files, msgspec.json.format(msgspec.json.encode(card), indent=2) + b"\n")
    return Policy.load(folder)


def estimated_tokens(rows: Sequence[GradedRow]) -> tuple[Floats, Floats, bool]:
    """Return the tokens that the cloud reads and writes for each row, (n,) each, and whether any are estimates.

    Estimates assume four characters per token and a cloud's answer as long as the local answer (or 256 tokens).
    """
    read = [row.cloud_read if row.cloud_read is not None else len(row.prompt) / _CHARS_PER_TOKEN for row in rows]
    likely = [_ANSWER_TOKENS if row.answer is None else len(row.answer) / _CHARS_PER_TOKEN for row in rows]
    written = [n if row.cloud_written is None else row.cloud_written for row, n in zip(rows, likely, strict=True)]
    guessed = any(row.cloud_read is None or row.cloud_written is None for row in rows)
    return np.array(read, np.float64), np.array(written, np.float64), guessed


def _exported(routers: Mapping[Mode, RouterModel], features: Mapping[Mode, FeatureRows]) -> dict[str, bytes]:
    """Export the graphs, and check them against the Python models on every row. Raises RuntimeError if they differ."""
    contents = {TOPICS_FILE: topics_to_onnx(routers["prompt"].topics)}  # shared by all gates
    contents |= {
        GATE_FILES[mode]: gate_to_onnx(router, sum(features[mode].widths.values())) for mode, router in routers.items()
    }
    graphs = Graphs(_session(contents[TOPICS_FILE]), {mode: _session(contents[GATE_FILES[mode]]) for mode in routers})
    read = [graphs.read(counts.toarray().ravel()) for counts in features["prompt"].counts]
    for mode, router in routers.items():
        exported = [graphs.decide(mode, *row) for row in zip(read, features[mode].measures, strict=True)]
        gap = float(np.abs(np.array(exported) - router.probability(features[mode])).max())
        if gap > _TOLERANCE:
            raise RuntimeError(f"the exported {GATE_FILES[mode]} differs from its Python model by {gap:.1e}")
    return contents


def _session(graph: bytes) -> Any:
    return load_onnxruntime().InferenceSession(graph, providers=["CPUExecutionProvider"])


def _metrics(rows: CalibrationRows) -> dict[str, float]:
    """Return ranking and calibration error of each gate on the held-out rows."""
    metrics: dict[str, float] = {}
    for gate, p_gain in (("gate1", rows.before), ("gate2", rows.during), ("gate3", rows.after)):
        if p_gain is not None:
            routed = curve.cost_quality(p_gain, rows.local, rows.cloud)
            metrics |= {
                f"{gate}.apgr": routed.apgr,
                f"{gate}.cpt50": routed.cpt(0.5),
                f"{gate}.cpt80": routed.cpt(0.8),
                f"{gate}.auroc": auroc(p_gain, rows.gain),
                f"{gate}.ece": ece(p_gain, rows.gain),
            }
    return metrics
