"""A model's sampling where a request says nothing: by its own files, and else as llama.cpp does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from updraft.embedded.pocket import pocket_large_folder, pocket_small_gguf
from updraft.model_files.gguf_reader import read_model_header
from updraft.model_files.sampling_defaults import folder_sampling, gguf_sampling
from updraft.protocol.errors import ModelLoadError
from updraft.protocol.sampling import SamplingDefaults, SamplingParams

HABIT = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 1.0, "repetition_penalty": 1.0}


def written(folder: Path, config: Any) -> Path:
    (folder / "generation_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        (
            {"top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.1},
            {"top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.1},
        ),
        ({"temperature": None, "top_k": -1, "typical_p": 0.5}, {"top_k": 0, "typical_p": 0.5}),
        ("\ufeff" + json.dumps({"temperature": 1}), {"temperature": 1}),
    ],
)
def test_defaults_in_a_folder(tmp_path: Path, config: Any, expected: dict[str, float]) -> None:
    assert folder_sampling(written(tmp_path, config)) == SamplingDefaults(**HABIT | expected)


def test_a_folder_that_says_nothing(tmp_path: Path) -> None:
    assert folder_sampling(tmp_path) == SamplingDefaults(**HABIT)


@pytest.mark.parametrize(
    "config",
    [
        '{"temperature": ',
        "[]",
        {"temperature": "hot"},
        {"top_k": 4.5},
        {"top_k": True},
        {"top_p": 0},
        {"temperature": 9},
        '{"min_p": NaN}',
        "[" * 100_000,
    ],
)
def test_invalid_defaults_are_refused_by_file_and_name(tmp_path: Path, config: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        folder_sampling(written(tmp_path, config))


def test_defaults_in_a_gguf_file() -> None:
    keys = {"temp": 0.3, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "penalty_repeat": 1.5}
    metadata = {f"general.sampling.{name}": value for name, value in keys.items()}
    expected = {"temperature": 0.3, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5}
    assert gguf_sampling(metadata, "m") == SamplingDefaults(**HABIT | expected)
    assert gguf_sampling({}, "m") == SamplingDefaults(**HABIT)
    with pytest.raises(ModelLoadError, match="m: top_p"):
        gguf_sampling({"general.sampling.top_p": -1.0}, "m")


def test_the_pocket_pair_says_that_it_is_greedy() -> None:
    assert gguf_sampling(read_model_header(pocket_small_gguf()).metadata, "pocket").temperature == 0
    assert folder_sampling(pocket_large_folder()).temperature == 0


def test_a_request_wins_where_it_says_something() -> None:
    own = SamplingDefaults(temperature=0.3, top_k=7)
    resolved = SamplingParams(temperature=1.0, top_p=1.0, min_p=0.0, seed=3, stop=("x",)).resolved(own)
    assert resolved.stated == SamplingDefaults(**HABIT | {"temperature": 1.0, "top_k": 7, "top_p": 1.0, "min_p": 0.0})
    assert (resolved.seed, resolved.stop, resolved.max_tokens) == (3, ("x",), None)
    assert SamplingParams(top_k=0).resolved(own).top_k == 0
