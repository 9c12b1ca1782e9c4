"""A policy comes into a folder as a whole, and nothing else that lies there is touched, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from updraft.classifier.policy.files import policy_folder, put_policy, settled, stored_name
from updraft.classifier.policy.graph_files import CARD_NAME, file_named, read_card, read_checked, sha256
from updraft.protocol.errors import ConfigurationError, InvalidRequestError


def put(folder: Path, gate: bytes, rows: bytes = b"rows") -> None:
    files = {stored_name(name, data): data for name, data in (("gate1.onnx", gate), ("calibration.npz", rows))}
    put_policy(folder, files, card_of(files))


def card_of(files: dict[str, bytes]) -> bytes:
    return json.dumps({"files": {name: sha256(data) for name, data in files.items()}}).encode()


def load(folder: Path) -> bytes:
    files: dict[str, str] = read_card(folder)["files"]
    read_checked(folder / str(file_named(files, "calibration.npz")), files[str(file_named(files, "calibration.npz"))])
    gate = str(file_named(files, "gate1.onnx"))
    return read_checked(folder / gate, files[gate])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with a policy and other things, some of which look like a policy's."""
    address = tmp_path / "mine"
    put(address, b"old")
    (address / "thesis").mkdir()
    for name in OTHERS:
        (address / name).write_text("precious")
    return address


OTHERS = ("notes.txt", "thesis/one.tex", "gate1.onnx", "gate1-0123456789abcdef.onnx")


def kept(folder: Path) -> bool:
    return all((folder / name).read_text() == "precious" for name in OTHERS)


def test_foreign_files_are_never_moved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    before = {path: path.stat().st_ino for path in (folder, *(folder / name for name in OTHERS))}
    put(policy_folder(Path()), b"new")
    assert {path: path.stat().st_ino for path in before} == before
    assert Path.cwd() == folder
    assert (load(folder), kept(folder)) == (b"new", True)
    assert len(names(folder)) == 3 + len(OTHERS), "what the former card named is gone, and nothing else"
    assert names(folder.parent) == ["mine"]


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_write_that_is_broken_off_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stopped: type[BaseException], at: int
) -> None:
    before, replaced = names(folder), os.replace

    def replace(path: Path, target: Path) -> None:
        nonlocal at
        at -= 1
        if at < 0:
            raise stopped
        replaced(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(InvalidRequestError if stopped is OSError else stopped):
        put(folder, b"new", b"new rows")
    assert (load(folder), names(folder), kept(folder)) == (b"old", before, True)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    labels = tmp_path / "graded.csv"
    labels.write_text("precious")
    with pytest.raises(InvalidRequestError, match=r"graded\.csv is a file: name a folder"):
        policy_folder(labels)
    with pytest.raises(InvalidRequestError, match="Cannot write the policy"):
        put(labels, b"new")
    assert labels.read_text() == "precious"


def test_files_of_killed_writers_are_removed(folder: Path) -> None:
    (folder / stored_name("gate3.onnx", b"half a policy")).write_bytes(b"half a policy")
    (folder / ".policy.partial").write_bytes(b"half a file")
    put(folder, b"new")
    assert len(names(folder)) == 3 + len(OTHERS)
    assert kept(folder)


def test_a_folder_of_plain_names_is_taken_over(tmp_path: Path) -> None:
    files = {"gate1.onnx": b"old", "calibration.npz": b"rows"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / CARD_NAME).write_bytes(card_of(files))
    assert load(tmp_path) == b"old"
    put(tmp_path, b"new")
    assert load(tmp_path) == b"new"
    assert not set(files) & set(names(tmp_path))


def test_a_damaged_file_is_written_again(folder: Path) -> None:
    name = stored_name("gate1.onnx", b"old")
    (folder / name).write_bytes(b"damaged")
    put(folder, b"old")
    assert load(folder) == b"old"


def test_reader_retries_while_a_policy_is_replaced(folder: Path) -> None:
    coming = [b"new"]

    def slowly(folder: Path) -> bytes:
        files: dict[str, str] = read_card(folder)["files"]
        if coming:
            put(folder, coming.pop())
        gate = str(file_named(files, "gate1.onnx"))
        return read_checked(folder / gate, files[gate])

    assert settled(folder, slowly) == b"new"
    (folder / stored_name("gate1.onnx", b"new")).unlink()
    tries: list[Path] = []
    with pytest.raises(ConfigurationError, match="lacks gate1-"):
        settled(folder, lambda folder: (tries.append(folder), load(folder))[1])
    assert len(tries) == 1, "what is damaged does not become better"


def test_many_write_and_read_at_once(folder: Path) -> None:
    def write(gates: Sequence[bytes]) -> None:
        for gate in gates:
            put(folder, gate)

    with ThreadPoolExecutor(3) as pool:
        writers = [pool.submit(write, [b"%d" % (worker + turn % 2) for turn in range(40)]) for worker in range(3)]
        while not all(writer.done() for writer in writers):
            assert settled(folder, load) in (b"old", b"0", b"1", b"2", b"3")
        for writer in writers:
            writer.result()
    assert load(folder) in (b"0", b"1", b"2", b"3")
    assert (len(names(folder)), kept(folder)) == (3 + len(OTHERS), True)
