"""Attention's bytes and operations, and its cases in small: ours in the interpreter, torch's on the CPU."""

from __future__ import annotations

import os

import pytest
import torch
from updraft.bench.kernels.attention_cases import Workload, attention_case, attention_cases
from updraft.kernels.attention.launch import AttentionShape
from updraft.kernels.attention.metadata import AttentionPlanner

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

SMALL = AttentionShape(heads=4, kv_heads=2, head_dim=16, block_size=16)


def test_workload_bytes_and_flops() -> None:
    work = Workload("verify", 3, 2, 5, SMALL)
    assert work.bytes_moved == 2 * 16 * (3 * 5 * 2 * 2 + 2 * 3 * 2 * 4)
    assert work.flops == 4 * 16 * 4 * 3 * (4 + 5)  # the first query sees four keys, the second five
    prefill = Workload("prefill", 1, 4, 4, SMALL)
    assert prefill.flops == 4 * 16 * 4 * (1 + 2 + 3 + 4)


def test_decoding_reads_at_least_256_mb() -> None:
    work = next(make.args[0] for make in attention_cases(short=True) if make.args[0].name == "decode")
    assert work.bytes_moved >= 256 * 2**20


@pytest.mark.parametrize(("queries", "context"), [(1, 40), (3, 33), (20, 20)])
def test_a_case_runs_on_every_set(queries: int, context: int) -> None:
    pytest.importorskip("triton")
    work = Workload("small", 2, queries, context, SMALL, torch.float16)
    case = attention_case(work, AttentionPlanner(SMALL, torch.device("cpu"), 1))
    flash = case.peers["torch flash"]()
    for index in range(case.sets):
        ours, theirs = case.run(index), flash(index)
        assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
        assert ours.shape == (2 * queries, 4, 16)
        assert theirs.shape == (2, 4, queries, 16)
        assert bool(ours.isfinite().all())
