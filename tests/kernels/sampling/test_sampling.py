"""Sampled tokens: kernel, reference and the plain definition choose the very same ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plain_sampling import SamplingRow, plain_sample
from updraft.kernels.sampling.gumbel_noise import gumbel_noise, noise_keys, uniforms
from updraft.kernels.sampling.launch import TILE, split_row
from updraft.kernels.sampling.ops import sample
from updraft.kernels.sampling.reference import ranks, sample_reference
from updraft.kernels.sampling.types import Sampling, Truncation
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.sampling import ResolvedParams

pytest.importorskip("triton")
from updraft.kernels.sampling import triton as sampling_triton
from updraft.kernels.sampling import triton_truncation as truncation_triton
from updraft.kernels.sampling.triton import launch_sample

VOCABULARY = 2 * TILE + 37


def some_logits(rows: int, vocabulary: int = VOCABULARY, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def some_sampling(rows: int, *, temperatures: tuple[float, ...] = (0.0, 0.3, 1.0, 1.7), **options) -> Sampling:
    return Sampling(
        torch.tensor([temperatures[row % len(temperatures)] for row in range(rows)], dtype=torch.float64),
        torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(1)),
        torch.arange(rows) * 1000,
        **options,
    )


def some_mask(rows: int, vocabulary: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The words of a random mask, and which tokens it allows."""
    allowed = torch.rand(rows, vocabulary, generator=torch.Generator().manual_seed(2)) < share
    allowed[:, 5] = True
    bits = np.zeros((rows, -(-vocabulary // 32) * 32), dtype=np.uint8)
    bits[:, :vocabulary] = allowed.numpy()
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return torch.from_numpy(words), allowed


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for kernels to write in is full of NaN, or of a number that is no token."""

    def filled(shape, *, dtype: torch.dtype, **options) -> torch.Tensor:
        return torch.full(shape, torch.nan if dtype.is_floating_point else -77, dtype=dtype, **options)

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "vocabulary"), [(0, 50), (1, 1), (2, TILE), (8, VOCABULARY), (1, 5 * TILE + 1)])
def test_kernel_reference_and_definition_choose_the_same(rows, vocabulary, dtype, monkeypatch) -> None:
    poison(monkeypatch)
    logits, sampling = some_logits(rows, vocabulary).to(dtype), some_sampling(rows)
    got = launch_sample(logits, sampling, None).tolist()
    assert got == sample_reference(logits, sampling).tolist()
    temperatures, seeds, positions = sampling.temperatures, sampling.seeds, sampling.positions
    plain_rows = [
        SamplingRow(int(seeds[i]), int(positions[i]), ResolvedParams(temperature=float(temperatures[i])))
        for i in range(rows)
    ]
    assert got == (plain_sample(logits.float(), plain_rows) if rows else [])


def test_many_seeds_choose_as_the_reference_does(monkeypatch) -> None:
    """A tile is skipped if a bound says so: a bound that is too low shows in a few of many draws."""
    monkeypatch.setattr(sampling_triton, "num_multiprocessors", lambda _: 1)  # all tiles in one program
    rows = 60
    for scale in (0.0, 0.1, 5.0):
        logits, sampling = some_logits(1, 3 * TILE).expand(rows, -1) * scale, some_sampling(rows, temperatures=(1.0,))
        assert launch_sample(logits, sampling, None).tolist() == sample_reference(logits, sampling).tolist()


@pytest.mark.parametrize("share", [0.5, 0.01, 0.0])
def test_a_mask_leaves_the_tokens_it_allows(share, monkeypatch) -> None:
    poison(monkeypatch)
    mask, allowed = some_mask(6, VOCABULARY, share)
    logits, sampling = some_logits(6), some_sampling(6, mask=mask)
    got = launch_sample(logits, sampling, None)
    assert got.tolist() == sample_reference(logits.masked_fill(~allowed, -torch.inf), some_sampling(6)).tolist()
    assert allowed.gather(1, got[:, None]).all()


def test_rows_of_nothing_and_of_ties() -> None:
    logits = torch.full((3, VOCABULARY), -torch.inf)
    logits[1, 40] = logits[1, TILE + 3] = 2.0
    logits[2] = 1.0
    sampling = some_sampling(3, temperatures=(0.0,))
    assert launch_sample(logits, sampling, None).tolist() == [0, 40, 0]
    assert launch_sample(logits[:1], some_sampling(1, temperatures=(1.0,)), None).tolist() == [0]


def test_least_temperature_is_the_largest_logit() -> None:
    logits = some_logits(3)
    sampling = some_sampling(3, temperatures=(1e-5,))
    assert launch_sample(logits, sampling, None).tolist() == logits.argmax(-1).tolist()


def test_the_share_of_a_program_changes_nothing(monkeypatch) -> None:
    logits = some_logits(4, 3 * TILE + 5)
    top_p, top_k = torch.full((4,), 0.8, dtype=torch.float64), torch.full((4,), 900, dtype=torch.int32)
    sampling = some_sampling(4, temperatures=(1.0,), truncation=Truncation(top_k, top_p))
    outputs = []
    for multiprocessors in (132, 1):
        for module in (sampling_triton, truncation_triton):
            monkeypatch.setattr(module, "num_multiprocessors", lambda _, number=multiprocessors: number)
        threshold = truncation_triton.launch_thresholds((logits, sampling.temperatures, None), sampling.truncation)
        outputs.append((threshold.tolist(), launch_sample(logits, sampling, threshold).tolist()))
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == [
        int(truncation_triton.launch_thresholds((logits[i : i + 1], sampling.temperatures[:1], None), one)[0])
        for i, one in enumerate([Truncation(top_k[:1], top_p[:1])] * 4)
    ]


def test_threshold_drops_smaller_logits() -> None:
    logits, sampling = some_logits(5), some_sampling(5, temperatures=(1.0, 0.0))
    kept = ranks(logits).sort(dim=-1, descending=True).values[:, 3].contiguous()
    got = launch_sample(logits, sampling, kept)
    assert (ranks(logits).gather(1, got[:, None])[:, 0] >= kept).all()
    limited = some_sampling(5, temperatures=(1.0, 0.0), truncation=Truncation(torch.full((5,), 4, dtype=torch.int32)))
    assert got.tolist() == sample(logits, limited).tolist()


def test_noise_is_that_of_its_definition() -> None:
    word, mask = (12345 * 0x9E3779B97F4A7C15) % 2**64, 2**64 - 1

    def mix(value: int) -> int:
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
        return value ^ (value >> 31)

    key = mix(mix(7) ^ 3)
    keys = noise_keys(torch.tensor([7]), torch.tensor([3]))
    assert int(keys[0]) % 2**64 == key
    expected = ((mix((key + word) & mask) >> 11) + 0.5) * 2.0**-53
    assert float(uniforms(keys, torch.tensor([12345]))[0]) == expected
    noise = gumbel_noise(noise_keys(torch.arange(20), torch.zeros(20, dtype=torch.int64)), 5000).flatten()
    assert abs(float(noise.mean()) - 0.57722) < 0.02
    assert abs(float(noise.var()) - 1.64493) < 0.05


def test_a_row_is_shared_until_the_gpu_is_busy() -> None:
    one = split_row(1, 151_936, 132)
    assert (one.programs, one.tiles, one.row_tiles) == (149, 1, 149)
    many = split_row(256, 151_936, 132)
    assert many.programs * 256 >= 132 * 3
    assert all(
        share.programs * share.tiles >= share.row_tiles > (share.programs - 1) * share.tiles
        for share in (split_row(rows, size, 132) for rows in (1, 7, 300, 5000) for size in (1, 1024, 1025, 32000))
    )


def test_wrong_shapes_are_refused() -> None:
    sampling = some_sampling(2)
    with pytest.raises(ConfigurationError, match="temperatures"):
        sample(some_logits(3), sampling)
    with pytest.raises(ConfigurationError, match="top_k"):
        sample(some_logits(2), some_sampling(2, truncation=Truncation(top_k=torch.tensor([1, 2]))))
    with pytest.raises(ConfigurationError, match="dense rows"):
        sample(some_logits(2).T, sampling)
    with pytest.raises(ConfigurationError, match="mask"):
        sample(some_logits(2), some_sampling(2, mask=torch.zeros(2, 3, dtype=torch.int32)))
