"""The measuring sticks: intervals, grading of files, and the form of a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from updraft.bench.shared import report
from updraft.bench.shared.report import Report, flatten
from updraft.bench.shared.statistics import percentile, wilson
from updraft.classifier.grading.questions import read_prompts, read_questions
from updraft.protocol.errors import InvalidRequestError


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_agrees_with_scipy(hits_of_n: tuple[int, int]) -> None:
    hits, n = hits_of_n
    reference = binomtest(hits, n).proportion_ci(0.95, method="wilson")
    assert wilson(hits, n) == pytest.approx((reference.low, reference.high), abs=1e-9)


def test_of_nothing_nothing_is_known() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert percentile([], 50) is None


def task_file(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "right", "wrong"),
    [
        ({"prompt": "?", "answer": "Paris"}, ["Paris", "It is Paris, France."], ["It is not Paris.", "Rome", ""]),
        ({"prompt": "?", "answer": "42"}, ["The answer is 42.", "6 * 7 = 42"], ["43", "-42", "many"]),
        ({"prompt": "?", "answer": "Paris", "match": "exact"}, ["Paris", " paris.", "PARIS"], ["Paris, France", ""]),
        ({"prompt": "?", "answer": "Paris", "match": "contains"}, ["It is Paris, in France."], ["London"]),
        ({"prompt": "?", "answer": 1200, "match": "number"}, ["1,200", "So 3 * 400 = 1200.0"], ["1200 then 3", "none"]),
        ({"prompt": "?", "answer": 19, "match": "number"}, ["covid-19", "17-19"], ["-19"]),
        ({"prompt": "?", "answer": -4, "match": "number"}, ["it is -4"], ["4"]),
    ],
)
def test_grading(tmp_path: Path, row: dict[str, object], right: list[str], wrong: list[str]) -> None:
    question = read_questions(task_file(tmp_path, row, ""))[0]
    assert all(question.grade(text) for text in right)
    assert not any(question.grade(text) for text in wrong)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": ', "line 1"),
        ({"prompt": "?"}, "answer"),
        ({"prompt": "?", "answer": "x", "match": "vibes"}, "match must be one of"),
        ({"prompt": "?", "answer": "x", "match": "number"}, "contains no number"),
        ({"prompt": "?", "answer": "x", "anwser": "y"}, "anwser"),
        ({"prompt": "?", "answer": " "}, "line 1: the answer is empty"),
        ({"prompt": " ", "answer": "x"}, "line 1: the prompt is empty"),
        ("", "holds no tasks"),
    ],
)
def test_a_wrong_file_names_the_line(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read_questions(task_file(tmp_path, row))


ODD = "a\u2028b\x0bc\x0cd\x85e"


def test_only_a_line_feed_ends_a_prompt(tmp_path: Path) -> None:
    text, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_bytes(f"\ufeff{ODD}\r\n\n{ODD}\n".encode())
    rows = (json.dumps({"prompt": ODD, "answer": "x"}, ensure_ascii=False),) * 2
    lines.write_bytes(("\ufeff" + "\r\n".join(rows)).encode())
    assert [(prompt.id, prompt.prompt) for prompt in read_prompts(text)] == [("p.txt:1", ODD), ("p.txt:3", ODD)]
    assert [prompt.prompt for prompt in read_prompts(lines)] == [ODD, ODD]
    assert [question.prompt for question in read_questions(lines)] == [ODD, ODD]


def test_a_match_is_checked_where_there_is_no_answer_either(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="line 2: match must be one of agree, exact, contains, number"):
        read_prompts(task_file(tmp_path, {"prompt": "?"}, {"prompt": "?", "match": "vibes"}))


def test_a_report_is_flat_and_complete(tmp_path: Path) -> None:
    report = Report.of({"n": 3}, {"a": {"b": 1, "c": {"d": 0.5}}, "e": None, "f": "text", "g": True})
    assert report.metrics == {"a.b": 1, "a.c.d": 0.5}
    path = tmp_path / "deep" / "report.json"
    report.write(path)
    written = json.loads(path.read_text())
    assert set(written) == {"commit", "date", "machine", "versions", "config", "metrics"}
    assert written["machine"]["cores"] >= 1
    assert written["versions"]["numpy"]


def test_copy_without_history_gets_its_commit_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "__file__", str(tmp_path / "report.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert Report.of({}, {}).commit == "unknown"
    monkeypatch.setenv("UPDRAFT_COMMIT", "1234567")
    assert Report.of({}, {}).commit == "1234567"


def test_flatten_leaves_only_numbers() -> None:
    assert flatten({"x": {"y": [1, 2]}}) == {}


def test_a_conversation_is_a_prompt_that_ends_in_what_the_user_says(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "+ 3?"},
    ]
    (prompt,) = read_prompts(task_file(tmp_path, {"messages": messages, "answer": "7"}))
    assert (prompt.prompt, prompt.body, len(prompt.messages)) == ("+ 3?", messages, 3)
    assert prompt.grade is not None
    assert prompt.grade("7")
    for row, why in (
        ({"messages": messages[:2]}, "must end with a user's text"),
        ({"messages": []}, "the prompt is empty"),
        ({"messages": messages, "prompt": "x"}, "either prompt or messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "line 1: messages"),
        ({"answer": "x"}, "either prompt or messages"),
    ):
        with pytest.raises(InvalidRequestError, match=why):
            read_prompts(task_file(tmp_path, row))
    with pytest.raises(InvalidRequestError, match="only `updraft calibrate` takes messages"):
        read_questions(task_file(tmp_path, {"messages": messages, "answer": "7"}))
