"""Sampling on the device: the same tokens as on the CPU, for whole vocabularies, alone and in batches, in a graph."""

from __future__ import annotations

import pytest
import torch
from updraft.kernels.sampling.ops import apply_edits_, log_probabilities, row_thresholds, sample
from updraft.kernels.sampling.reference import ranks
from updraft.kernels.sampling.types import FlatEdits, Sampling, Truncation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
VOCABULARY = 151_936


def some_logits(rows: int, vocabulary: int = VOCABULARY, scale: float = 2.5) -> torch.Tensor:
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * scale
    logits[:, ::1000] += 8
    return logits


def some_sampling(rows: int, *, truncated: bool) -> Sampling:
    every = torch.arange(rows)
    top_k = torch.tensor([0, 50, 1, 20, 3000])[every % 5].int()
    top_p = torch.tensor([1.0, 0.9, 0.5, 0.99], dtype=torch.float64)[every % 4]
    min_p = torch.tensor([0.0, 0.0, 0.02], dtype=torch.float64)[every % 3]
    temperatures = torch.tensor([1.0, 0.0, 0.7, 1.6, 1.0], dtype=torch.float64)[every % 5]
    return Sampling(temperatures, every * 77, every + 5, Truncation(top_k, top_p, min_p) if truncated else None)


def on_device(sampling: Sampling) -> Sampling:
    cut = sampling.truncation
    moved = None if cut is None else Truncation(_moved(cut.top_k), _moved(cut.top_p), _moved(cut.min_p))
    return Sampling(sampling.temperatures.cuda(), sampling.seeds.cuda(), sampling.positions.cuda(), moved)


def _moved(column: torch.Tensor | None) -> torch.Tensor | None:
    return None if column is None else column.cuda()


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 40])
def test_tokens_are_those_of_the_cpu(rows, dtype, truncated) -> None:
    logits, sampling = some_logits(rows).to(dtype), some_sampling(rows, truncated=truncated)
    device, device_logits = on_device(sampling), logits.cuda()
    together = sample(device_logits, device)
    assert together.tolist() == sample(logits, sampling).tolist()
    for row in range(0, rows, 7):
        one = slice(row, row + 1)
        assert int(sample(device_logits[one], device.of(one))[0]) == int(together[row])


def test_kept_tokens_are_those_of_sorting() -> None:
    for scale in (0.0, 0.2, 2.5):  # the flatter, the more is left to the last program
        logits, sampling = some_logits(10, scale=scale), some_sampling(10, truncated=True)
        thresholds, expected = row_thresholds(logits.cuda(), on_device(sampling)), row_thresholds(logits, sampling)
        assert thresholds is not None and expected is not None
        kept, wanted = ((ranks(logits) >= least[:, None]).sum(-1) for least in (thresholds.cpu(), expected))
        assert ((kept - wanted).abs() <= wanted * 1e-4).all()  # weights are of float32: some at the border


def test_reports() -> None:
    logits, chosen = some_logits(10), torch.arange(10) * 1000
    on_gpu, on_cpu = log_probabilities(logits.cuda(), chosen.cuda(), 20), log_probabilities(logits, chosen, 20)
    assert torch.equal(on_gpu.ids.cpu(), on_cpu.ids)
    assert torch.allclose(on_gpu.values.cpu(), on_cpu.values, atol=1e-5)
    assert torch.allclose(on_gpu.chosen.cpu(), on_cpu.chosen, atol=1e-5)


def test_edits() -> None:
    logits, number = some_logits(4), 1000
    edits = (torch.arange(number).int() % 5 - 1, torch.arange(number).int(), torch.rand(number) + 0.5)
    offsets = torch.randn(number)
    on_gpu = logits.cuda()
    apply_edits_(on_gpu, FlatEdits(*(each.cuda() for each in (*edits, offsets))))
    apply_edits_(logits, FlatEdits(*edits, offsets))
    assert torch.equal(on_gpu.cpu(), logits)


def test_graph_samples_from_its_buffers() -> None:
    logits, sampling = some_logits(8).cuda(), on_device(some_sampling(8, truncated=True))
    sample(logits, sampling)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(logits, sampling)
    logits.copy_(logits.flip(0))
    sampling.positions.add_(1)
    graph.replay()
    assert tokens.tolist() == sample(logits, sampling).tolist()
