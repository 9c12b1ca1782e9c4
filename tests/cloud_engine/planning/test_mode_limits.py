"""A mode's limits follow from what steps were measured to take: within the engine's, in order, and to the objective."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from updraft.cloud_engine.engine.config import MODES, EngineConfig, settings_of
from updraft.cloud_engine.planning.mode_limits import limits_from, measured_limits
from updraft.cloud_engine.planning.step_time import StepContent, StepTimeModel

CONTEXT = 512
costs_of = st.builds(
    StepTimeModel,
    steps=st.floats(1e-5, 1),
    sequences=st.floats(0, 0.5),
    prompt_tokens=st.floats(0, 0.1),
    context_tokens=st.floats(0, 1e-4),
    prompt_pairs=st.floats(0, 1e-5),
    largest_batch=st.integers(1, 2**16),
)


def decode_s(costs: StepTimeModel, requests: int) -> float:
    return costs.seconds(StepContent(1, requests, 0, requests * CONTEXT, 0))


@given(costs_of, st.integers(1, 5_000))
def test_limits_are_the_engine_s_and_in_the_order_of_the_modes(costs: StepTimeModel, max_step_ms: int) -> None:
    latency, balanced, throughput = (measured_limits(costs, mode, max_step_ms) for mode in MODES)
    for limits in (latency, balanced, throughput):
        EngineConfig(**settings_of(limits))
        assert 1 <= limits.num_speculative_tokens <= 8
        assert limits.max_num_seqs <= costs.largest_batch
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_step_ms"):
        assert getattr(latency, name) <= getattr(balanced, name) <= getattr(throughput, name)
    assert latency.num_speculative_tokens >= balanced.num_speculative_tokens >= throughput.num_speculative_tokens


@given(costs_of, st.integers(1, 5_000))
def test_latency_is_the_largest_batch_within_the_objective(costs: StepTimeModel, max_step_ms: int) -> None:
    limits, fastest = measured_limits(costs, "latency", max_step_ms), measured_limits(costs, "throughput")
    batch = limits.max_num_seqs
    assert batch == 1 or decode_s(costs, batch) <= max_step_ms / 1e3
    assert batch == fastest.max_num_seqs or decode_s(costs, batch + 1) > max_step_ms / 1e3
    looser = measured_limits(costs, "latency", 2 * max_step_ms)
    assert looser.max_num_seqs >= batch


@given(costs_of)
def test_throughput_is_the_last_doubling_that_gains_5_percent(costs: StepTimeModel) -> None:
    def gain(requests: int) -> float:
        return 2 * decode_s(costs, requests) / decode_s(costs, 2 * requests)

    batch = measured_limits(costs, "throughput").max_num_seqs
    assert batch == 1 or gain(batch // 2) >= 1.05 * 0.999
    assert 2 * batch > costs.largest_batch or gain(batch) <= 1.05 * 1.001


def test_a_node_where_steps_cost_more_by_the_request_takes_fewer_at_a_time() -> None:
    cheap = StepTimeModel(steps=0.01, sequences=1e-5, prompt_tokens=1e-6)
    dear = replace(cheap, sequences=1e-2, prompt_tokens=1e-2)
    assert measured_limits(cheap, "throughput").max_num_seqs > measured_limits(dear, "throughput").max_num_seqs
    assert measured_limits(cheap, "latency").max_num_seqs == 256
    assert measured_limits(dear, "latency", 50).max_num_seqs == 4
    assert (
        measured_limits(cheap, "latency").num_speculative_tokens
        > measured_limits(dear, "latency").num_speculative_tokens
    )


def test_without_a_file_the_stated_limits_hold(tmp_path: Path) -> None:
    costs, file = StepTimeModel(0.01, 0.002, 1e-4, 1e-7, 1e-8), tmp_path / "costs.json"
    file.write_text(json.dumps({"metrics": costs.figures()}))
    assert limits_from(None, "latency") == MODES["latency"]
    for mode, tokens in (("latency", 2048), ("balanced", 8192), ("throughput", 8192)):
        on_gpu = limits_from(None, mode, device="cuda:1")
        assert (on_gpu.max_num_seqs, on_gpu.max_num_batched_tokens) == (256, tokens)
    assert limits_from(file, "latency", device="cuda") == measured_limits(costs, "latency")
    assert limits_from(file, "latency") == measured_limits(costs, "latency") != MODES["latency"]
