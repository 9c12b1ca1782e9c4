"""From experience to a policy: one-sided labels are refused, explored ones weighted, and the store stays bounded."""

from __future__ import annotations

import random
import sqlite3
import threading
import tracemalloc
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from router_fakes import ScriptedGates
from updraft.classifier.evaluation.metrics import auroc
from updraft.classifier.features.blocks import OPENING_TOKENS, view_of
from updraft.classifier.features.feature_rows import remembered
from updraft.classifier.features.gate_inputs import PromptView
from updraft.classifier.features.wording import COUNTS
from updraft.classifier.graded_row import AnswerSignals, GradedRow
from updraft.classifier.online.experience import ExperienceStore, Observation, kept_messages, pack, unpack
from updraft.classifier.online.refit import learn, representative_sample
from updraft.classifier.policy.policy import Policy
from updraft.classifier.target import Target
from updraft.classifier.training.gates import TrainingData
from updraft.classifier.training.train import FitRecipe
from updraft.protocol.errors import ConfigurationError, InvalidRequestError
from updraft.protocol.requests import Message
from updraft.router.gates.exploration import ExplorationGates
from updraft.router.tiers.interfaces import LocalAnswer

pytestmark = pytest.mark.slow  # such files come first

RECIPE = FitRecipe({"local": "small", "cloud": "large"}, [], "", "2026-11-22")
WORDS = ["apple", "river", "stone", "circle", "market", "window", "garden", "silver", "paper", "bridge", "candle"]

LENGTH = OPENING_TOKENS + 4


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
        logprobs = -rng.exponential(0.6 if gain else 0.1, LENGTH).astype(np.float32)
        answer = f"It is {rng.integers(90)}."
        row = GradedRow(prompt, 0, 0, "", answer, AnswerSignals(logprobs, -logprobs, np.ones(LENGTH, np.float32)))
        propensity = 1.0 if hard else exploration
        drawn = rng.random() < exploration
        graded = hard or drawn
        grades = (float(not gain), 1.0) if graded else (None, None)
        told = pack(remembered(view_of(row))) if features else b""
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
                sampled=int(drawn),
                question=b"%d" % i,
            )
        )
    return rows, gains / n


@given(st.text(max_size=300), st.text(max_size=100))
def test_features_survive_packing(prompt: str, answer: str) -> None:
    blocks, counts = remembered(view_of(GradedRow(prompt, 0, 0, "", answer)))
    unpacked, buckets, held = unpack(pack((blocks, counts)))
    assert [*unpacked] == [*blocks]
    assert all(np.array_equal(unpacked[name], block, equal_nan=True) for name, block in blocks.items())
    assert (buckets == np.flatnonzero(counts)).all()
    assert (held == counts[buckets]).all()


def test_the_representative_sample_gives_back_the_rate_of_gains() -> None:
    rows, rate = observed(20_000, 0, 0.1, features=False)
    graded = [row for row in rows if row.grades is not None]
    naive = np.mean([row.local == 0 for row in graded])
    even = representative_sample(graded)
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
    assert policy.gate2_tokens == OPENING_TOKENS
    assert policy.calibration.during is not None
    assert auroc(policy.calibration.during, policy.calibration.gain) > 0.7


def test_a_block_that_one_row_lacks_is_read_by_no_gate(tmp_path: Path) -> None:
    rows, _ = observed(400, 1, 0.4)
    graded = next(i for i, row in enumerate(rows) if row.grades is not None)
    blocks, buckets, held = unpack(rows[graded].features)
    counts = np.zeros(COUNTS, np.float32)
    counts[buckets] = held
    rows[graded] = replace(
        rows[graded], features=pack(({name: block for name, block in blocks.items() if name != "steps"}, counts))
    )
    policy = learn(rows, RECIPE, tmp_path)
    assert policy.card.missing == ["steps", "prompt_signals", "prompt_hidden", "answer_hidden"]
    assert policy.reads_answers


def test_short_answers_do_not_train_gate_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = observed(300, 1, 1.0)
    assert training_data_of(rows, monkeypatch).opened.all()
    experience = ExperienceStore(tmp_path / "e.sqlite3")
    short = asking([f"Is {i} prime?" for i in range(100, 300)], experience)
    assert not training_data_of(short, monkeypatch).opened.any()
    experience.close()


def test_one_sided_labels_are_refused(tmp_path: Path) -> None:
    rows, _ = observed(300, 2, 0.0, features=False)
    with pytest.raises(InvalidRequestError, match=r"0 of them make a representative sample.*Raise exploration"):
        learn(rows, RECIPE, tmp_path)


def test_thumbs_overrule_the_tier_they_are_about(tmp_path: Path) -> None:
    rows, _ = observed(3, 3, 1.0)
    experience = ExperienceStore(tmp_path / "e.sqlite3")
    for row in rows:
        experience.add(row)
    assert experience.feedback("r1", up=False)
    assert not experience.feedback("nobody", up=True)
    stored = {row.id: row for row in experience.rows("small with large")}
    assert stored["r1"].thumb == -1
    assert stored["r1"].grades == (stored["r1"].local, 0.0), "the cloud answered, so the thumb is about the cloud"
    assert stored["r0"] == rows[0]
    experience.close()


def test_the_store_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    (row, *_), _ = observed(1, 4, 1.0)
    experience = ExperienceStore(tmp_path / "e.sqlite3", most=50)
    for i in range(601):
        experience.add(
            Observation(**{f: getattr(row, f) for f in Observation.__slots__} | {"id": str(i), "at": float(i)})
        )
    kept = experience.rows("small with large")
    assert len(kept) <= 50
    assert kept[0].id == "600"
    assert experience.pairs() == {"small with large": len(kept)}
    experience.close()


def test_invalid_experience_file(tmp_path: Path) -> None:
    (tmp_path / "e.sqlite3").write_bytes(b"no database at all, but long enough to be looked at" * 30)
    with pytest.raises(ConfigurationError, match=r"Cannot use .* for experience"):
        ExperienceStore(tmp_path / "e.sqlite3")


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.sqlite3"
    ExperienceStore(path).close()
    with closing(sqlite3.connect(path)) as older:
        older.execute("PRAGMA user_version = 4")
    with pytest.raises(ConfigurationError, match="has format 4"):
        ExperienceStore(path)


def test_a_new_file_may_be_opened_by_many_at_once(tmp_path: Path) -> None:
    refused: list[ConfigurationError] = []

    def open_one(path: Path, start: threading.Barrier) -> None:
        start.wait()
        try:
            ExperienceStore(path).close()
        except ConfigurationError as error:
            refused.append(error)

    for number in range(15):
        path, start = tmp_path / f"{number}.sqlite3", threading.Barrier(6)
        threads = [threading.Thread(target=open_one, args=(path, start)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not refused


@pytest.mark.parametrize("version", [0, 1, 5])
def test_the_database_of_others_stays_as_it_is(tmp_path: Path, version: int) -> None:
    path = tmp_path / "theirs.sqlite3"
    with closing(sqlite3.connect(path)) as theirs:
        theirs.executescript(f"CREATE TABLE notes (text); PRAGMA user_version={version};")
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match="holds no experience"):
        ExperienceStore(path)
    assert path.read_bytes() == before


def test_a_thumb_teaches_and_leaves_the_promise_as_it_is(tmp_path: Path) -> None:
    rows, _ = observed(600, 6, 1.0)
    # Users who complain about what came from the cloud where only the cloud was right.
    thumbed = [replace(row, thumb=-1) if row.local == 0 and i % 4 else row for i, row in enumerate(rows)]
    plain, judged = (learn(each, RECIPE, tmp_path / name) for name, each in (("plain", rows), ("judged", thumbed)))
    assert judged.card.rows == plain.card.rows == 600
    assert judged.card.gain_rate == plain.card.gain_rate
    assert judged.card.cloud_score == plain.card.cloud_score == 1
    assert len(judged.calibration.local) == len(plain.calibration.local) == 300
    hard = PromptView("Prove rigorously that 7 stone river paper")
    assert judged.before(hard) <= plain.before(hard)


def training_data_of(rows: list[Observation], monkeypatch: pytest.MonkeyPatch) -> TrainingData:
    """The policy that `learn` would fit."""
    data: list[TrainingData] = []

    def fit(material: TrainingData, *_: object) -> Policy:
        data.append(material)
        raise InterruptedError

    monkeypatch.setattr("updraft.classifier.online.refit.fit_training_data", fit)
    with pytest.raises(InterruptedError):
        learn(rows, RECIPE, Path("nowhere"))
    return data[0]


def asking(prompts: list[str], experience: ExperienceStore) -> list[Observation]:
    """Sampled and graded answers to them."""
    template, _ = observed(1, 10, 1.0)
    rows: list[Observation] = []
    for i, prompt in enumerate(prompts):
        told = pack(
            remembered(view_of(GradedRow(prompt, 0, 0, "", "It is.", AnswerSignals(*[np.zeros(6, np.float32)] * 3))))
        )
        digest = experience.digest(PromptView(prompt))
        rows.append(replace(template[0], id=str(i), features=told, question=digest, local=float(i % 2), cloud=1.0))
    return rows


def test_questions_that_differ_in_numbers_only_are_no_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experience = ExperienceStore(tmp_path / "e.sqlite3")
    different = asking([f"Is {i} prime?" for i in range(100, 300)], experience)
    assert training_data_of(different, monkeypatch).labels.evidence == 200
    repeated = asking(["Is 91 prime?", "is  91 PRIME?"] * 60, experience)
    assert training_data_of(repeated, monkeypatch).labels.evidence == 1
    experience.close()


def test_digests_are_of_one_file_and_outlive_its_closing(tmp_path: Path) -> None:
    digests: list[bytes] = []
    for name in ("a.sqlite3", "a.sqlite3", "b.sqlite3"):
        experience = ExperienceStore(tmp_path / name)
        digests.append(experience.digest(PromptView("Is 91 prime?")))
        experience.close()
    assert digests[0] == digests[1] != digests[2]


def test_word_counts_are_keyed_by_their_file(tmp_path: Path) -> None:
    (row,), _ = observed(1, 0, 1.0)
    stored: list[NDArray[np.uint16]] = []
    for name in ("a.sqlite3", "b.sqlite3"):
        experience = ExperienceStore(tmp_path / name)
        experience.add(row)
        assert experience.rows(row.pair) == [row]
        experience.close()
        with closing(sqlite3.connect(tmp_path / name)) as file:
            ((features,),) = file.execute("SELECT features FROM observations").fetchall()
        stored.append(unpack(features)[1])
    plain = unpack(row.features)[1]
    for one, other in ((stored[0], stored[1]), (stored[0], plain), (stored[1], plain)):
        assert len(one) == len(other)
        assert len(np.intersect1d(one, other)) < len(one) / 4


def test_the_latest_messages_are_kept() -> None:
    messages = [Message(role="user", content=str(i) * 30_000) for i in range(9)]
    kept = msgspec.json.decode(kept_messages(messages), type=list[Message])
    assert [message.text[0] for message in kept] == ["6", "7", "8"]
    assert (
        msgspec.json.decode(kept_messages([Message(role="user", content="x" * 200_000)]))[0]["content"] == "x" * 200_000
    )


def test_a_file_whose_key_is_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.sqlite3"
    ExperienceStore(path).close()
    with closing(sqlite3.connect(path)) as damaged:
        damaged.execute("UPDATE digest_key SET key = 'short'")
        damaged.commit()
    with pytest.raises(ConfigurationError, match="digest key"):
        ExperienceStore(path)


def test_a_thumb_on_what_stayed_weighs_as_much_as_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = observed(2_000, 7, 0.1)
    stayed = next(i for i, row in enumerate(rows) if row.grades is None)
    rows[stayed] = replace(rows[stayed], thumb=-1)
    weight = training_data_of(rows, monkeypatch).labels.weight
    graded = [row.id for row in rows if row.grades is not None]
    assert weight is not None
    assert weight[graded.index(f"r{stayed}")] == 1
    assert weight.max() == pytest.approx(10), "what exploration sent up stands for ten"


def test_gate_1_escalations_stay_in_the_promise(tmp_path: Path) -> None:
    """Proofs are what the local model gets confidently wrong, and what gate 1 of the policy in use catches."""
    rng, chance = np.random.default_rng(8), random.Random(8)
    careful, careless = (
        ExplorationGates(ScriptedGates(before=caught), exploration=0.4, rng=chance) for caught in (True, False)
    )
    rows: list[Observation] = []
    for i in range(1_200):
        hard = bool(rng.random() < 0.3)
        gates = (careful if hard else careless).begin()
        if gates.judge(1, [], LocalAnswer(), None).escalate:
            continue
        verdict = gates.judge(3, [], LocalAnswer(), None)
        gain = hard or bool(rng.random() < 0.1)
        prompt = f"{'Prove rigorously that' if hard else 'Please add up'} {i} {' '.join(rng.choice(WORDS, 5))}"
        logprobs = -rng.exponential(0.1 if hard or not gain else 0.8, 6).astype(np.float32)
        row = GradedRow(prompt, 0, 0, "", "It is 4.", AnswerSignals(logprobs, -logprobs, np.ones(6, np.float32)))
        grades = (float(not gain), 1.0) if verdict.escalate else (None, None)
        chance, told = verdict.propensity or 0.0, pack(remembered(view_of(row)))
        rows.append(
            Observation(
                f"r{i}",
                "p",
                float(i),
                0.5,
                chance,
                0.4,
                *grades,
                None,
                20,
                10,
                "cloud",
                told,
                sampled=int(verdict.exploration_chance > 0),
                question=b"%d" % i,
            )
        )
    policy = learn(rows, RECIPE, tmp_path)
    assert policy.card.gain_rate == pytest.approx(0.37, abs=0.07)
    asked = [policy.before(PromptView(f"Prove rigorously that {i} {WORDS[i % 11]} stone")) for i in range(50)]
    assert np.mean(asked) > 0.8
    assert policy.operating_point(Target("quality", 0.95)).cloud_share > 0.3


def test_many_rows_are_no_dense_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = observed(5, 9, 1.0)
    many = [replace(rows[i % 5], id=str(i)) for i in range(5_000)]
    tracemalloc.start()
    material = training_data_of(many, monkeypatch)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert material.features["prompt"].counts.shape == (5_000, COUNTS)
    assert material.labels.evidence == 5
    assert most < 5_000 * COUNTS * 4 / 4, "a quarter of what the dense counts alone would take"
