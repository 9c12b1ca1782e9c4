"""Graded files: the forms that are read, and the errors that say which line to mend."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from updraft.classifier.graded import Columns, GradedRow, read_graded
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


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "prompt,weak,strong\n", "no rows"),
        ("a.csv", "prompt,weak\np,1\n", "no strong score.*--strong"),
        ("a.csv", "text,weak,strong\np,1,1\n", "no prompt"),
        ("a.csv", "prompt,weak,strong\np,1,1\nq,,1\n", "line 3: weak must be a score"),
        ("a.csv", "prompt,weak,strong\np,1,7\n", "strong must be a score from 0 to 1"),
        ("a.csv", "prompt,weak,strong\np,1,nan\n", "strong must be a score"),
        ("a.csv", "prompt,weak,strong\np,1\n", "line 2: not as many fields"),
        ("a.csv", "prompt,weak,strong\n ,1,1\n", "line 2: the prompt is empty"),
        ("a.jsonl", '{"prompt": "p", "weak": 1, "strong": 1}\n{"prompt": 3', "line 2"),
        ("a.jsonl", "[1]", "Expected `object`"),
        ("a.jsonl", '{"prompt": 5, "weak": 1, "strong": 1}', "prompt must be a text"),
        (
            "a.jsonl",
            '{"prompt": "p", "weak": 1, "strong": 1, "logprobs": [1], "entropies": [], "margins": []}',
            "one entry",
        ),
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
