"""From experience to a policy: the gates fitted again on what use has shown.

Answers that went up anyway say little about those that stay. Where exploration (or a shadow) gave each judged answer a
chance to be graded, models are fitted on all graded rows by one over that chance, and the promise is made on an even
draw of them: each row is kept with a probability that brings all to the same chance. Thumbs teach the models and are
no part of the promise, as people give them when they like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..protocol.errors import InvalidRequestError
from .experience import Observation, unpack
from .graph_files import sha256
from .optional import load_module
from .text_fit import Material, Recipe, fit_material
from .text_policy import Source, TextPolicy
from .text_router import MIN_LABELS, Labels
from .text_rows import N_WORDING, TextRows

__all__ = ["GRADING", "even_draw", "learn"]

GRADING = "agreement in use (cloud answers, accepted drafts) and thumbs"


def learn(rows: Sequence[Observation], recipe: Recipe, out: Path) -> TextPolicy:
    """Fit on the graded of `rows`, write the folder `out` and load it; `recipe.data` gains the experience as a source.

    Raises InvalidRequestError if fewer than 100 rows are an even draw, or if they are all alike.
    """
    graded = [row for row in rows if row.grades is not None]
    even = even_draw(graded, recipe.seed)
    if even.sum() < MIN_LABELS:
        raise InvalidRequestError(
            f"{len(rows)} judged answers are known, {len(graded)} are graded, and {int(even.sum())} of them make an "
            f"even draw; {MIN_LABELS} are needed. Raise exploration, or run as a shadow for a while: without either "
            "only answers that go up anyway are graded."
        )
    scores = np.array([row.grades for row in graded], np.float64)
    labels = Labels(
        weak=scores[:, 0],
        strong=scores[:, 1],
        same=np.array([sha256(row.features) for row in graded]),
        weight=np.array([1.0 / row.propensity if row.propensity > 0 else 1.0 for row in graded]),
        representative=even,
    )
    digest = sha256("\n".join(sorted(row.id for row in graded)).encode())
    source = Source("experience", digest, len(graded))
    measures, counts = zip(*(unpack(row.features) for row in graded), strict=True)
    sparse = load_module("scipy.sparse", "train").csr_matrix(np.stack(counts))
    table = np.stack(measures)
    material = Material(
        features={"prompt": TextRows(sparse, table[:, :N_WORDING]), "cascade": TextRows(sparse, table)},
        labels=labels,
        signals=True,
        tokens=(*_tokens(graded), any(row.cloud_read is None for row in graded)),
    )
    return fit_material(material, replace(recipe, data=[*recipe.data, source], grading=GRADING), out)


def even_draw(graded: Sequence[Observation], seed: int = 0) -> np.ndarray:
    """(n,) which rows to keep so that each judged answer had the same chance to be among them, as bool."""
    open_ = np.array([row.explored > 0 and row.propensity > 0 and row.local is not None for row in graded], np.bool_)
    if not open_.any():
        return open_
    chance = np.array([row.propensity for row in graded])
    least = min(row.explored for row, usable in zip(graded, open_, strict=True) if usable)
    kept = np.random.default_rng(seed).random(len(graded)) * chance < least
    return open_ & kept


def _tokens(graded: Sequence[Observation]) -> tuple[np.ndarray, np.ndarray]:
    """What the cloud read and wrote, the mean of the others where it was not asked."""

    def filled(values: list[float | None]) -> np.ndarray:
        known = [value for value in values if value is not None]
        mean = float(np.mean(known)) if known else 0.0
        return np.array([mean if value is None else value for value in values], np.float64)

    return filled([row.cloud_read for row in graded]), filled([row.cloud_written for row in graded])
