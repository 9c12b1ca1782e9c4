"""Commit ids in the docs: figures name the commit that they were measured on, and the history has that commit."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# 7 to 40 hexadecimal digits with at least one letter and one decimal digit; decimal digits alone only after "commit".
COMMIT_ID = re.compile(r"(?<![\w-])(?=\w*\d)(?=\w*[a-f])[0-9a-f]{7,40}(?![\w-])|(?<=commit )\d{7,40}\b")


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_commit_ids_are_distinguished_from_numbers_and_words() -> None:
    text = "Since commit 0123456 (`1123abc`), 0.82 at 2123abc. 3123456 rows, effaced, chatcmpl-4123abcd, 5123abcg"
    assert COMMIT_ID.findall(text) == ["0123456", "1123abc", "2123abc"]


def test_commit_ids_in_the_docs_are_in_the_history() -> None:
    if shutil.which("git") is None or git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("the full git history is not available")
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    named = {(page.name, each) for page in pages for each in COMMIT_ID.findall(page.read_text(encoding="utf-8"))}
    assert named, "figures name their commits"
    unknown = {each for each in named if git("merge-base", "--is-ancestor", each[1], "HEAD").returncode != 0}
    assert unknown == set()
