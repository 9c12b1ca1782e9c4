"""The sampler of the engine draws the tokens of the plain definition, in C and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_sampling import SamplingRow, edits_of, plain_sample, sample, sampling_rows
from updraft.cloud_engine.engine.worker import sampler
from updraft.kernels.runtime.native_library import load
from updraft.kernels.sampling import ops as sampling
from updraft.kernels.sampling.cpu import native_sample
from updraft.kernels.sampling.gumbel_noise import gumbel_noise, noise_keys
from updraft.protocol.sampling import ResolvedParams

needs_c = pytest.mark.skipif(load() is None, reason="no C compiler")
PARAMS = st.builds(
    ResolvedParams,
    top_k=st.sampled_from([0, 0, 0, 1, 3, 40, 2000, 2**31 - 1]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 0.9]),
    typical_p=st.sampled_from([1.0, 1.0, 1.0, 1.0, 0.8, 0.2]),
)
ROW = st.tuples(
    st.sampled_from([0.0, 1e-6, 1e-5, 1e-3, 0.3, 0.7, 1.0, 2.0]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**31),
    PARAMS,
    st.booleans(),
    st.sampled_from([None, None, 0.9, 0.1, 0.0]),
)
SHAPES = ["normal", "peaked", "flat", "few values", "banned", "huge", "zeros", "rising", "falling"]
SIZES = [1, 2, 12, 15, 16, 17, 70, 1024, 3001]


def columns(rows: Sequence[SamplingRow], logits: torch.Tensor) -> sampling.Sampling:
    return sampler.sampling_of(sampling_rows(rows), logits.shape[1], logits.device)


def row_of_logits(shape: str, size: int, random: np.random.Generator) -> np.ndarray:
    row = random.standard_normal(size) * 3
    if shape == "peaked":
        row[random.integers(size, size=3)] += 12 * random.random(3)
    elif shape == "flat":
        row = np.full(size, random.standard_normal())
    elif shape == "few values":
        row = random.integers(0, 4, size) * 1.5
    elif shape == "banned":
        row[random.random(size) < 0.7] = -np.inf
    elif shape == "huge":
        row *= 10.0 ** random.integers(2, 37)
    elif shape == "zeros":
        row = np.where(random.random(size) < 0.5, 0.0, -0.0)
    elif shape == "rising":
        row = np.linspace(-9, 9, size)
    elif shape == "falling":
        row = np.linspace(9, -90, size)
    return row.astype(np.float32)


def some_rows(rows: Sequence[Any], size: int, random: np.random.Generator) -> list[SamplingRow]:
    sampling_rows: list[SamplingRow] = []
    for temperature, seed, position, params, edited, share in rows:
        ids = np.unique(random.integers(size, size=3)) if edited else None
        edits = None if ids is None else edits_of(ids, [1.3, 1.0, 2.0][: len(ids)], [-1.0, -np.inf, 5.0][: len(ids)])
        bits = random.random(-(-size // 32) * 32) < (share or 0)
        mask = None if share is None else np.packbits(bits, bitorder="little").view(np.int32)
        sampling_rows.append(SamplingRow(seed, position, replace(params, temperature=temperature), edits, mask))
    return sampling_rows


@pytest.mark.parametrize("in_c", [pytest.param(True, marks=needs_c), False], ids=["c", "torch"])
@given(st.lists(ROW, min_size=1, max_size=5), st.sampled_from(SHAPES), st.sampled_from(SIZES), st.integers(0, 2**32))
def test_the_tokens_of_the_definition(in_c: bool, rows: list[Any], shape: str, size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(np.stack([row_of_logits(shape, size, random) for _ in rows]))
    wanted, before = some_rows(rows, size, random), logits.clone()
    with pytest.MonkeyPatch.context() as patch:
        if not in_c:
            patch.setattr(sampling, "uses_native", lambda _: False)
        assert sample(logits, wanted) == plain_sample(logits, wanted)
    assert torch.equal(logits, before)


@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.02}, {"top_k": 20, "top_p": 0.8}], ids=str
)
def test_c_decides_nearly_all_rows_by_itself(options: dict[str, Any], dtype: torch.dtype) -> None:
    """And rightly, over a whole vocabulary: what it leaves to the definition are matters of rounding."""
    size, count = 151_936, 16
    random = np.random.default_rng(1)
    shapes = [shape for shape in SHAPES if shape != "huge"]
    logits = np.stack([row_of_logits(shapes[row % len(shapes)], size, random) for row in range(count)])
    rounded = torch.from_numpy(logits).to(dtype)
    rows = [SamplingRow(row, 7 * row, ResolvedParams(temperature=0.5 + row % 3 / 3, **options)) for row in range(count)]
    tokens = native_sample(rounded, columns(rows, rounded)).tolist()
    assert tokens.count(-1) <= 1
    wanted = plain_sample(rounded.float(), rows)
    assert [token for token in tokens if token >= 0] == [
        token for token, other in zip(wanted, tokens, strict=True) if other >= 0
    ]


@needs_c
@pytest.mark.parametrize("temperature", [0.2, 1.0, 2.0])
def test_no_winner_is_ever_missed(temperature: float) -> None:
    """A bound that is too high shows in a few of many draws."""
    draws, size = 1500, 1500
    for shape in ("flat", "normal", "rising"):
        logits = torch.from_numpy(row_of_logits(shape, size, np.random.default_rng(0))).expand(draws, -1)
        rows = [SamplingRow(5, position, ResolvedParams(temperature=temperature)) for position in range(draws)]
        assert native_sample(logits, columns(rows, logits)).tolist() == plain_sample(logits, rows)


@needs_c
@pytest.mark.parametrize("options", [{}, {"top_p": 0.5, "min_p": 0.1}, {"top_k": 3}], ids=str)
def test_rounding_ties_use_the_reference(options: dict[str, Any]) -> None:
    params = ResolvedParams(**options)
    logits = torch.tensor([[1e30, 1e30, 0.0, 1e30], [-1e30, 2.0, torch.nan, 1.0], [torch.inf, 1.0, torch.inf, 0.0]])
    rows = [SamplingRow(3, position, params) for position in range(3)]
    assert native_sample(logits, columns(rows, logits)).tolist() == [-1, -1, -1]
    assert sample(logits, rows) == plain_sample(logits, rows)


@needs_c
def test_near_ties_are_left_to_the_definition() -> None:
    """Some scores differ by less than the logarithms of two libraries."""
    keys = noise_keys(torch.full((40,), 3), torch.arange(40))
    noise = gumbel_noise(keys, 2)
    gap = (noise[:, 0] - noise[:, 1]).numpy()
    large = (-gap).astype(np.float32)
    small = (gap + large).astype(np.float32)  # what rounding took from the other one, and finer steps than it has
    logits = torch.from_numpy(np.stack((large, small), axis=1))
    rows = [SamplingRow(3, position, ResolvedParams()) for position in range(40)]
    assert native_sample(logits, columns(rows, logits)).tolist() == [-1] * 40
    assert sample(logits, rows) == plain_sample(logits, rows)


@needs_c
def test_shares_at_the_border_are_left_to_the_definition() -> None:
    """Ten equal tokens and top-p at three tenths: whether the fourth is in depends on how tenths are added up."""
    for top_p in (np.nextafter(0.3, 0), 0.3, np.nextafter(0.3, 1)):
        logits = torch.zeros(100, 10)
        rows = [SamplingRow(0, position, ResolvedParams(top_p=float(top_p))) for position in range(100)]
        tokens = native_sample(logits, columns(rows, logits)).tolist()
        assert set(tokens) == {-1, 0, 1, 2}
        assert sample(logits, rows) == plain_sample(logits, rows)


@needs_c
@pytest.mark.parametrize(("share", "drawn"), [(0.499, {0}), (0.501, {0, 1})])
def test_min_p_is_a_share_of_the_likeliest(share: float, drawn: set[int]) -> None:
    logits = torch.tensor([0.0, np.log(share)], dtype=torch.float32).expand(60, -1)
    rows = [SamplingRow(0, position, ResolvedParams(min_p=0.5)) for position in range(60)]
    tokens = native_sample(logits, columns(rows, logits)).tolist()
    assert set(tokens) == drawn
    assert tokens == plain_sample(logits, rows)
