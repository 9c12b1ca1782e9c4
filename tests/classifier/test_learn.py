"""From experience to a policy: one-sided labels are refused, explored ones weighted, and the store stays bounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from updraft.classifier.experience import Experience, Observation, pack, unpack
from updraft.classifier.graded import GradedRow, TokenSignals
from updraft.classifier.learn import even_draw, learn
from updraft.classifier.metrics import auroc
from updraft.classifier.text_fit import Recipe
from updraft.classifier.text_rows import vector
from updraft.classifier.views import PromptView
from updraft.protocol.errors import ConfigurationError, InvalidRequestError

RECIPE = Recipe({"local": "small", "cloud": "large"}, [], "", "2026-11-22")
WORDS = ["apple", "river", "stone", "circle", "market", "window", "garden", "silver", "paper", "bridge", "candle"]


def observed(n: int, seed: int, exploration: float, *, features: bool = True) -> tuple[list[Observation], float]:
    """Answers that a confident gate judged: what it finds hard goes up, the rest only by exploration.

    Returned beside them: how often the cloud really gains.
    """
    rng = np.random.default_rng(seed)
    rows: list[Observation] = []
    gains = 0
    for i in range(n):
        hard = rng.random() < 0.4
        gain = bool(rng.random() < (0.7 if hard else 0.1))
        gains += gain
        prompt = f"{'Prove rigorously that' if hard else 'Please add up'} {i} {' '.join(rng.choice(WORDS, 5))}"
        logprobs = -rng.exponential(0.6 if gain else 0.1, 6).astype(np.float32)
        answer = f"It is {rng.integers(90)}."
        row = GradedRow(prompt, 0, 0, "", answer, TokenSignals(logprobs, -logprobs, np.ones(6, np.float32)))
        propensity = 1.0 if hard else exploration
        graded = rng.random() < propensity
        grades = (float(not gain), 1.0) if graded else (None, None)
        told = pack(vector(row, "cascade")) if features else b""
        rows.append(
            Observation(
                f"r{i}",
                "small with large",
                float(i),
                0.5,
                propensity,
                exploration,
                *grades,
                None,
                20.0 if graded else None,
                10.0 if graded else None,
                "cloud" if graded else "local",
                told,
            )
        )
    return rows, gains / n


@given(st.text(max_size=300), st.text(max_size=100))
@settings(max_examples=50)
def test_features_survive_packing(prompt: str, answer: str) -> None:
    measures, counts = vector(GradedRow(prompt, 0, 0, "", answer), "cascade")
    found = unpack(pack((measures, counts)))
    assert np.array_equal(found[0], measures, equal_nan=True)
    assert (found[1] == counts).all()


def test_the_even_draw_gives_back_the_rate_of_gains() -> None:
    rows, rate = observed(20_000, 0, 0.1, features=False)
    graded = [row for row in rows if row.grades is not None]
    naive = np.mean([row.local == 0 for row in graded])
    even = even_draw(graded)
    fair = np.mean([row.local == 0 for row, kept in zip(graded, even, strict=True) if kept])
    assert abs(fair - rate) < 0.03
    assert naive - rate > 0.15, "labels of escalations alone are one-sided"


def test_learning_from_use(tmp_path: Path) -> None:
    rows, rate = observed(700, 1, 0.4)
    policy = learn(rows, RECIPE, tmp_path)
    assert policy.card.data[0].name == "experience"
    assert abs(policy.card.gain_rate - rate) < 0.1
    assert not policy.card.estimated_tokens
    hard = policy.before(PromptView("Prove rigorously that 7 stone river paper"))
    easy = policy.before(PromptView("Please add up 7 stone river paper"))
    assert hard > 0.5 > easy
    assert auroc(policy.calibration.judged, policy.calibration.gain) > 0.8


def test_one_sided_labels_are_refused(tmp_path: Path) -> None:
    rows, _ = observed(300, 2, 0.0, features=False)
    with pytest.raises(InvalidRequestError, match=r"0 of them make an\s+even draw.*Raise exploration"):
        learn(rows, RECIPE, tmp_path)


def test_thumbs_overrule_the_tier_they_are_about(tmp_path: Path) -> None:
    rows, _ = observed(3, 3, 1.0)
    experience = Experience(tmp_path / "e.sqlite3")
    for row in rows:
        experience.add(row)
    assert experience.feedback("r1", up=False)
    assert not experience.feedback("nobody", up=True)
    found = {row.id: row for row in experience.rows("small with large")}
    assert found["r1"].thumb == -1
    assert found["r1"].grades == (found["r1"].local, 0.0), "the cloud answered, so the thumb is about the cloud"
    assert found["r0"] == rows[0]
    experience.close()


def test_the_store_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    (row, *_), _ = observed(1, 4, 1.0)
    experience = Experience(tmp_path / "e.sqlite3", most=50)
    for i in range(601):
        experience.add(
            Observation(**{f: getattr(row, f) for f in Observation.__slots__} | {"id": str(i), "at": float(i)})
        )
    kept = experience.rows("small with large")
    assert len(kept) <= 50
    assert kept[0].id == "600"
    assert experience.pairs() == {"small with large": len(kept)}
    experience.close()


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "e.sqlite3").write_bytes(b"no database at all, but long enough to be looked at" * 30)
    with pytest.raises(ConfigurationError, match="cannot be used for experience"):
        Experience(tmp_path / "e.sqlite3")
