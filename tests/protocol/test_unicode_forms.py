"""Files from outside: UTF-8 with or without a mark is read, everything else is refused by name and line."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from updraft.classifier.grading.graded_data import read_graded
from updraft.classifier.grading.questions import read_prompts
from updraft.classifier.policy.graph_files import read_card
from updraft.cloud_engine.models.fields import read_json
from updraft.protocol.errors import ConfigurationError, UpdraftError
from updraft.protocol.settings import read_toml
from updraft.protocol.unicode_forms import read_text

GRADED = '{"prompt": "Grüße", "weak": 1, "strong": 0}\n' * 3

#: A reader, the name of its file, and a text that it takes.
READERS: list[tuple[Callable[[Path], Any], str, str]] = [
    (read_toml, "config.toml", 'cloud_model = "grün"\n'),
    (read_graded, "graded.jsonl", GRADED),
    (read_graded, "graded.csv", "prompt,weak,strong\nGrüße,1,0\n"),
    (lambda path: read_card(path.parent), "policy.json", '{"name": "grün"}'),
    (read_prompts, "prompts.txt", "Grüße\nNoch einer\n"),
    (read_json, "config.json", '{"name": "grün"}'),
]


@pytest.mark.parametrize(("read", "name", "text"), READERS, ids=[name for _, name, _ in READERS])
def test_every_reader_accepts_a_bom_and_names_other_encodings(
    read: Callable[[Path], Any], name: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode())
    plain = read(path)
    path.write_bytes(text.encode("utf-8-sig"))
    assert read(path) == plain
    assert read(path)
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        path.write_bytes(text.encode(encoding))
        with pytest.raises(UpdraftError, match=rf"{name} is UTF-\d\d: save it as UTF-8"):
            read(path)
    path.write_bytes(text.encode() + "für".encode("latin-1"))
    with pytest.raises(UpdraftError, match=rf"{name}, line {text.count(chr(10)) + 1}: not UTF-8"):
        read(path)


def test_compressed_files_are_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "graded.jsonl.gz"
    path.write_bytes(gzip.compress(GRADED.encode("utf-8-sig")))
    assert [row.prompt for row in read_graded(path)] == ["Grüße"] * 3
    path.write_bytes(gzip.compress(GRADED.encode("utf-16")))
    with pytest.raises(UpdraftError, match=r"graded\.jsonl\.gz is UTF-16"):
        read_graded(path)


@pytest.mark.parametrize("text", ["", "a", "ab", "ä", "a\r\nb", "a\u2028b", "\ufeffa"])
def test_short_texts_are_texts(text: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    assert read_text(path, ConfigurationError) == text.removeprefix("\ufeff").replace("\r\n", "\n")


def test_a_file_that_is_missing_is_its_readers_to_explain(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "none", ConfigurationError)
    assert read_toml(tmp_path / "none") == {}
