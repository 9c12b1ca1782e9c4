"""Norm, rotation and storing of heads: the kernel against the reference, the reference against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from updraft.kernels.kv_cache.reference import write_kv_reference_
from updraft.kernels.kv_cache.types import HeadNorms, HeadTransform, Rotation
from updraft.protocol.errors import ConfigurationError

pytest.importorskip("triton")
from updraft.kernels.kv_cache import triton as kv_write_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNTOUCHED = 7.0
BLOCK_SIZE = 16


def heads_of(rows: int, heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows that lie further apart than they are wide."""
    torch.manual_seed(rows)
    return torch.randn(rows, heads + 1, head_dim).to(DEVICE, dtype)[:, :heads]


def cache_of(kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((4, BLOCK_SIZE, 2 * kv_heads, head_dim), UNTOUCHED).to(DEVICE, dtype)


def angles(rows: int, pairs: int) -> Rotation:
    table = torch.linspace(0, 3, rows * pairs, device=DEVICE).view(rows, pairs)
    return Rotation(table.cos(), table.sin())


def norms(head_dim: int, *, unit_offset: bool = False, dtype: torch.dtype = torch.float32) -> HeadNorms:
    torch.manual_seed(1)
    return HeadNorms(*torch.randn(2, head_dim).to(DEVICE, dtype), 1e-5, unit_offset)


def check(projected: Tensor, cache: Tensor, rule: HeadTransform, rotation: Rotation | None, slots: list[int]) -> None:
    """Queries and the whole cache are the same, and what had no slot is untouched."""
    slot_mapping = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    queries = projected.shape[1] - cache.shape[2]
    expected_heads, expected_cache = projected.clone(), cache.clone()
    write_kv_reference_(expected_heads, expected_cache, slot_mapping, rule, rotation)
    kv_write_triton.launch_write_kv_(projected, cache, slot_mapping, rule, rotation)
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3}[projected.dtype]
    torch.testing.assert_close(projected[:, :queries], expected_heads[:, :queries], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(cache.float(), expected_cache.float(), rtol=tolerance, atol=tolerance)
    written = (cache.flatten(0, 1).float() != UNTOUCHED).any(-1).any(-1)
    assert written.nonzero().flatten().tolist() == sorted(slot for slot in slots if slot >= 0)


SLOTS = [15, 16, -1, 63, 0, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [(4, 4), (7, 1), (14, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_heads(heads: tuple[int, int], normed: bool, dtype: torch.dtype) -> None:
    queries, kv_heads = heads
    rule = HeadTransform(norms(16, dtype=dtype) if normed else None)
    projected = heads_of(6, queries + 2 * kv_heads, 16, dtype)
    check(projected, cache_of(kv_heads, 16, dtype), rule, angles(6, 8), SLOTS)


@pytest.mark.parametrize(("head_dim", "pairs"), [(64, 32), (80, 40), (80, 16), (128, 64), (256, 64), (96, 12)])
@pytest.mark.parametrize("normed", [False, True])
def test_dimensions_that_are_not_rotated(head_dim: int, pairs: int, normed: bool) -> None:
    rule = HeadTransform(norms(head_dim, unit_offset=True) if normed else None)
    check(heads_of(2, 4, head_dim), cache_of(1, head_dim), rule, angles(2, pairs), [3, 20])


def test_without_rotation_queries_stay_and_values_are_copied_exactly() -> None:
    projected, cache = heads_of(3, 8, 16, torch.float16), cache_of(2, 16, torch.float16)
    before = projected.clone()
    check(projected, cache, HeadTransform(), None, [5, -1, 40])
    assert torch.equal(projected, before)
    assert torch.equal(cache.flatten(0, 1)[[5, 40]], before[[0, 2], 4:])


def test_more_heads_than_one_program_takes() -> None:
    check(heads_of(2, 24, 128), cache_of(4, 128), HeadTransform(norms(128)), angles(2, 64), [1, 2])


def test_fp8_is_scaled_and_saturates() -> None:
    """Of numbers that FP8 holds exactly: the interpreter (3.9) rounds up to a power of two wrongly."""
    projected, cache = heads_of(2, 6, 16), cache_of(1, 16, torch.float8_e4m3fn)
    projected.copy_(projected.to(torch.float8_e4m3fn))
    projected[1, 5, :2] = torch.tensor([60000.0, -60000.0])
    check(projected, cache, HeadTransform(key_scale=0.5, value_scale=2.0), None, [9, 10])
    assert cache[0, 10, 1, :2].float().tolist() == [448.0, -448.0]
    assert torch.equal(cache[0, 9, 0].float(), 2.0 * projected[0, 4])


def test_no_rows() -> None:
    check(heads_of(0, 4, 16), cache_of(1, 16), HeadTransform(), angles(0, 8), [])


@pytest.mark.parametrize("unit_offset", [False, True])
def test_reference_is_torch_norm_and_the_rotation_of_hugging_face(unit_offset: bool) -> None:
    projected, cache = heads_of(5, 6, 32), cache_of(1, 32)
    rule = HeadTransform(norms(32, unit_offset=unit_offset))
    query, key = (weight + unit_offset for weight in (rule.norms.query, rule.norms.key))
    parts = (projected[:, :4], query), (projected[:, 4:5], key)
    normed = torch.cat([functional.rms_norm(heads, (32,), weight, rule.norms.eps) for heads, weight in parts], dim=1)
    rotation = angles(5, 8)
    cosine, sine = (torch.cat((part, part), dim=-1)[:, None] for part in (rotation.cosine, rotation.sine))
    turned = torch.cat((-normed[..., 8:16], normed[..., :8]), dim=-1)
    rotated = torch.cat((normed[..., :16] * cosine + turned * sine, normed[..., 16:]), dim=-1)
    values = projected[:, 5:].clone()
    write_kv_reference_(projected, cache, torch.arange(5, dtype=torch.int32, device=DEVICE), rule, rotation)
    torch.testing.assert_close(projected[:, :4], rotated[:, :4])
    torch.testing.assert_close(cache.flatten(0, 1)[:5], torch.cat((rotated[:, 4:], values), dim=1))


@pytest.mark.parametrize(
    ("cache", "slots", "rotation"),
    [
        (cache_of(1, 32), 3, None),
        (cache_of(3, 16), 3, None),
        (cache_of(1, 16, torch.float16), 3, None),
        (cache_of(1, 16), 2, None),
        (cache_of(1, 16), 3, angles(2, 8)),
        (cache_of(1, 16), 3, angles(3, 9)),
    ],
)
@pytest.mark.parametrize("write", [write_kv_reference_, kv_write_triton.launch_write_kv_])
def test_tensors_that_do_not_fit(write: object, cache: Tensor, slots: int, rotation: Rotation | None) -> None:
    with pytest.raises(ConfigurationError):
        write(
            heads_of(3, 4, 16), cache, torch.zeros(slots, dtype=torch.int32, device=DEVICE), HeadTransform(), rotation
        )


def test_the_kernel_needs_a_contiguous_cache() -> None:
    slots = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ConfigurationError, match="contiguous"):
        kv_write_triton.launch_write_kv_(
            heads_of(3, 4, 16), cache_of(1, 16).transpose(0, 1), slots, HeadTransform(), None
        )
