"""Refitting a policy to experience.

Answers that escalated say little about the answers that stay local. Exploration (or shadow mode) therefore samples
requests at random before any gate has seen them, and asks both tiers. The promise is computed from these sampled rows
only; rows sampled at a higher rate are thinned to the lowest rate. Models are fitted on all graded rows, each weighted
by the inverse of its probability of being graded. Thumbs train the models, but are ignored for the promise, because
users choose when to give a thumb.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...protocol.errors import InvalidRequestError
from ..arrays import Array, Bools
from ..features.blocks import GATE_BLOCKS, OPENING_TOKENS, BlockName
from ..features.feature_rows import FeatureRows
from ..features.token_signals import SIGNAL_NAMES
from ..features.wording import COUNTS
from ..optional_imports import load_module
from ..policy.graph_files import sha256
from ..policy.policy import Policy, Source
from ..training.gates import TrainingData
from ..training.router_model import MIN_LABELS, Labels
from ..training.train import FitRecipe, fit_training_data
from .experience import Observation, unpack

GRADING = "agreement with the cloud in live use (cloud answers, accepted drafts), and thumbs"


def learn(rows: Sequence[Observation], recipe: FitRecipe, out: Path) -> Policy:
    """Fit a policy on the graded rows, write it to the folder `out` and load it. Its card lists experience as a source.

    Raises InvalidRequestError for a representative sample below 100 rows, and the errors of `fit_training_data`.
    """
    graded = [row for row in rows if row.grades is not None]
    fit_rows = _fit_rows(graded, recipe.seed)
    representative = np.array([row.representative for row in fit_rows], np.bool_)
    if representative.sum() < MIN_LABELS:
        raise InvalidRequestError(
            f"{len(rows)} judged answers are stored, {len(graded)} are graded, and {int(representative.sum())} of them "
            f"make a representative sample; {MIN_LABELS} are needed. Raise exploration, or use shadow mode for a "
            "while: otherwise only answers that escalate anyway are graded."
        )
    observations = [fit_row.row for fit_row in fit_rows]
    features = _features(observations)
    scores = np.array([row.grades for row in fit_rows], np.float64)
    labels = Labels(
        weak=scores[:, 0],
        strong=scores[:, 1],
        same=np.array([row.question for row in observations]),
        weight=np.array([row.weight for row in fit_rows]),
        representative=representative,
    )
    digest = sha256("\n".join(sorted(row.id for row in graded)).encode())
    source = Source("experience", digest, len(graded))
    material = TrainingData(
        features={mode: features.of_gate(mode) for mode in GATE_BLOCKS},
        labels=labels,
        tokens=(*_tokens(observations), any(row.cloud_read is None for row in observations)),
        opened=_has_opening(features),
    )
    return fit_training_data(material, replace(recipe, data=[*recipe.data, source], grading=GRADING), out)


def representative_sample(rows: Sequence[Observation], seed: int = 0) -> np.ndarray:
    """Return a mask, (n,) bool, of the rows to base a promise on: sampled, graded, and thinned to one sampling rate."""
    usable = np.array([row.sampled == 1 and row.pair_grades is not None for row in rows], np.bool_)
    if not usable.any():
        return usable
    chance = np.array([row.explored for row in rows])
    return usable & (np.random.default_rng(seed).random(len(rows)) * chance < chance[usable].min())


@dataclass(frozen=True, slots=True)
class _FitRow:
    """An observation with the grades and the weight that the fit uses."""

    row: Observation
    # Grades of the local and the cloud's answer.
    grades: tuple[float, float]
    weight: float
    # Whether the row was sampled at random, so that the policy's promise may be based on it.
    representative: bool


def _fit_rows(graded: Sequence[Observation], seed: int) -> list[_FitRow]:
    """Convert graded rows. A sampled row with a thumb becomes two rows: one with the thumb, to fit on, and one without
    it, for the promise."""
    fit_rows: list[_FitRow] = []
    for row, sampled in zip(graded, representative_sample(graded, seed), strict=True):
        pair, grades = row.pair_grades, row.grades
        if grades is None:
            continue
        # Rows graded by a thumb alone have no known probability of being graded, so their weight is 1.
        weight = 1.0 / row.propensity if pair is not None and row.propensity > 0 else 1.0
        fit_rows.append(_FitRow(row, grades, weight, bool(sampled) and row.thumb is None))
        if sampled and row.thumb is not None and pair is not None:
            fit_rows.append(_FitRow(row, pair, 0.0, True))
    return fit_rows


def _features(rows: Sequence[Observation]) -> FeatureRows:
    """Unpack the features of all rows, limited to the blocks common to all rows."""
    unpacked = [unpack(row.features) for row in rows]
    starts = np.cumsum([0, *(len(buckets) for _, buckets, _ in unpacked)])
    buckets = np.concatenate([part for _, part, _ in unpacked]).astype(np.int32)
    counts = np.concatenate([part for _, _, part in unpacked])
    sparse = load_module("scipy.sparse", "calibrate").csr_matrix((counts, buckets, starts), shape=(len(rows), COUNTS))
    names: list[BlockName] = [name for name in unpacked[0][0] if all(name in blocks for blocks, _, _ in unpacked)]
    blocks: dict[BlockName, Array] = {name: np.stack([blocks[name] for blocks, _, _ in unpacked]) for name in names}
    return FeatureRows(sparse, blocks)


def _has_opening(rows: FeatureRows) -> Bools:
    """Return which answers are longer than their opening, the part that gate 2 reads, (n,)."""
    return np.expm1(rows.blocks["signals"][:, SIGNAL_NAMES.index("tokens")]) > OPENING_TOKENS + 0.5


def _tokens(graded: Sequence[Observation]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that the cloud read and wrote, (n,) each; rows without a count get the mean of the others."""

    def filled(values: list[float | None]) -> np.ndarray:
        present = [value for value in values if value is not None]
        mean = float(np.mean(present)) if present else 0.0
        return np.array([mean if value is None else value for value in values], np.float64)

    return filled([row.cloud_read for row in graded]), filled([row.cloud_written for row in graded])
