"""From graded prompts to a policy folder: both gates fitted, exported, checked, and the calibration rows beside them.

Every P(gain) in the calibration rows is by members that did not see the row. The gates that ship were fitted on all
rows, so the promise is about a router a little worse than the one that ships (decision 029).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...model_files.identity import ModelIdentity
from ..arrays import Bools, Floats
from ..calibration.drift import distance
from ..calibration.operating_point import DELTA, operating_point
from ..calibration.rows import CALIBRATION_NAME, CalibrationRows, pack_calibration
from ..evaluation import cost_quality as curve
from ..evaluation.metrics import auroc, ece
from ..features.parsed_question import repeated_question
from ..features.text_vectors import Mode, TextRows, featurise, has_opening
from ..graded_row import GradedRow, scores
from ..optional import load_module, load_onnxruntime
from ..policy.calibrated_on import CalibratedOn
from ..policy.files import policy_folder, put_policy, settled, stored_name
from ..policy.graph_files import sha256
from ..policy.text_gate import TextGate
from ..policy.text_policy import GATE_FILES, KIND, VERSIONS, Point, Source, TextPolicy, TextPolicyCard
from ..target import PROMISES, Target
from .export_text import router_to_onnx
from .text_router import MIN_LABELS, SHIPPED, Labels, TextRouter, fit_router, unseen

__all__ = ["FitRecipe", "Material", "check_installed", "estimated_tokens", "fit_material", "fit_text_policy"]

_TARGETS = (0.9, 0.95, 0.97, 0.98, 0.99)
_CHARS_PER_TOKEN = 4.0
_ANSWER_TOKENS = 256.0
_TOLERANCE = 1e-5
_OFTEN_OPENED = 0.1


@dataclass(frozen=True, slots=True)
class FitRecipe:
    """What the card will say that the rows do not; `seed`: the same seed and rows give the same files.

    `candidates`: what cross-validation chooses among.
    """

    models: dict[str, str]
    data: list[Source]
    grading: str
    date: str = ""
    delta: float = DELTA
    seed: int = 0
    candidates: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: SHIPPED)
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    calibrated_on: CalibratedOn = CalibratedOn()  # noqa: RUF009  # frozen
    # As in the card.
    local_model: ModelIdentity | None = None


@dataclass(frozen=True, slots=True)
class Material:
    """Features of each gate with their labels. `tokens`: read, written, (n,) each, and whether they are estimates.
    `opened`: (n,) which answers gate 2 is asked about: not about those that have ended by then. Without it, or where
    they are fewer than a hundred or a tenth, there is no gate 2.
    """

    features: dict[Mode, TextRows]
    labels: Labels
    signals: bool
    tokens: tuple[Floats, Floats, bool]
    opened: Bools | None = None


def check_installed() -> None:
    """Raises MissingDependencyError if what fitting takes is missing: to be asked before rows are paid for."""
    for name in ("scipy.sparse", "sklearn.ensemble", "onnx"):
        load_module(name, "train")
    load_onnxruntime()


def fit_text_policy(rows: Sequence[GradedRow], recipe: FitRecipe, out: Path) -> TextPolicy:
    """Fit on `rows`, write the folder `out`, and return the policy as loaded from there.

    There is a gate 3 if every row has an answer; if every row has token signals too, it reads them, and there is a gate
    2 for answers that go on behind their opening, if these are many. Second samples are known if every row has a
    second answer too, and enough of them are undecided.

    Raises InvalidRequestError as `fit_router` does, and if `out` is no folder or cannot be written.
    """
    answers = all(row.answer is not None for row in rows)
    signals = answers and all(row.signals is not None for row in rows)
    modes: tuple[Mode, ...] = ("prompt", *(("opening",) if signals else ()), *(("cascade",) if answers else ()))
    out = policy_folder(out)
    rows = [row if signals else replace(row, signals=None) for row in rows]
    return fit_material(
        Material(
            features={mode: featurise(rows, mode) for mode in modes},
            labels=Labels(*scores(rows), same=np.array([repeated_question(row.prompt) for row in rows])),
            signals=signals,
            tokens=estimated_tokens(rows),
            opened=np.array([has_opening(row) for row in rows]) if signals else None,
        ),
        replace(recipe, calibrated_on=CalibratedOn.of([row.prompt for row in rows], [row.turns for row in rows])),
        out,
    )


def fit_material(material: Material, recipe: FitRecipe, out: Path) -> TextPolicy:
    """The same from features, wherever they come from. Raises InvalidRequestError as `fit_router` does."""
    folder = policy_folder(out)
    features, labels, (read, written, guessed) = material.features, material.labels, material.tokens
    if not _is_asked(material.opened):
        features = features.copy()
        features.pop("opening", None)
    routers: dict[Mode, TextRouter] = {
        mode: fit_router(rows, labels, seed=recipe.seed, candidates=recipe.candidates)
        for mode, rows in features.items()
    }
    even = labels.even
    asked = unseen(routers["prompt"], features["prompt"], labels, recipe.seed)[even]
    calibration = CalibrationRows(
        before=routers["prompt"].crossed[even],
        after=routers["cascade"].crossed[even] if "cascade" in routers else None,
        during=_gate2_sees(routers["opening"].crossed, material.opened)[even] if "opening" in routers else None,
        local=labels.weak[even],
        cloud=labels.strong[even],
        read=read[even],
        written=written[even],
        prompts=labels.evidence,
        asked=asked,
        gap=distance(asked, routers["prompt"].probability(features["prompt"])[even]),
    )
    made = {GATE_FILES[mode]: _exported(router, features[mode], mode) for mode, router in routers.items()}
    made[CALIBRATION_NAME] = pack_calibration(calibration)
    files = {stored_name(name, data): data for name, data in made.items()}
    card = TextPolicyCard(
        kind=KIND,
        **VERSIONS,
        models=recipe.models,
        data=recipe.data,
        grading=recipe.grading,
        date=recipe.date,
        # A row of no weight is one of the others once more, with the grades that it is promised on.
        rows=len(labels.weak) if labels.weight is None else int(np.count_nonzero(labels.weight)),
        local_score=float(calibration.local.mean()),
        cloud_score=float(calibration.cloud.mean()),
        gain_rate=float(calibration.gain.mean()),
        signals=material.signals,
        estimated_tokens=guessed,
        delta=recipe.delta,
        points=[
            _point(calibration, Target("quality", target, promise=promise), recipe.delta)
            for promise in PROMISES
            for target in _TARGETS
        ],
        files={name: sha256(data) for name, data in files.items()},
        metrics=_metrics(calibration, {mode: router.fair for mode, router in routers.items()}) | recipe.metrics,
        calibrated_on=recipe.calibrated_on,
        local_model=recipe.local_model,
    )
    put_policy(folder, files, msgspec.json.format(msgspec.json.encode(card), indent=2) + b"\n")
    return settled(folder, TextPolicy.load)


def _is_asked(opened: Bools | None) -> bool:
    """Whether gate 2 would be asked often enough for its threshold to mean something."""
    return opened is not None and int(opened.sum()) >= max(MIN_LABELS, _OFTEN_OPENED * len(opened))


def _gate2_sees(p_gain: Floats, opened: Bools | None) -> Floats:
    """Gate 2's P(gain) as use sees it: none that could send up an answer which ends before gate 2 is asked."""
    return p_gain if opened is None else np.where(opened, p_gain, 0.0)


def estimated_tokens(rows: Sequence[GradedRow]) -> tuple[Floats, Floats, bool]:
    """Tokens that the cloud reads and writes for each row, (n,) twice, and whether any had to be estimated.

    Estimated are four characters a token, the local answer's length for the cloud's, and 256 tokens without one.
    """
    read = [row.cloud_read if row.cloud_read is not None else len(row.prompt) / _CHARS_PER_TOKEN for row in rows]
    written = [row.cloud_written if row.cloud_written is not None else _likely_length(row) for row in rows]
    guessed = any(row.cloud_read is None or row.cloud_written is None for row in rows)
    return np.array(read, np.float64), np.array(written, np.float64), guessed


def _likely_length(row: GradedRow) -> float:
    return _ANSWER_TOKENS if row.answer is None else len(row.answer) / _CHARS_PER_TOKEN


def _exported(router: TextRouter, features: TextRows, mode: Mode) -> bytes:
    """The graph, checked against the Python model on every row. Raises RuntimeError if they differ."""
    graph = router_to_onnx(router, features.measures.shape[1], mode)
    gate = TextGate(load_onnxruntime().InferenceSession(graph, providers=["CPUExecutionProvider"]))
    counts: Any = features.counts
    theirs = [
        gate.decide(gate.read(counts[i].toarray().ravel()), measures) for i, measures in enumerate(features.measures)
    ]
    gap = float(np.abs(np.array(theirs) - router.probability(features)).max())
    if gap > _TOLERANCE:
        raise RuntimeError(f"the exported gate differs from its Python model by {gap:.1e}")
    return graph


def _point(rows: CalibrationRows, target: Target, delta: float) -> Point:
    found = operating_point(rows, target, delta)
    told = found.thresholds
    outcome = found.alpha, found.risk, found.quality, found.cloud_share
    return Point(str(target), told.before, told.after, *outcome, told.during)


def _metrics(rows: CalibrationRows, fair: Mapping[Mode, Floats]) -> dict[str, float]:
    """How the gates rank, on rows that their members did not see, and how honest they are, where (`fair`) their
    calibration had not seen them either.
    """
    found: dict[str, float] = {}
    gates: tuple[tuple[str, Mode, Floats | None], ...] = (
        ("gate1", "prompt", rows.before),
        ("gate2", "opening", rows.during),
        ("gate3", "cascade", rows.after),
    )
    for gate, mode, p_gain in gates:
        if p_gain is not None:
            routed = curve.cost_quality(p_gain, rows.local, rows.cloud)
            found |= {
                f"{gate}.apgr": routed.apgr,
                f"{gate}.cpt50": routed.cpt(0.5),
                f"{gate}.cpt80": routed.cpt(0.8),
                f"{gate}.auroc": auroc(p_gain, rows.gain),
                f"{gate}.ece": ece(fair[mode], rows.gain),
            }
    return found
