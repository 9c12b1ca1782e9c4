"""The bench of the engine prints every figure that the documentation speaks of: here on as little as makes them."""

from __future__ import annotations

import math

import pytest
from updraft.bench import engine, speculation
from updraft.bench.engine import Setting, measure
from updraft.bench.workload import Workload
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
