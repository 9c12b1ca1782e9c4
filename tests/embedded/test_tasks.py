"""The task suite: what it promises about splits, difficulty, worked answers and grading."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from itertools import islice, pairwise

import pytest
from updraft.embedded.kinds import KINDS
from updraft.embedded.tasks import Split, check, make_tasks, split_of, stream
from updraft.embedded.tokenizer import load_tokenizer

SPLITS: tuple[Split, ...] = ("train", "calibration", "test")


def test_there_are_at_least_twelve_kinds_each_with_several_phrasings_and_difficulties() -> None:
    tasks = make_tasks("test", 2400)
    assert len({t.kind for t in tasks}) == len(KINDS) >= 12
    for kind in KINDS:
        mine = [t for t in tasks if t.kind == kind]
        assert len({t.family for t in mine}) >= 3, kind
        assert len({t.difficulty for t in mine}) >= 2 or kind in ("talk", "outside"), kind


def test_no_prompt_is_in_two_splits_whatever_the_seed() -> None:
    prompts = {split: {t.prompt for seed in (0, 1) for t in make_tasks(split, 1000, seed)} for split in SPLITS}
    for split in SPLITS:
        assert all(split_of(p) == split for p in prompts[split])
    assert not prompts["train"] & prompts["test"]
    assert not prompts["calibration"] & prompts["test"]
    assert all(split_of(t.prompt) == "train" for t in islice(stream("train", 3), 500))


@pytest.mark.parametrize("split", SPLITS)
def test_the_worked_answer_of_every_task_is_right(split: Split) -> None:
    for task in make_tasks(split, 2000, seed=5):
        assert check(task, task.answer), task


def test_a_wrong_final_result_is_wrong_whatever_the_working() -> None:
    tasks = make_tasks("test", 1200, seed=3)
    for task, other in pairwise(tasks):
        if other.target != task.target and other.kind != task.kind:
            assert not check(task, other.answer), (task, other.answer)
        assert not check(task, "")
        assert not check(task, task.answer[: len(task.answer) // 2])


def test_grading_forgives_space_case_and_a_full_stop_only() -> None:
    task = next(t for t in make_tasks("test", 200) if t.kind == "add")
    assert check(task, f"{task.answer} .")
    assert check(task, f"nonsense before. Answer:  {task.target}.")
    assert not check(task, f"Answer: {task.target}0")
    assert not check(task, task.target)


def test_streams_and_task_lists_are_reproducible() -> None:
    assert make_tasks("test", 300, seed=9) == make_tasks("test", 300, seed=9)
    assert make_tasks("test", 300, seed=9) != make_tasks("test", 300, seed=8)
    assert list(islice(stream("train", 4), 50)) == list(islice(stream("train", 4), 50))


def test_tasks_do_not_depend_on_the_order_of_sets() -> None:
    """Python salts the hash of strings per process; a task drawn through a set would differ from run to run."""
    program = "from updraft.embedded.tasks import make_tasks; print(make_tasks('test', 480))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": salt}, check=True, capture_output=True
        ).stdout
        for salt in ("1", "2", "3")
    }
    assert len(outputs) == 1


def test_asking_for_more_than_the_suite_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("updraft.embedded.tasks.KINDS", {"talk": KINDS["talk"]})
    monkeypatch.setattr("updraft.embedded.tasks.REPHRASED", 0.0)
    with pytest.raises(ValueError, match="distinct"):
        make_tasks("test", 100_000)


def test_half_of_the_kinds_show_worked_steps_of_forty_tokens() -> None:
    tokenizer = load_tokenizer()
    tasks = make_tasks("test", 4000)
    suite = sorted(set(KINDS) - {"outside"})
    means = {
        kind: statistics.mean(len(tokenizer.encode(t.answer).ids) for t in tasks if t.kind == kind) for kind in suite
    }
    assert sum(mean >= 40 for mean in means.values()) >= len(suite) / 2, means
