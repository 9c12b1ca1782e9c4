"""Edits of logits: the kernel against the reference, and both against what the engine's sampler makes of them."""

from __future__ import annotations

import pytest
import torch
from plain_sampling import SamplingRow, edits_of, sample
from updraft.kernels.sampling.ops import apply_edits_
from updraft.kernels.sampling.reference import apply_edits_reference_
from updraft.kernels.sampling.types import FlatEdits
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.sampling import ResolvedParams

pytest.importorskip("triton")
from updraft.kernels.sampling.triton_logit_edits import launch_edits


def some_edits(rows: list[int], token_ids: list[int]) -> FlatEdits:
    generator = torch.Generator().manual_seed(3)
    number = len(rows)
    offsets = torch.randn(number, generator=generator)
    offsets[::7] = -torch.inf
    return FlatEdits(
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor(token_ids, dtype=torch.int32),
        torch.rand(number, generator=generator) + 0.5,
        offsets,
    )


@pytest.mark.parametrize("number", [0, 1, 255, 256, 300])
def test_kernel_is_the_reference_to_the_last_bit(number) -> None:
    logits = torch.randn(4, 101, generator=torch.Generator().manual_seed(0))
    logits[1, 5] = -torch.inf
    edits = some_edits([index // 101 if index % 5 else -1 for index in range(number)], [i % 101 for i in range(number)])
    got, expected = logits.clone(), logits.clone()
    launch_edits(got, edits)
    apply_edits_reference_(expected, edits)
    assert torch.equal(got, expected)
    touched = sum(row >= 0 for row in edits.rows.tolist())
    assert int((got != logits).sum()) >= touched * 0.9  # what stays -inf is not changed


def test_engine_takes_the_largest_edited_logit() -> None:
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(1))
    token_ids = [int(row.argmax()) for row in logits]
    edits = some_edits(list(range(6)), token_ids)
    rows = [
        SamplingRow(0, 0, ResolvedParams(temperature=0.0), edits_of([token], [float(divisor)], [float(offset)]))
        for token, divisor, offset in zip(token_ids, edits.divisors, edits.offsets, strict=True)
    ]
    expected = sample(logits, rows)
    apply_edits_(logits, edits)
    assert logits.argmax(-1).tolist() == expected
    assert expected != token_ids


def test_rounded_logits_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="float32"):
        apply_edits_(torch.zeros(2, 3, dtype=torch.bfloat16), some_edits([0], [0]))
