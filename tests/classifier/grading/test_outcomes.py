"""Graded runs on disk: what was saved is what is loaded, and another file is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
from updraft.classifier.graded_row import AnswerSignals, GradedRow
from updraft.classifier.grading.outcomes import load, save
from updraft.protocol.errors import ConfigurationError


def test_outcomes_survive_the_file(tmp_path: Path, make_population: Callable[..., list[GradedRow]]) -> None:
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
    rows = [odd, *rows, replace(odd, domain="ünï", answer="\ud800")]
    save(rows, tmp_path / "rows.npz")
    found = load(tmp_path / "rows.npz")
    assert len(found) == len(rows)
    for before, after in zip(rows, found, strict=True):
        np.testing.assert_equal(astuple(after), astuple(before))
    save([], tmp_path / "none.npz")
    assert load(tmp_path / "none.npz") == []


def test_a_wrong_outcome_file_is_a_configuration_error(
    tmp_path: Path, make_population: Callable[..., list[GradedRow]]
) -> None:
    path = tmp_path / "rows.npz"
    with pytest.raises(ConfigurationError, match="no outcome file"):
        load(path)
    save(make_population(20, seed=1)[:5], path)
    whole = path.read_bytes()
    for damaged in (b"", b"not a zip", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigurationError, match="damaged"):
            load(path)
