"""The cases over rows, in small on the CPU: they run on every set, and ours agrees with torch's where it is no draw."""

from __future__ import annotations

import pytest
import torch
from updraft.bench.kernels.cases import add_norm_case, gated_case, norm_case, row_cases, sample_case


def test_norms_agree_with_torch() -> None:
    case = norm_case(3, 64, "cpu")
    torchs = case.peers["torch"]()
    for index in range(case.sets):
        ours, theirs = case.run(index), torchs(index)
        assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
        assert torch.allclose(ours, theirs, rtol=0.02)
    assert case.bytes_moved == 2 * 2 * 3 * 64


@pytest.mark.parametrize(
    ("case", "bytes_moved"),
    [
        (add_norm_case(3, 64, "cpu"), 4 * 2 * 3 * 64),  # both read, both written
        (gated_case(3, 64, "cpu"), 3 * 2 * 3 * 64),
        (sample_case(3, 64, "cpu"), 4 * 3 * 64),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_cases_run_on_every_set(case, bytes_moved: int) -> None:
    for index in range(case.sets):
        assert isinstance(case.run(index), torch.Tensor)
    assert case.bytes_moved == bytes_moved


def test_the_short_form_is_part_of_the_long_one() -> None:
    def questions(short: bool) -> set[tuple]:
        return {(make.func, make.args) for make in row_cases(short=short)}

    assert questions(True) < questions(False)
