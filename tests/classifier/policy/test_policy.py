"""A policy of graded prompts as a folder: what was fitted is what runs, and what does not fit is refused."""

from __future__ import annotations

import io
import json
import resource
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from updraft.classifier.calibration.drift import DriftMonitor
from updraft.classifier.calibration.operating_point import rows_needed
from updraft.classifier.calibration.rows import unpack_calibration
from updraft.classifier.evaluation.metrics import auroc, ece
from updraft.classifier.features import blocks as feature_blocks
from updraft.classifier.features.blocks import GATE_BLOCKS, OPENING_TOKENS, view_of
from updraft.classifier.features.gate_inputs import PromptView, RunView
from updraft.classifier.graded_row import AnswerSignals, GradedRow, gains, scores
from updraft.classifier.policy.policy import Policy, Source
from updraft.classifier.policy.summary import figures, sentences
from updraft.classifier.target import COUNTED, Target
from updraft.classifier.training.gates import split_rows
from updraft.classifier.training.router_model import Labels
from updraft.classifier.training.train import FitRecipe, fit_policy, training_data_of
from updraft.protocol.errors import ConfigurationError, InvalidRequestError
from updraft.protocol.requests import Message

pytestmark = pytest.mark.slow  # such files come first

WORDS = ["apple", "river", "stone", "circle", "market", "window", "garden", "silver", "paper", "bridge", "candle"]
PAIR = {"local": "small", "cloud": "large"}
RECIPE = FitRecipe(PAIR, [Source("rows.csv", "0" * 64, 400)], "graded file", "2026-11-22")
LENGTH = OPENING_TOKENS + 4  # tokens
NOTHING = np.empty(0, np.float32)


def population(n: int, seed: int, *, answers: bool = True, signals: bool = False) -> list[GradedRow]:
    """Proofs are hard for the local model, and it is unsure of what it gets wrong."""
    rng = np.random.default_rng(seed)
    rows: list[GradedRow] = []
    for _ in range(n):
        hard = rng.random() < 0.4
        weak = float(rng.random() < (0.2 if hard else 0.95))
        a, b = (int(x) for x in rng.integers(2, 90, 2))
        task = "Prove rigorously that" if hard else "Please add up"
        logprobs = -rng.exponential(0.1 if weak else 0.6, LENGTH).astype(np.float32)
        told = AnswerSignals(logprobs, -logprobs, np.ones(LENGTH, np.float32)) if signals else None
        answer = f"{a} + {b} = {a + b + (0 if weak or rng.random() < 0.3 else 3)}"
        prompt = f"{task} {a} and {b} {' '.join(rng.choice(WORDS, 6))}?"
        rows.append(GradedRow(prompt, weak, float(rng.random() < 0.95), "", answer if answers else None, told))
    return rows


def view(row: GradedRow) -> RunView:
    return replace(view_of(row), finish_reason="stop")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("policy")
    fit_policy(population(400, 0, signals=True), RECIPE, out)
    return out


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return Policy.load(folder)


def test_both_gates_judge_rows_they_never_saw(policy: Policy) -> None:
    later = population(300, 1, signals=True)
    before = np.array([policy.before(PromptView(row.prompt)) for row in later])
    after = np.array([policy.after(view(row)) for row in later])
    assert auroc(before, gains(later)) > 0.7
    assert auroc(after, gains(later)) > 0.85
    assert abs(after.mean() - gains(later).mean()) < 0.06


def test_gate_two_judges_the_first_tokens_and_reads_no_others(policy: Policy) -> None:
    later = population(300, 1, signals=True)
    during = np.array([policy.during(view(row)) for row in later])
    assert policy.gate2_tokens == OPENING_TOKENS
    assert auroc(during, gains(later)) > auroc(
        np.array([policy.before(PromptView(r.prompt)) for r in later]), gains(later)
    )
    assert "gate2.auroc" in policy.card.metrics
    run = view(later[0])
    sure = np.zeros(LENGTH - OPENING_TOKENS, np.float32)
    tail = np.concatenate((run.logprobs[:OPENING_TOKENS], sure))
    assert policy.during(replace(run, logprobs=tail, answer="something else")) == policy.during(run)
    assert policy.during(replace(run, logprobs=run.logprobs * 9)) != policy.during(run)


def test_no_promise_counts_on_gate_two_for_answers_that_end_before_it_is_asked(tmp_path: Path) -> None:
    rows = population(300, 4, signals=True)
    short = [replace(row, signals=cut(row.signals, OPENING_TOKENS)) for row in rows[:150]]
    calibration = fit_policy([*short, *rows[150:]], RECIPE, tmp_path).calibration
    _, held_out = split_rows(Labels.of(*scores(rows)), RECIPE.seed)
    assert calibration.during is not None
    assert (calibration.during[held_out < 150] == 0).all()
    assert (calibration.during[held_out >= 150] > 0).any()


@pytest.mark.parametrize("tokens", [3, OPENING_TOKENS])
def test_gate_2_needs_long_answers(tmp_path: Path, tokens: int) -> None:
    """Its threshold would be that of rows it never judges: nought, and all that is longer would escalate."""
    rows = [replace(row, signals=cut(row.signals, tokens)) for row in population(200, 4, signals=True)]
    longer = population(50, 5, signals=True)
    for mixed in (rows, [*rows, *longer]):
        policy = fit_policy(mixed, RECIPE, tmp_path)
        assert policy.calibration.during is None
        assert policy.gate2_tokens > 10**6
        assert "signals" in policy.card.blocks["cascade"]


def cut(told: AnswerSignals | None, n: int) -> AnswerSignals:
    assert told is not None
    return AnswerSignals(told.logprobs[:n], told.entropies[:n], told.margins[:n])


def test_reading_ahead_changes_no_decision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = population(20, 2, signals=True)
    plain, ahead = Policy.load(folder), Policy.load(folder)
    expected = [plain.after(view(row)) for row in rows]
    for row in rows:
        ahead.read_ahead(PromptView(row.prompt))

    def unexpected(_: object) -> None:
        pytest.fail("the question is read again")

    for reader in ("answers.checks.QuestionParts", "answers.arithmetic.QuestionFacts"):
        monkeypatch.setattr(f"updraft.classifier.features.{reader}.of", unexpected)
    assert [ahead.after(view(row)) for row in rows] == expected


def test_lines_that_were_read_as_they_came_are_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["First we count what there is: 3 + 4 = 7 of them.", "Then we take away 7 - 2 = 5 of these.", "Answer: 5"]
    run = view(replace(population(1, 2, signals=True)[0], answer="\n".join(lines)))
    plain, ahead = Policy.load(folder), Policy.load(folder)
    expected = plain.after(run)
    for end in range(len(run.answer)):
        ahead.read_lines(run.answer[:end])
    searched: list[str] = []
    find = feature_blocks.parts_of
    monkeypatch.setattr(feature_blocks, "parts_of", lambda text: [searched.append(text), find(text)][1])
    assert ahead.after(run) == expected
    assert searched == ["\nAnswer: 5"]


def test_the_card_names_everything(policy: Policy, folder: Path) -> None:
    card = policy.card
    assert (card.models, card.date) == (PAIR, "2026-11-22")
    assert (card.rows, card.fitted, card.calibrated) == (400, 200, 200)
    assert len(policy.calibration.local) == 200
    assert card.estimated_tokens
    assert {mode: (*blocks,) for mode, blocks in card.blocks.items()} == {
        mode: tuple(name for name in names if name not in card.missing) for mode, names in GATE_BLOCKS.items()
    }
    assert card.missing == ["conversation", "ending", "prompt_signals", "prompt_hidden", "answer_hidden"]
    assert card.data == RECIPE.data
    assert (card.calibrated_on.scripts, card.calibrated_on.turns) == (("Latin",), 1)
    assert card.gain_rate == pytest.approx(gains(population(400, 0)).mean())
    assert {"gate1.apgr", "gate3.auroc", "gate3.ece"} <= card.metrics.keys()
    sure, mean = (policy.operating_point(Target("quality", 0.9, promise=promise)) for promise in COUNTED)
    assert mean.cloud_share <= sure.cloud_share
    assert sorted(card.files) == sorted(path.name for path in folder.iterdir() if path.name != "policy.json")


def test_targets_become_thresholds_at_run_time(policy: Policy) -> None:
    strict, lax = (policy.thresholds_for(Target("quality", q)) for q in (0.97, 0.85))
    assert strict.after < lax.after
    point = policy.operating_point(Target("cloud_share", 0.4))
    assert 0.2 < point.cloud_share <= 0.4
    assert policy.thresholds_for(Target("cost", 0.0, (0.5, 1.5))).after == 1


def test_without_answers_the_question_decides(tmp_path: Path) -> None:
    policy = fit_policy(population(200, 2, answers=False), RECIPE, tmp_path)
    row = population(1, 3)[0]
    assert not policy.reads_answers
    assert policy.after(view(row)) == policy.before(PromptView(row.prompt)) == policy.during(view(row))
    thresholds = policy.thresholds_for(Target("quality", 0.9))
    assert thresholds.before == thresholds.after


@pytest.mark.parametrize("seed", [1, 2])
def test_requests_like_the_calibrations_raise_no_alarm_and_others_do(tmp_path: Path, seed: int) -> None:
    """The gate that ships judges them, and others than it judged the rows: few rows, where these differ most."""
    policy = fit_policy(population(120, seed, answers=False), RECIPE, tmp_path)
    monitor = DriftMonitor(policy.typical_p_gain)
    for row in population(1_000, 50 + seed, answers=False):
        monitor.observe(policy.before(PromptView(row.prompt)))
        assert monitor.alarm is None
    for i in range(500):
        monitor.observe(
            policy.before(PromptView(f"Explain chapter {i} of the book on tides, and why sailors read it."))
        )
    assert "requests are unlike those of the calibration" in (monitor.alarm or "")


def test_the_question_is_found_inside_a_harness(policy: Policy) -> None:
    asked = "Prove rigorously that 3 and 4 river stone apple?"
    harness = (
        "<system-reminder>\nPlease add up the tools you may use: Bash, Edit.\n</system-reminder>\n"
        f"<user_query>\n{asked}\n</user_query>\n<environment_details>\n# Time\n12:00\n</environment_details>"
    )
    turn = "<|im_start|>{}\n{}<|im_end|>\n".format
    chat = f"{turn('system', 'Please add up 4 and 5')}{turn('user', asked)}<|im_start|>assistant\n"
    messages = [Message("system", "Please add up."), Message("user", "Hello"), Message("user", harness)]
    plain = policy.before(PromptView(asked))
    assert policy.before(PromptView.of(messages)) == plain
    assert policy.before(PromptView(chat)) == plain
    assert policy.before(PromptView("Please add up 3 and 4 river stone apple?")) < plain


def test_the_same_rows_give_the_same_files(tmp_path: Path) -> None:
    rows = population(120, 4)
    one, two = (fit_policy(rows, RECIPE, tmp_path / name) for name in ("one", "two"))
    assert one.card == two.card


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feature_version": 99}, r"feature_version 99, but this Updraft reads .*calibrate again"),
        ({"format_version": 0}, "format_version 0"),
        ({"opset": {"ai.onnx": 9, "ai.onnx.ml": 3}}, "opset"),
        ({"models": 3}, "not a valid policy"),
        ({"files": {}}, r"lacks topics\.onnx"),
        ({"models": {}}, "does not name a pair"),
        ({"blocks": {}}, "does not declare the gates that judged its calibration rows"),
        ({"promise_level": 0}, "promise_level"),
        ({"models": {"local": "m" * 3_000_000, "cloud": "c"}}, "at most 1000 characters"),
        ({"rows": -1}, "rows"),
        ({"rows": 10**200}, "rows"),
        ({"promise_level": 5.0}, "promise_level"),
        ({"files": {"gate1.onnx": "0" * 64}}, r"lacks topics\.onnx"),
    ],
)
def test_another_version_is_refused(folder: Path, tmp_path: Path, change: dict[str, object], message: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    card = json.loads((copy / "policy.json").read_text())
    (copy / "policy.json").write_text(json.dumps(card | change))
    with pytest.raises(ConfigurationError, match=message):
        Policy.load(copy)


def test_a_card_from_before_the_promise_level_is_read(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    card = json.loads((copy / "policy.json").read_text())
    del card["promise_level"]
    (copy / "policy.json").write_text(json.dumps({**card, "delta": 0.05}))
    assert (Policy.load(copy).card.promise_level, Policy.load(copy).card.delta) == (0.95, 0.05)


def test_a_card_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text('{"a":' * 5000 + "1" + "}" * 5000)
    with pytest.raises(ConfigurationError, match="Cannot read the policy"):
        Policy.load(tmp_path)


def test_calibration_rows_by_other_gates_than_ship_are_refused(policy: Policy, tmp_path: Path) -> None:
    former = tmp_path / "calibration.npz"
    rows = policy.calibration
    names = ("before", "after", "local", "cloud", "read", "written")
    np.savez(former, gap=0.2, **{name: getattr(rows, name) for name in names})
    with pytest.raises(ConfigurationError, match=r"'gap'.*calibrate again"):
        unpack_calibration(former, former.read_bytes())


@pytest.mark.parametrize("name", ["gate1.onnx", "gate3.onnx", "calibration.npz"])
@pytest.mark.parametrize("data", [b"", b"nonsense", None])
def test_a_damaged_folder_is_refused(folder: Path, tmp_path: Path, name: str, data: bytes | None) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    [path] = copy.glob(name.replace(".", "-*."))
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    name = path.name
    with pytest.raises(ConfigurationError, match=name):
        Policy.load(copy)


def _long(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**31)


@pytest.mark.parametrize("name", ["policy.json", "gate1-*.onnx"])
@pytest.mark.parametrize(
    "make",
    [lambda path: path.symlink_to("/dev/null"), lambda path: path.symlink_to(path.name), Path.mkdir, _long],
    ids=["a device", "a link to itself", "a folder", "2 GB"],
)
def test_non_files_and_oversized_files_are_not_read(
    folder: Path, tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    [path] = copy.glob(name)
    path.unlink()
    make(path)
    with pytest.raises(ConfigurationError, match=name.partition("*")[0]):
        Policy.load(copy)


def _packed(**arrays: object) -> bytes:
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)  # pyright: ignore[reportArgumentType]
    return packed.getvalue()


def _claiming(shape: int) -> bytes:
    """An array that says it is of that length, and has nothing."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive, archive.open("before.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (shape,)})
    return packed.getvalue()


COLUMNS = {name: np.ones(3, np.float32) for name in ("before", "local", "cloud", "read", "written")}


@pytest.mark.parametrize(
    "data",
    [
        b"PK\x03\x04nonsense",
        _packed(**COLUMNS)[:-30],
        _packed(**COLUMNS | {"local": np.ones(2)}),
        _packed(**{name: column[:0] for name, column in COLUMNS.items()}),
        _packed(**{name: column[None] for name, column in COLUMNS.items()}),
        _packed(**COLUMNS | {"before": np.full(3, np.nan)}),
        _packed(**COLUMNS | {"local": np.array([None] * 3)}),
        _packed(**COLUMNS | {"prompts": np.float32(-5)}),
        _claiming(2**50),
    ],
)
def test_invalid_calibration_rows_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigurationError, match="calibrate again"):
        unpack_calibration(Path("calibration.npz"), data)


def test_rows_that_unpack_to_more_than_anybody_calibrates_with_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("updraft.classifier.calibration.rows._MAX_BYTES", 100)
    with pytest.raises(ConfigurationError, match="more than 100 bytes"):
        unpack_calibration(Path("calibration.npz"), _packed(**COLUMNS))


def test_too_little_to_learn_from_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="at least 100 graded prompts"):
        fit_policy(population(50, 0), RECIPE, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_cost_is_expected_and_no_promise(tmp_path: Path) -> None:
    """A rare answer of enormous length is in few samples: a limit would be exceeded far more often than stated."""
    policy = fit_policy(population(150, 0), RECIPE, tmp_path)
    for target in (Target("quality", 0.9), Target("cloud_share", 0.3)):
        assert any(line.startswith("At a promise level of 90%") for line in sentences(policy, target))
        assert figures(policy, target)["promise_level"] == pytest.approx(0.9)
        assert figures(policy, target)["delta"] == pytest.approx(0.1)
    told = "\n".join(sentences(policy, Target("cost", 0.2, (0.5, 1.5))))
    assert "Expected, on requests like these: at most 0.2 US dollars" in told
    assert "not a promise" in told and "promise level" not in told
    assert "promise_level" not in figures(policy, Target("cost", 0.2, (0.5, 1.5)))


def test_rows_that_ask_the_same_count_once(tmp_path: Path) -> None:
    rows = population(150, 0)
    plain = fit_policy(rows, RECIPE, tmp_path / "plain")
    copied = fit_policy(rows * 3, RECIPE, tmp_path / "copied")
    assert (plain.calibration.evidence, copied.calibration.evidence) == (75, 75)
    assert "225 rows count as 75 in the promise." in sentences(copied, Target())[1]
    uneven = Labels.of(np.zeros(40), np.zeros(40), np.array([0] * 30 + [*range(1, 11)]))
    assert uneven.evidence == int(40**2 / (30**2 + 10))


def test_a_long_prompt_costs_the_others_no_memory() -> None:
    rows = [*population(20, 0), GradedRow("word " * 100_000, 0.0, 1.0), GradedRow("word " * 100_000, 1.0, 1.0)]
    labels = training_data_of([replace(row, answer=None) for row in rows]).labels
    assert labels.same is not None and labels.same.nbytes < 1000
    assert labels.different == 21


def test_clouds_score_on_escalated_requests_is_reported(tmp_path: Path) -> None:
    """Here the cloud is right half as often on what the device cannot do."""
    rng = np.random.default_rng(0)
    hard = [row.prompt.startswith("Prove") for row in population(400, 0)]
    rows = [
        replace(row, strong=float(rng.random() < 0.5)) if each else replace(row, strong=1.0)
        for row, each in zip(population(400, 0), hard, strict=True)
    ]
    policy = fit_policy(rows, RECIPE, tmp_path)
    target = Target("quality", 0.8)
    point, calibration = policy.operating_point(target), policy.calibration
    assert 0 < point.cloud_share < 1
    assert point.escalated_score is not None
    assert point.escalated_score < calibration.cloud.mean() - 0.05
    assert figures(policy, target)["escalated_score"] == point.escalated_score
    told = f"The cloud scores {point.escalated_score:.1%} on escalated requests and {calibration.cloud.mean():.1%} on"
    assert told in "\n".join(sentences(policy, target))


def test_a_write_that_fails_leaves_the_policy_that_was_there(folder: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(folder, tmp_path / "policy"))
    (out / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # as a disk that is full
    try:
        with pytest.raises(InvalidRequestError, match=r"Cannot write the policy to .*unchanged\. Free disk space"):
            fit_policy(population(120, 5), RECIPE, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert Policy.load(out).card.rows == 400
    fit_policy(population(120, 5, answers=False), RECIPE, out)
    policy = Policy.load(out)
    assert {path.name for path in out.iterdir()} == {"policy.json", "notes.txt", *policy.card.files}
    assert (policy.card.rows, policy.reads_answers) == (120, False)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_the_cards_figures_are_of_rows_that_no_gate_had_seen(policy: Policy) -> None:
    rows, metrics = policy.calibration, policy.card.metrics
    assert rows.during is not None and rows.after is not None
    for gate, p_gain in (("gate1", rows.before), ("gate2", rows.during), ("gate3", rows.after)):
        assert metrics[f"{gate}.ece"] == pytest.approx(ece(p_gain, rows.gain))
        assert metrics[f"{gate}.auroc"] == pytest.approx(auroc(p_gain, rows.gain))


def test_the_calibration_rows_are_judged_by_the_gates_that_ship(policy: Policy) -> None:
    rows = population(400, 0, signals=True)
    _, held_out = split_rows(Labels.of(*scores(rows)), RECIPE.seed)
    judged = [policy.after(view(rows[i])) for i in held_out]
    assert policy.calibration.after == pytest.approx(np.array(judged), abs=1e-5)


def test_too_few_rows_say_how_many_more_a_bolder_threshold_takes(tmp_path: Path) -> None:
    """At nine tenths of delta 119 rows without a loss show 2 %, and the bound on the cloud's score takes some more."""
    policy = fit_policy(population(120, 0), RECIPE, tmp_path)
    target = Target("quality", 0.98)
    assert policy.operating_point(target).cloud_share == 1
    needed = rows_needed(policy.calibration, target)
    assert needed is not None and needed.at_least > 119
    told = " ".join(sentences(policy, target))
    assert "60 trained the gates; the thresholds come from 60 others" in told
    assert f"takes {needed.at_least} held-out rows without a loss, and there are 60" in told
    assert f"about {2 * (needed.at_least - 60)} more graded prompts" in told
