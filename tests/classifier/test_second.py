"""A second sample updates P(gain) where gate 3 is undecided: honestly, within its reach, and nowhere else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from second_samples import FIRST, OTHER, SAME, Draw, opinion
from updraft.classifier import outcomes
from updraft.classifier.agreement import Said
from updraft.classifier.aim import Aim
from updraft.classifier.calibrated import second_sentences
from updraft.classifier.calibration_rows import pack_calibration, unpack_calibration
from updraft.classifier.graded import GradedRow, read_graded, write_graded
from updraft.classifier.metrics import auroc, ece, ece_by_chance
from updraft.classifier.outcomes import Outcome
from updraft.classifier.policy import Policy
from updraft.classifier.second import SecondOpinion, agreement, second_sampling
from updraft.classifier.second_fit import BAND, agreements, fit_second
from updraft.classifier.second_report import figures
from updraft.classifier.text_fit import Recipe, fit_text_policy
from updraft.classifier.text_policy import Source, TextPolicy
from updraft.classifier.train import TrainOptions, fit
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.requests import Message
from updraft.protocol.sampling import SamplingParams

TEXTS = st.text(st.sampled_from("Ita s12.7é,{}\n"), max_size=20)


@cache
def known() -> tuple[Draw, SecondOpinion]:
    draw = Draw.of(3000, 0)
    fitted = draw.fitted()
    assert fitted is not None
    return draw, opinion(fitted)


def test_an_informative_second_answer_ranks_better_and_is_honest() -> None:
    _, second = known()
    later = Draw.of(4000, 1)
    again = np.array(
        [
            second.update(p, Said(FIRST), Said(SAME if same else OTHER))
            for p, same in zip(later.p_gain, later.same, strict=True)
        ]
    )
    undecided = (later.p_gain >= BAND[0]) & (later.p_gain <= BAND[1])
    assert np.array_equal(again[~undecided], later.p_gain[~undecided])
    ranked = [auroc(p[undecided], later.gain[undecided]) for p in (later.p_gain, again)]
    assert ranked[1] > ranked[0] + 0.04
    assert ece(again, later.gain) < 0.02 + ece_by_chance(again)
    p = np.linspace(0.06, 0.49, 20)
    assert all(second.update(x, Said(FIRST), Said(SAME)) < second.update(x, Said(FIRST), Said(OTHER)) for x in p)


def test_one_that_says_nothing_changes_next_to_nothing() -> None:
    draw = Draw.of(3000, 0)
    fitted = draw.fitted(informative=False)
    assert fitted is not None
    assert fitted.card.metrics["auroc_again"] == pytest.approx(fitted.card.metrics["auroc"], abs=0.01)
    assert not np.array_equal(fitted.again, draw.p_gain)


@given(st.floats(0, 1), TEXTS, TEXTS)
@settings(deadline=None, max_examples=300)
def test_no_answer_leads_beyond_the_reach(p_gain: float, first: str, other: str) -> None:
    second = known()[1]
    least, most = second.reach(p_gain)
    found = second.update(p_gain, Said(first), Said(other))
    assert 0 <= least <= found + 1e-6 and found <= most + 1e-6 and most <= 1
    if not BAND[0] <= p_gain <= BAND[1]:
        assert least == most == found == p_gain


@given(st.floats(*BAND), st.floats(*BAND), TEXTS, TEXTS)
@settings(deadline=None, max_examples=200)
def test_what_agrees_alike_keeps_its_order(one: float, other: float, first: str, again: str) -> None:
    second = known()[1]
    low, high = (second.update(p_gain, Said(first), Said(again)) for p_gain in sorted((one, other)))
    assert low <= high + 1e-7


@given(TEXTS, TEXTS)
@settings(deadline=None, max_examples=300)
def test_agreement_is_symmetric_and_bounded(one: str, other: str) -> None:
    same, shared = agreement(Said(one), Said(other))
    assert (same, shared) == agreement(Said(other), Said(one))
    assert same in (0, 1) and 0 <= shared <= 1
    assert agreement(Said(one), Said(one)) == (1, 1)
    assert agreement(Said(one), Said(one, calls=(("add", "{}"),))) == (0, 0)


def test_each_row_is_updated_by_models_that_did_not_see_it() -> None:
    """Labels of coins: who had seen its own would rank better than chance."""
    rng = np.random.default_rng(3)
    n = 160
    p, gain = rng.uniform(0.1, 0.4, n), rng.random(n) < 0.3
    agreed = np.column_stack((rng.random(n), rng.random(n)))
    ranks = [auroc(found.again, gain) for seed in range(12) if (found := fit_second(p, agreed, gain, seed=seed))]
    assert np.mean(ranks) < 0.53
    alike = fit_second(p, agreed, gain, same=np.repeat(np.arange(2), n // 2))
    assert alike is not None, "two questions, in two of five folds"


def test_too_few_undecided_rows_make_no_model_and_a_missing_answer_is_told() -> None:
    draw = Draw.of(100, 0)
    assert draw.fitted() is None
    many = Draw.of(2000, 0)
    some = agreements((FIRST, SAME if i % 2 else None) for i in range(2000))
    with pytest.raises(ValueError, match="no second answer"):
        fit_second(many.p_gain, some, many.gain)


def test_the_same_request_is_sampled_alike_and_within_its_limits() -> None:
    asked = [Message("user", "What is 2 + 2?")]
    first = SamplingParams(top_p=0.5, top_k=3, max_tokens=200, min_tokens=150, logprobs=3, seed=4, stop=("x",))
    params = second_sampling(first, asked, 40)
    assert params == second_sampling(first, asked, 40)
    assert (params.top_p, params.top_k, params.logprobs, params.stop) == (1.0, 0, None, ("x",))
    assert (params.max_tokens, params.min_tokens) == (58, 58)
    assert second_sampling(replace(first, max_tokens=50, min_tokens=0), asked, 40).max_tokens == 50
    assert params.seed != second_sampling(first, [Message("user", "What is 2 + 3?")], 40).seed
    assert params.seed != second_sampling(replace(first, seed=5), asked, 40).seed


def test_rows_keep_it_and_old_files_load_without(tmp_path: Path) -> None:
    draw = Draw.of(600, 0)
    fitted = draw.fitted()
    assert fitted is not None
    rows = draw.rows(fitted)
    back = unpack_calibration(tmp_path, pack_calibration(rows))
    assert back.again is not None
    assert back.with_second_samples.after == pytest.approx(fitted.again, abs=1e-6)
    without = unpack_calibration(tmp_path, pack_calibration(replace(rows, again=None)))
    assert without.again is None
    with pytest.raises(ConfigurationError, match="calibrated with second samples"):
        _ = without.with_second_samples


def with_seconds(rows: list[Outcome], seed: int) -> list[Outcome]:
    """The local model says the same again where it is right, mostly."""
    rng = np.random.default_rng(seed)
    return [replace(r, second=r.view.answer if rng.random() < (0.3 if r.gain else 0.9) else "No idea.") for r in rows]


@pytest.fixture(scope="module")
def pair_policy(
    make_population: Callable[..., list[Outcome]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Outcome]]:
    folder = tmp_path_factory.mktemp("again")
    fit(with_seconds(make_population(1000, seed=1), 5), folder, TrainOptions("small", "large", trees=30))
    return folder, with_seconds(make_population(800, seed=2, split="test"), 6)


def test_a_pairs_policy_learns_it_and_sends_up_less(pair_policy: tuple[Path, list[Outcome]]) -> None:
    folder, test = pair_policy
    policy = Policy.load(folder)
    assert policy.second is not None and policy.calibration is not None
    found = figures(policy, test, 0.95)
    assert found["auroc_undecided_again"] > found["auroc_undecided"] + 0.05
    assert found["quality_again"] > 0.95
    assert 0 < found["taken"] < found["undecided"]
    for aim in (Aim("quality", 0.95), Aim("quality", 0.95, promise="mean")):
        assert policy.thresholds_for(aim, second_sample=True) != policy.thresholds_for(aim)
    shares = [
        next(target for target in targets if target.quality == 0.95).cloud_share
        for targets in (policy.card.second.thresholds if policy.card.second else [], policy.card.thresholds)
    ]
    assert shares[0] < shares[1]


def test_what_does_not_fit_is_refused(pair_policy: tuple[Path, list[Outcome]], tmp_path: Path) -> None:
    folder = shutil.copytree(pair_policy[0], tmp_path / "policy")

    def change(**second: Any) -> None:
        card = json.loads((pair_policy[0] / "policy.json").read_text())
        card["second"] = {**card["second"], **second} if second else None
        (folder / "policy.json").write_text(json.dumps(card))

    change(temperature=0.1)
    with pytest.raises(ConfigurationError, match=r"drawn at temperature 0\.1"):
        Policy.load(folder)
    change()
    policy = Policy.load(folder)
    assert policy.second is None
    with pytest.raises(ConfigurationError, match="--second-sample"):
        policy.thresholds_for(Aim("quality", 0.9), second_sample=True)
    change(rows=1)
    (folder / "again.onnx").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"again\.onnx is not the file"):
        Policy.load(folder)


def test_outcomes_and_graded_files_keep_second_answers(
    tmp_path: Path, make_population: Callable[..., list[Outcome]]
) -> None:
    rows = make_population(6, seed=0)
    rows[1], rows[2] = replace(rows[1], second=""), replace(rows[2], second="Zwölf \ud800")
    outcomes.save(rows, tmp_path / "rows.npz")
    assert [row.second for row in outcomes.load(tmp_path / "rows.npz")] == [row.second for row in rows]
    outcomes.save(rows[:1], tmp_path / "none.npz")
    with np.load(tmp_path / "none.npz") as file:
        assert not [name for name in file.files if "second" in name]
    (tmp_path / "rows.csv").write_text("prompt,weak,strong,weak_answer,second_answer\nWhat?,0,1,This,That\n")
    (row,) = read_graded(tmp_path / "rows.csv")
    assert (row.answer, row.second) == ("This", "That")
    write_graded(tmp_path / "rows.jsonl", [row])
    assert read_graded(tmp_path / "rows.jsonl") == [row]


def graded_rows(n: int) -> list[GradedRow]:
    """Sums that the local model often gets wrong, more so where it has to prove them."""
    rng = np.random.default_rng(0)
    rows: list[GradedRow] = []
    for _ in range(n):
        a, b = (int(x) for x in rng.integers(2, 90, 2))
        weak = float(rng.random() < (0.2 if a > 45 else 0.75))
        task = "Prove rigorously that" if a > 45 else "Please add up"
        rows.append(GradedRow(f"{task} {a} and {b}?", weak, float(rng.random() < 0.95), "", f"It is {a + b}"))
    return rows


def test_a_graded_file_with_second_answers_makes_a_policy_that_knows_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [
        replace(row, second=row.answer if rng.random() < (0.3 if row.gain else 0.9) else "Perhaps 1 or 2")
        for row in graded_rows(500)
    ]
    source = Source("rows.csv", "0" * 64, 500)
    recipe = Recipe({"local": "small", "cloud": "large"}, [source], "graded file", "2026-11-24")
    policy = fit_text_policy(rows, recipe, tmp_path)
    aim = Aim("quality", 0.9, promise="mean")
    assert policy.second is not None and policy.calibration.again is not None
    assert policy.operating_point(aim, second_sample=True) != policy.operating_point(aim)
    (told,) = second_sentences(policy, aim, wanted=False)
    assert "With second_sample=true" in told
    fit_text_policy(graded_rows(500), recipe, tmp_path)
    plain = TextPolicy.load(tmp_path)
    assert plain.second is None and not list(tmp_path.glob("again*")), "what the old one named is removed"
    assert second_sentences(plain, aim, wanted=False) == []
    assert "knows no second samples" in second_sentences(plain, aim, wanted=True)[0]
    with pytest.raises(ConfigurationError, match="--second-sample"):
        plain.thresholds_for(aim, second_sample=True)
