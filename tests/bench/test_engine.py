"""The bench of the engine prints every figure that the documentation speaks of: here on as little as makes them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from updraft.bench import engine, peers, speculation
from updraft.bench.engine import CB_SETTINGS, DTYPES, Setting, engine_config, measure
from updraft.bench.scheduling import step_rows
from updraft.bench.workload import Asked, Workload
from updraft.embedded import pocket

LOADS, ACCEPTANCES = (1, 2), (0.8,)
#: With `vs_transformers_static` and `vs_transformers_cb` of the peers, which take minutes.
NAMED = {
    *("decode_bandwidth_share", "prefill_matmul_share", "batch8_over_batch1", "scheduler_us_256", "kv_waste"),
    *("prefix_cost_zero_hits", "prefix_warm_over_cold_ttft", "spec_on_over_off_min", "spec_oracle08_speedup"),
    *("spec_step_share", "spec_acceptance", "seconds_to_first_token"),
}
MORE = {
    *("tokens_per_s", "output_tokens", "matmul_ceiling_share", "drawn_over_greedy", "decode_tokens_per_s"),
    *("memory_gb_per_s", "prefill_tokens_per_s", "prefix_tokens", "scheduler_us_256_turnover"),
    *("batch_invariant_cost", "divergence_rate", "divergence_rate_invariant"),
    *(f"{name}_{load}" for load in LOADS for name in ("spec_on_over_off", "spec_on_tokens_per_s", "spec_step_share")),
}


def test_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_PREFIX_S", 0)
    monkeypatch.setattr(speculation, "_BLOCK_S", 0.05)
    monkeypatch.setattr(speculation, "_BLOCKS", 4)
    monkeypatch.setattr(speculation, "_ORACLE_SHAPE", "pocket")
    monkeypatch.setattr(speculation, "LOADS", LOADS)
    monkeypatch.setattr(speculation, "ACCEPTANCES", ACCEPTANCES)
    said: list[str] = []
    workload = Workload(4, most_prompt=64, most_output=16)
    figures = measure(Setting(pocket.pocket_large_folder(), workload=workload, peers="none"), said.append)
    assert set(figures) == NAMED | MORE
    assert all(math.isfinite(figure) for figure in figures.values())
    assert figures["output_tokens"] <= 4 * 16
    assert figures["spec_on_over_off_min"] == min(figures[f"spec_on_over_off_{load}"] for load in LOADS)
    assert len(said) > 10


def test_ratios_are_their_seconds_over_ours_of_the_best_of_their_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours are taken before and after each of theirs, and the mean of both counts."""
    theirs = {(64, 512): 16.0, (128, 1024): 12.0, (128, 2048): 30.0}
    ours = iter([1.0, 3.0, 5.0, 3.0, 1.0])
    monkeypatch.setattr(peers, "load", lambda *_: None)
    monkeypatch.setattr(peers, "static_batches", lambda *_: 5.0)
    monkeypatch.setattr(peers, "continuous_batching", lambda _model, _asked, *setting: theirs[setting])
    assert tuple(theirs) == CB_SETTINGS
    figures = engine._peer_figures(Setting(pocket.pocket_large_folder()), [], lambda: next(ours), lambda _: None)
    assert figures == {"vs_transformers_static": 5 / 2, "vs_transformers_cb": 12 / 4}


def test_the_peers_answer_every_request() -> None:
    model = peers.load(pocket.pocket_large_folder(), DTYPES["float32"], "cpu")
    written: list[tuple[int, int]] = []
    generate = model.generate

    def counted(ids: torch.Tensor, **options: Any) -> torch.Tensor:
        out = generate(ids, **options)
        written.append((len(ids), out.shape[1] - ids.shape[1]))
        return out

    model.generate = counted
    asked = [Asked([1, 2, 3], 4), Asked([4], 2), Asked([5, 6], 3)]
    assert peers.static_batches(model, asked, 2) > 0
    assert written == [(2, 4), (1, 3)]
    assert peers.continuous_batching(model, asked, 16, 64) > 0


def test_the_ceiling_counts_the_rows_of_each_step() -> None:
    asked = [Asked([1] * 5, 3), Asked([2] * 4, 2)]
    assert step_rows(asked, engine_config(2)) == [(9, 2), (2, 2), (1, 1)]
