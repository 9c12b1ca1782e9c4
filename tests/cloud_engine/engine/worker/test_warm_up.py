"""Launches before the first request: each way to attend and to sample, and nothing of it stays."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from plain_sampling import SamplingRow, sampling_rows
from updraft.cloud_engine.engine.worker import warm_up
from updraft.cloud_engine.engine.worker.cuda_graphs import GraphLimits
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.engine.worker.sampler import _flat, sampling_of
from updraft.cloud_engine.engine.worker.warm_up import make_ready, prompt_lengths, row_counts
from updraft.kernels.attention.launch import AttentionShape, tile_rows
from updraft.kernels.runtime.backend import kernel_cache
from updraft.kernels.runtime.numeric import next_power_of_2
from updraft.kernels.sampling.launch import split_row
from updraft.protocol.sampling import ResolvedParams
from updraft.text.logit_edits import LogitEditor


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (14, 2, 64), (8, 4, 256), (4, 4, 96)])
def test_prompts_of_all_ways_to_attend(heads: int, kv_heads: int, head_dim: int) -> None:
    shape = AttentionShape(heads, kv_heads, head_dim, 16, cache_bytes=2)
    launched = {tile_rows(shape, length) for length in prompt_lengths(512)}
    assert launched == {tile_rows(shape, length) for length in range(1, 5000)}
    assert prompt_lengths(5) == [1, 2, 4]


@pytest.mark.parametrize("vocabulary", [1000, 32000, 151936])
@pytest.mark.parametrize("multiprocessors", [132, 20])
def test_rows_of_all_sizes_of_kernels(vocabulary: int, multiprocessors: int) -> None:
    def size(rows: int) -> int:
        return next_power_of_2(split_row(rows, vocabulary, multiprocessors).programs)

    counts = row_counts(300, vocabulary, multiprocessors)
    assert {size(rows) for rows in counts} == {size(rows) for rows in range(1, 301)}
    assert counts[0] == 1 and len(set(map(size, counts))) == len(counts)
    assert max(row_counts(10**6, vocabulary, multiprocessors)) <= 512


def test_columns_begin_where_a_kernel_expects_it() -> None:
    """For another alignment Triton would compile again, in the middle of a step."""
    sampling = [ResolvedParams(temperature=0.5, top_k=4, top_p=0.5, min_p=0.1, logit_bias=((1, 1.0),))] * 3
    rows = sampling_rows([SamplingRow(7, 3, params, LogitEditor(params, (), ()).edits()) for params in sampling])
    aligned = sampling_of(rows, 64, torch.device("cpu"))
    assert aligned.truncation is not None
    cut = aligned.truncation
    columns = [aligned.temperatures, aligned.seeds, aligned.positions, cut.top_p, cut.min_p]
    edits = _flat(rows.edits, torch.device("cpu"))
    for of_one in (columns, [edits.rows, edits.token_ids, edits.divisors, edits.offsets]):
        assert all(column is not None and column.shape == (3,) for column in of_one)
        assert {(column.data_ptr() - of_one[0].data_ptr()) % 16 for column in of_one} == {0}
    assert aligned.seeds.tolist() == [7] * 3 and edits.token_ids.tolist() == [1] * 3


def test_nothing_is_launched_on_a_cpu(target, monkeypatch) -> None:
    runner = Runner(target, 8, 16)
    monkeypatch.setattr(runner, "compute_zeros", None)
    make_ready(runner, GraphLimits(1, 1), 64)


def test_passes_and_samples(target, monkeypatch, tmp_path: Path, caplog) -> None:
    monkeypatch.setattr(Runner, "runs_ahead", True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    runner = Runner(target, 4, 16)
    passes: list[int] = []
    run, sampled, log_probabilities, captured = runner.compute_zeros, warm_up.sample, warm_up.log_probabilities, []

    def counted(lengths, num_logits):
        passes.extend(lengths)
        (tmp_path / f"kernel{len(passes)}").mkdir()
        return run(lengths, num_logits)

    rows, reported = [], []
    monkeypatch.setattr(runner, "compute_zeros", counted)
    monkeypatch.setattr(runner, "capture", captured.append)
    monkeypatch.setattr(
        warm_up, "sample", lambda logits, arguments: rows.append(arguments) or sampled(logits, arguments)
    )
    monkeypatch.setattr(
        warm_up, "log_probabilities", lambda *arguments: reported.append(arguments[2]) or log_probabilities(*arguments)
    )
    with caplog.at_level(logging.INFO):
        make_ready(runner, limits := GraphLimits(2, 1), 512)
    assert passes == [1, 2, 4, 8, 16, 32, 64]  # as long as there are blocks
    assert captured == [limits]
    assert reported == [0, 20]
    assert "7 kernels compiled" in caplog.text and str(tmp_path) in caplog.text
    ways = {
        (top_k > 0, top_p < 1, min_p > 0, bool(alike.masks), bool(alike.edits))
        for alike in rows
        for top_k, top_p, min_p in zip(alike.options[2], *alike.options[3:5].view(np.float64), strict=True)
    }
    assert len(ways) == 11 and any(edited for *_, edited in ways) and {way[3] for way in ways} == {True, False}


def test_answers_after_warm_up_are_the_same(monkeypatch, draft, make_engine, make_prompts, ask, run) -> None:
    requests = ask(make_prompts(5), max_tokens=12)
    expected = [result.token_ids for result in run(make_engine(draft=draft), requests)]
    monkeypatch.setattr(Runner, "runs_ahead", True)
    assert [result.token_ids for result in run(make_engine(draft=draft), requests)] == expected


def test_kernel_cache_folder(monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/one")
    assert kernel_cache() == Path("/one")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", "/two")
    assert kernel_cache() == Path("/two/.triton/cache")
    monkeypatch.delenv("TRITON_HOME")
    assert kernel_cache() == Path.home() / ".triton" / "cache"
