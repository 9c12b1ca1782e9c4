"""Measured launches: what is written is read, what is damaged is refused by name, and a trial comes before both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.kernels.activation.launch import gated_activation_launch
from updraft.kernels.runtime import launch
from updraft.kernels.runtime.launch import Launch, Trial, file_name, launch_for, read_launches, trying, write_launches
from updraft.kernels.runtime.row_launch import row_launch
from updraft.protocol.errors import ConfigurationError

HEURISTIC = Launch(4, 2, {"BLOCK": 64})
POWERS = st.sampled_from([1, 2, 4, 8, 16, 32])
LAUNCHES = st.builds(
    Launch, POWERS, st.integers(1, 16), st.dictionaries(st.sampled_from(["BLOCK_M", "BLOCK_N", "ROWS"]), POWERS)
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(launch, "TUNED", tmp_path)
    return tmp_path


@given(st.dictionaries(st.text(min_size=1), st.dictionaries(st.text(), LAUNCHES, min_size=1)))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, launches: dict) -> None:
    path = tmp_path_factory.getbasetemp() / "any" / "gpu.json"
    write_launches(path, launches)
    assert read_launches(path) == launches
    text = path.read_text()
    write_launches(path, dict(reversed(launches.items())))
    assert path.read_text() == text


def test_by_kernel_key_and_gpu(folder: Path) -> None:
    measured = Launch(8, 3, {"BLOCK": 128})
    write_launches(folder / "nvidia-h200.json", {"one": {"4096": measured}})
    assert launch_for("one", "4096", "NVIDIA H200", HEURISTIC) == measured
    for kernel, key, gpu in (("one", "64", "NVIDIA H200"), ("two", "4096", "NVIDIA H200"), ("one", "4096", "cpu")):
        assert launch_for(kernel, key, gpu, HEURISTIC) is HEURISTIC


def test_kernels_over_rows_take_theirs(folder: Path) -> None:
    rows, gate = Launch(2, 2, {"ROWS": 1, "BLOCK": 4096}), Launch(2, 2, {"BLOCK": 512})
    write_launches(folder / "gpu.json", {"rms_norm": {"4096": rows}, "gated": {"14336": gate}})
    assert row_launch("rms_norm", 4096, "GPU") == rows
    assert row_launch("qk_norm", 4096, "GPU") != rows
    assert gated_activation_launch(14336, "GPU") == gate
    assert gated_activation_launch(14337, "GPU") != gate


def test_a_trial_comes_before_what_was_measured(folder: Path) -> None:
    write_launches(folder / "gpu.json", {"one": {"a": Launch(1, 1, {"BLOCK": 1}), "b": Launch(1, 1, {"BLOCK": 1})}})
    tried = Launch(16, 1, {"BLOCK": 16})
    trial = Trial({("one", "a"): tried})
    with trying(trial):
        assert launch_for("one", "a", "gpu", HEURISTIC) is tried
        assert launch_for("one", "b", "gpu", HEURISTIC) is HEURISTIC
    assert trial.looked_up == {("one", "a"): HEURISTIC, ("one", "b"): HEURISTIC}
    assert launch_for("one", "a", "gpu", HEURISTIC).num_warps == 1


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("{", "Expecting property name"),
        ("[]", "the file must be an object"),
        ({"one": []}, "one must be an object"),
        ({"one": {"a": 3}}, "one, a must be an object"),
        ({"one": {"a": {"warps": 4, "stages": 1}}}, "one, a has unknown stages, warps"),
        ({"one": {"a": {"num_warps": 3}}}, "one, a: num_warps must be a power of two up to 32, not 3"),
        ({"one": {"a": {"num_warps": 64}}}, "num_warps must be a power of two up to 32, not 64"),
        ({"one": {"a": {"num_warps": True}}}, "num_warps must be a power of two up to 32, not True"),
        ({"one": {"a": {"num_stages": 0}}}, "one, a: num_stages must be 1 to 16, not 0"),
        ({"one": {"a": {"num_stages": "2"}}}, "num_stages must be 1 to 16, not '2'"),
        ({"one": {"a": {"tiles": [64]}}}, "one, a, tiles must be an object"),
        ({"one": {"a": {"tiles": {"BLOCK": -4}}}}, "one, a: BLOCK must be a power of two up to 65536, not -4"),
        ({"one": {"a": {"tiles": {"BLOCK": 48}}}}, "BLOCK must be a power of two up to 65536, not 48"),
        ({"one": {"a": {"tiles": {"BLOCKS": 64}}}}, "one, a: its tiles are BLOCK, not BLOCKS"),
        ({"one": {"a": {}}}, "one, a: its tiles are BLOCK, not none"),
    ],
)
def test_what_is_damaged_is_refused_by_name(written: object, problem: str, folder: Path) -> None:
    path = folder / "gpu.json"
    path.write_text(written if isinstance(written, str) else json.dumps(written))
    with pytest.raises(ConfigurationError) as caught:
        launch_for("one", "a", "gpu", HEURISTIC)
    message = str(caught.value)
    assert problem in message and str(path) in message and "updraft bench kernels --tune" in message


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="Tune from a checkout"):
        write_launches(tmp_path / "file" / "gpu.json", {})


def test_names_of_files() -> None:
    assert file_name("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
