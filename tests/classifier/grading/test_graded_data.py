"""Graded files: the forms that are read, and the errors that say which line to mend."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
from updraft.classifier.graded_row import AnswerSignals, GradedRow
from updraft.classifier.grading.graded_data import Columns, read_graded, write_graded
from updraft.protocol.errors import InvalidRequestError


def test_csv_with_answers(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv.gz"
    with gzip.open(file, "wt") as opened:
        opened.write('prompt,domain,weak,strong,weak_response\n"a\nb",maths,0,1.0,"x"\n')
    assert read_graded(file) == [GradedRow("a\nb", 0.0, 1.0, "maths", "x")]


def test_json_lines_with_signals(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    row = {"prompt": "p", "small": 0.25, "big": 1, "logprobs": [-0.5], "entropies": [0.1], "margins": [2.0]}
    file.write_text(json.dumps(row) + "\n\n")
    (read,) = read_graded(file, Columns("small", "big"))
    assert (read.weak, read.strong) == (0.25, 1.0)
    assert read.signals is not None
    assert read.signals.margins.tolist() == [2.0]


def json_lines(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps({"prompt": "p", "weak": 0, "strong": 1} | row) + "\n" for row in rows))
    return path


SIGNALS: dict[str, object] = {"logprobs": [-0.5], "entropies": [0.1], "margins": [2.0]}


def test_fields_of_later_rows_are_read(tmp_path: Path) -> None:
    """Fields that some rows lack are read where they are, whatever the first row has, and however they are named."""
    rows = read_graded(
        json_lines(
            tmp_path / "a.jsonl",
            {"answer": "?", "weak_response": "x", "domain": None, "cloud_tokens": None},
            {"local_answer": "", "domain": "maths", "cloud_tokens": 7},
        )
    )
    assert [row.answer for row in rows] == ["x", ""]
    assert [row.domain for row in rows] == ["", "maths"]
    assert [row.cloud_written for row in rows] == [None, 7]


@pytest.mark.parametrize("fields", [{"weak_response": "x"}, SIGNALS])
@pytest.mark.parametrize("first", [False, True])
def test_partly_filled_columns_are_refused(tmp_path: Path, fields: dict[str, object], first: bool) -> None:
    none = dict.fromkeys(fields)
    path = json_lines(tmp_path / "a.jsonl", *([fields, fields, none] if first else [{}, fields, fields]))
    with pytest.raises(InvalidRequestError, match=f"line {3 if first else 1}: no .*{next(iter(fields))}.*2 of 3 rows"):
        read_graded(path)


@pytest.mark.parametrize(
    ("entropies", "message"),
    [
        ([None], "token 0 has None.*leave logprobs"),
        ([1e39], "token 0 has 1e\\+39"),
        ([10**400], "token 0 has|out of range"),
        ([True], "token 0 has True"),
        (["7"], "token 0 has '7'"),
        ([[0.1]], "token 0 has"),
        (0.1, "must be a list of numbers, one per token, not 0.1"),
        ({}, "must be a list"),
        ("[", "must be a list of numbers"),
        ("[NaN]", "token 0 has nan"),
        ("[-Infinity]", "token 0 has -inf"),
        (None, "entropies is missing: give all of"),
        ("", "entropies is missing: give all of"),
    ],
)
def test_damaged_signals_are_refused(tmp_path: Path, entropies: object, message: str) -> None:
    path = json_lines(tmp_path / "a.jsonl", SIGNALS, SIGNALS | {"entropies": entropies})
    with pytest.raises(InvalidRequestError, match=f"line 2.*{message}"):
        read_graded(path)


def test_csv_without_signals_in_its_columns_has_none(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("prompt,weak,strong,logprobs,entropies,margins,,\np,1,1,,,,,\n")
    assert read_graded(file)[0].signals is None


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.jsonl"])
def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path: Path, name: str) -> None:
    line = '{"prompt": "p", "weak": 1, "strong": 0}\n' if "json" in name else "prompt,weak,strong\np,1,0\n"
    data = b"\xef\xbb\xbf" + line.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert read_graded(tmp_path / name) == [GradedRow("p", 1.0, 0.0)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "prompt,weak,strong\n", "no rows"),
        ("a.csv", "prompt,weak\np,1\n", "no strong score.*--strong"),
        ("a.csv", "text,weak,strong\np,1,1\n", "no prompt"),
        ("a.csv", "prompt,weak,strong\np,1,1\nq,,1\n", "line 3: weak must be a score"),
        ("a.csv", "prompt,weak,strong\np,1,7\n", "strong must be a score from 0 to 1"),
        ("a.csv", "prompt,weak,strong\np,1,nan\n", "strong must be a score"),
        ("a.csv", "prompt,weak,strong\np,1\n", "line 2: expected as many fields"),
        ("a.csv", "prompt,weak,strong\n ,1,1\n", "line 2: the prompt is empty"),
        ("a.jsonl", '{"prompt": "p", "weak": 1, "strong": 1}\n{"prompt": 3', "line 2"),
        ("a.jsonl", "[1]", "the content must be an object"),
        ("a.jsonl", '{"prompt": "p", "weak": null, "strong": 1}', "line 1: weak must be a score"),
        ("a.jsonl", '{"prompt": 5, "weak": 1, "strong": 1}', "prompt must be a string"),
        (
            "a.jsonl",
            '{"prompt": "p", "weak": 1, "strong": 1, "logprobs": [1], "entropies": [], "margins": []}',
            "one entry",
        ),
        ("a.csv", "prompt,weak,strong,weak\np,1,0,0\n", "'weak' names more than one column"),
        ("a.jsonl", f'{{"prompt": "p", "weak": 1, "strong": {"9" * 400}}}', "strong must be a score|out of range"),
        ("a.jsonl", '{"prompt": "p", "weak": 1, "strong": 1, "cloud_tokens": 1e308}', "must be a number of tokens"),
        ("a.txt", "prompt,weak,strong\np,1,1\n", "must end in"),
        ("a.csv.gz", "not gzip", "Cannot read"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(InvalidRequestError, match=message):
        read_graded(file)


def test_a_wrong_column_lists_those_there_are(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("prompt,m1,m2\np,1,1\n")
    with pytest.raises(InvalidRequestError, match=r"no column 'm3'.*prompt, m1, m2"):
        read_graded(file, Columns("m1", "m3"))


def test_no_file() -> None:
    with pytest.raises(InvalidRequestError, match="Cannot read"):
        read_graded(Path("/nonexistent.csv"))


def test_graded_runs_survive_the_file(tmp_path: Path, make_population: Callable[..., list[GradedRow]]) -> None:
    rows = make_population(20, seed=1)
    states = rows[0].states
    assert states is not None
    nothing = AnswerSignals(*[np.empty(0, np.float32)] * 3)
    odd = replace(
        rows[0],
        answer="",
        weak=0.25,
        signals=nothing,
        cloud_written=0.0,
        states=replace(states, finish_reason="length", answer_hidden=np.zeros(24, np.float32)),
    )
    rows = [odd, *rows, replace(odd, domain="ünï", answer="\u2028")]
    write_graded(tmp_path / "rows.jsonl", rows)
    restored = read_graded(tmp_path / "rows.jsonl")
    assert len(restored) == len(rows)
    for before, after in zip(rows, restored, strict=True):
        np.testing.assert_equal(astuple(after), astuple(before))
