"""Paged attention in the shapes of Llama 3.1 8B: a long prompt, decoding over 512 MB of cache, and draft verification.

Peers without paging get the same sequences as dense tensors of equal length, which favours them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...kernels.attention.launch import AttentionShape
from ...kernels.attention.metadata import AttentionPlanner
from ...kernels.attention.types import QuerySpan, ScoreOptions
from .measure import Case, Run

LLAMA_8B = AttentionShape(heads=32, kv_heads=8, head_dim=128, block_size=64)
_SETS = 4
_DRAFT = 8
_FLASHINFER_WORKSPACE = 2**28


@dataclass(frozen=True, slots=True)
class Workload:
    """Attention over `sequences` of `context` tokens each; the last `queries` tokens of each sequence are queries."""

    name: str
    sequences: int
    queries: int
    context: int
    shape: AttentionShape = LLAMA_8B
    dtype: torch.dtype = torch.bfloat16

    @property
    def rows(self) -> int:
        return self.sequences * self.queries

    @property
    def blocks(self) -> int:
        """Number of blocks per sequence."""
        return -(-self.context // self.shape.block_size)

    @property
    def is_causal(self) -> bool:
        """Return whether dense peers mask later keys. Without the mask, a few queries see a few keys too many."""
        return self.queries == self.context

    @property
    def bytes_moved(self) -> int:
        cached = self.sequences * self.context * 2 * self.shape.kv_heads
        return (cached + 2 * self.rows * self.shape.heads) * self.shape.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Operations of the two products over the keys that each query sees."""
        pairs = self.queries * (self.context - self.queries) + self.queries * (self.queries + 1) // 2
        return 4 * self.sequences * pairs * self.shape.heads * self.shape.head_dim


def attention_cases(*, short: bool) -> list[Callable[[], Case]]:
    """Return the attention cases. Verification uses the sequences of decoding, so that the times are comparable."""
    workloads = [
        Workload("prefill", 1, 16384, 16384),
        Workload("decode", 64, 1, 2048),
        Workload("verify", 64, _DRAFT, 2048),
    ]
    if not short:
        workloads += [Workload("decode", 4, 1, 32768), Workload("verify", 4, _DRAFT, 32768)]
        workloads += [Workload("prefill", 4, 4096, 4096), Workload("decode", 256, 1, 512)]
    return [partial(attention_case, workload) for workload in workloads]


def attention_case(work: Workload, planner: AttentionPlanner | None = None) -> Case:
    """Create a benchmark case. `planner`: None plans for the CUDA device."""
    from ...kernels.attention.triton import attend

    shape = work.shape
    planner = planner or AttentionPlanner.on(torch.device("cuda"), shape)
    tables = torch.randperm(work.sequences * work.blocks).view(work.sequences, work.blocks).tolist()
    metadata = planner.metadata([QuerySpan(work.context - work.queries, work.queries, table) for table in tables])
    size = (work.sequences * work.blocks, shape.block_size, 2 * shape.kv_heads, shape.head_dim)
    caches = [_random(work, planner.device, *size) for _ in range(_SETS)]
    queries = [_random(work, planner.device, work.rows, shape.heads, shape.head_dim) for _ in range(_SETS)]
    rule = ScoreOptions(shape.head_dim**-0.5)
    return Case(
        f"attention {work.name} {work.sequences}x{work.queries} over {work.context}",
        lambda i: attend(queries[i], caches[i], metadata, shape, rule),
        bytes_moved=work.bytes_moved,
        flops=work.flops,
        peers={
            "torch flash": partial(_torch_run, work, planner.device, SDPBackend.FLASH_ATTENTION),
            "torch cuDNN": partial(_torch_run, work, planner.device, SDPBackend.CUDNN_ATTENTION),
            "FlexAttention": partial(_flex_run, work, planner.device),
            "FlashInfer": lambda: _flashinfer_run(work, queries, tables),
        },
        sets=_SETS,
    )


def _dense(work: Workload, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return sets of query, key and value, (sequences, heads, tokens, head_dim) each."""
    query = (work.sequences, work.shape.heads, work.queries, work.shape.head_dim)
    cached = (work.sequences, work.shape.kv_heads, work.context, work.shape.head_dim)
    return [
        (_random(work, device, *query), _random(work, device, *cached), _random(work, device, *cached))
        for _ in range(_SETS)
    ]


def _torch_run(work: Workload, device: torch.device, backend: SDPBackend) -> Run:
    sets = _dense(work, device)

    def run(i: int) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*sets[i], is_causal=work.is_causal, enable_gqa=True)

    return run


def _flex_run(work: Workload, device: torch.device) -> Run:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    sets, mask = _dense(work, device), None
    if work.is_causal:
        mask = create_block_mask(_is_before, None, None, work.queries, work.context, device=device.type)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda i: compiled(*sets[i], block_mask=mask, enable_gqa=True)


def _is_before(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _flashinfer_run(work: Workload, queries: list[Tensor], tables: list[list[int]]) -> Run:
    """Return a function that runs FlashInfer over the same block tables, with a cache in FlashInfer's own layout."""
    import flashinfer  # pyright: ignore[reportMissingImports]

    shape, device = work.shape, queries[0].device
    pages = (work.sequences * work.blocks, 2, shape.block_size, shape.kv_heads, shape.head_dim)
    caches = [_random(work, device, *pages) for _ in queries]
    starts = torch.arange(work.sequences + 1, dtype=torch.int32, device=device)
    indices = torch.tensor(tables, dtype=torch.int32, device=device).flatten()
    last = torch.full_like(starts[1:], (work.context - 1) % shape.block_size + 1)
    heads = (shape.heads, shape.kv_heads, shape.head_dim, shape.block_size)
    workspace = torch.empty(_FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    if work.queries == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(starts * work.blocks, indices, last, *heads, q_data_type=work.dtype, kv_data_type=work.dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        rows = starts * work.queries
        wrapper.plan(rows, starts * work.blocks, indices, last, *heads, causal=True, q_data_type=work.dtype)
    return lambda i: wrapper.run(queries[i], caches[i])


def _random(work: Workload, device: torch.device, *size: int) -> Tensor:
    return torch.randn(size, device=device, dtype=work.dtype)
