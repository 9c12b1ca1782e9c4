"""The kernels of a step beside attention, products and norms: heads to the cache, logits to tokens.

Sizes are those of Llama 3.1 8B, with norms of heads as in Qwen 3. No peers: nobody offers these passes as one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..kernels.kv_cache.ops import write_kv_
from ..kernels.kv_cache.types import HeadNorms, HeadTransform, Rotation
from ..kernels.norm.ops import qk_norm_
from ..kernels.norm.types import Norm
from ..kernels.sampling.ops import apply_edits_, log_probabilities, probabilities, sample
from ..kernels.sampling.types import FlatEdits, Sampling, Truncation
from .kernels import Case

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 32, 8, 128, 64
_VOCABULARY = 128256
_DTYPE = torch.bfloat16
_SETS = 4
_TOP, _EDITS = 5, 64


def step_cases() -> list[Callable[[], Case]]:
    over_logits = (truncated_case, probabilities_case, logprobs_case, edits_case)
    return [
        *(partial(make, 8192) for make in (kv_write_case, qk_norm_case)),
        *(partial(make, 256) for make in over_logits),
    ]


def kv_write_case(rows: int, device: str = "cuda") -> Case:
    """Each element is read and written once, and the rows' angles are read."""
    projected = [_heads(rows, _HEADS + 2 * _KV_HEADS, device) for _ in range(_SETS)]
    blocks = -(-rows // _BLOCK_SIZE)
    cache = torch.zeros(blocks, _BLOCK_SIZE, 2 * _KV_HEADS, _HEAD_DIM, device=device, dtype=_DTYPE)
    slots = torch.randperm(blocks * _BLOCK_SIZE, device=device)[:rows].to(torch.int32)
    weight = torch.ones(_HEAD_DIM, device=device, dtype=_DTYPE)
    rule = HeadTransform(HeadNorms(weight, weight, 1e-6))
    angles = torch.rand(rows, _HEAD_DIM // 2, device=device)
    rotation = Rotation(angles.cos(), angles.sin())
    return Case(
        f"kv_write {rows}x{_HEADS + 2 * _KV_HEADS}x{_HEAD_DIM}",
        lambda i: write_kv_(projected[i], cache, slots, rule, rotation),
        bytes_moved=2 * projected[0].nbytes + 2 * rotation.cosine.nbytes,
        sets=_SETS,
    )


def qk_norm_case(rows: int, device: str = "cuda") -> Case:
    heads = [_heads(rows, _HEADS + _KV_HEADS, device) for _ in range(_SETS)]
    norm = Norm(torch.ones(_HEAD_DIM, device=device, dtype=_DTYPE), 1e-6)
    return Case(
        f"qk_norm {rows}x{_HEADS + _KV_HEADS}x{_HEAD_DIM}",
        lambda i: qk_norm_(heads[i], _HEADS, norm, norm),
        bytes_moved=2 * heads[0].nbytes,
        sets=_SETS,
    )


def truncated_case(rows: int, vocabulary: int = _VOCABULARY, device: str = "cuda") -> Case:
    """All three truncations; the logits have to be read more than once, which counts as once."""
    logits = _logits(rows, vocabulary, device)
    column = partial(torch.full, (rows,), device=device)
    truncation = Truncation(
        top_k=column(50, dtype=torch.int32),
        top_p=column(0.9, dtype=torch.float64),
        min_p=column(0.05, dtype=torch.float64),
    )
    sampling = _sampling(rows, device, truncation)
    return Case(
        f"sample truncated {rows}x{vocabulary}",
        lambda i: sample(logits[i], sampling),
        bytes_moved=logits[0].nbytes,
        sets=_SETS,
    )


def probabilities_case(rows: int, vocabulary: int = _VOCABULARY, device: str = "cuda") -> Case:
    logits, sampling = _logits(rows, vocabulary, device), _sampling(rows, device)
    return Case(
        f"probabilities {rows}x{vocabulary}",
        lambda i: probabilities(logits[i], sampling),
        bytes_moved=2 * logits[0].nbytes,
        sets=_SETS,
    )


def logprobs_case(rows: int, vocabulary: int = _VOCABULARY, device: str = "cuda") -> Case:
    """Of the chosen token and the likeliest few."""
    logits, chosen = _logits(rows, vocabulary, device), torch.arange(rows, device=device)
    return Case(
        f"log_probabilities top {_TOP} {rows}x{vocabulary}",
        lambda i: log_probabilities(logits[i], chosen % vocabulary, _TOP),
        bytes_moved=logits[0].nbytes,
        sets=_SETS,
    )


def edits_case(rows: int, vocabulary: int = _VOCABULARY, device: str = "cuda") -> Case:
    """Far apart, so that a logit is moved with the 32 bytes around it, both ways."""
    logits = _logits(rows, vocabulary, device)
    count = min(_EDITS, vocabulary)
    row = torch.arange(rows, device=device, dtype=torch.int32).repeat_interleave(count)
    token = torch.linspace(0, vocabulary - 1, count, device=device).to(torch.int32).repeat(rows)
    ones = torch.ones(len(row), device=device)
    edits = FlatEdits(row, token, ones * 1.1, ones * 0.1)
    return Case(
        f"logit_edits {rows}x{count}",
        lambda i: apply_edits_(logits[i], edits),
        bytes_moved=len(row) * (2 * 32 + 4 * 4),
        sets=_SETS,
    )


def _heads(rows: int, heads: int, device: str) -> Tensor:
    return torch.randn(rows, heads, _HEAD_DIM, device=device, dtype=_DTYPE)


def _logits(rows: int, vocabulary: int, device: str) -> list[Tensor]:
    return [torch.randn(rows, vocabulary, device=device) for _ in range(_SETS)]


def _sampling(rows: int, device: str, truncation: Truncation | None = None) -> Sampling:
    temperatures = torch.ones(rows, dtype=torch.float64, device=device)
    places = torch.arange(rows, device=device)
    return Sampling(temperatures, seeds=places, positions=places, truncation=truncation)
