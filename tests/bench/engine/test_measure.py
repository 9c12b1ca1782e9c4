"""The bench of the engine prints every figure that the documentation speaks of: here on as little as makes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from updraft.bench.engine import host, invariance, peers, shapes, speculation, step_times
from updraft.bench.engine import measure as engine
from updraft.bench.engine import speed as engine_speed
from updraft.bench.engine.ceilings import matmul_flops, memory_bandwidth
from updraft.bench.engine.driving import engine_config, make_engine
from updraft.bench.engine.host import scheduler_microseconds
from updraft.bench.engine.measure import CB_SETTINGS, GROUPS, EngineBenchOptions, measure
from updraft.bench.engine.ranks import rank_figures
from updraft.bench.engine.scheduling import step_rows
from updraft.bench.engine.shapes import SHAPES, random_model, shape_config
from updraft.bench.engine.speculation import draft_of
from updraft.bench.engine.speed import DTYPES
from updraft.bench.shared.workload import Workload, WorkloadRequest
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.speculation.draft_model import DraftModel
from updraft.cloud_engine.engine.worker.slots import RowsOf, SlotState
from updraft.cloud_engine.models.decoder import Decoder
from updraft.cloud_engine.planning.step_time import MAX_ROW_COSTS, StepTimeModel
from updraft.embedded import pocket
from updraft.protocol.errors import ConfigurationError

LOADS, ACCEPTANCES = (1, 2), (0.8,)
HOST_ROWS, HOST_CONTEXTS = (1, 20), (64,)
#: With `vs_transformers_static` and `vs_transformers_cb` of the peers, which take minutes.
NAMED = {
    *(f"{what}_{how}_over_one" for what in ("prefill", "decode1", "decode8") for how in ("tensor", "pipeline")),
    *("decode_bandwidth_share", "prefill_matmul_share", "batch8_over_batch1", "scheduler_us_256", "kv_waste"),
    *("prefix_cost_zero_hits", "prefix_warm_over_cold_ttft", "spec_on_over_off_min", "spec_oracle08_speedup"),
    *("spec_step_share", "spec_acceptance", "seconds_to_first_token"),
}
MORE = {
    *("tokens_per_s", "output_tokens", "matmul_ceiling_share", "sampled_over_greedy", "decode_tokens_per_s"),
    *("memory_gb_per_s", "prefill_tokens_per_s", "prefix_tokens"),
    *(f"predicted_tokens_per_s_{size}x{context}" for size in (1, 64, 256) for context in (1024, 8192)),
    *("batch_invariant_cost", "divergence_rate", "divergence_rate_invariant"),
    *(f"{name}_{load}" for load in LOADS for name in ("spec_on_over_off", "spec_on_tokens_per_s", "spec_step_share")),
    *(f"host_us_{kind}_{rows}x{HOST_CONTEXTS[0]}" for kind in ("plain", "mixed") for rows in HOST_ROWS),
    *(
        f"{form}_{figure}"
        for form in ("bf16", "fp8", "int8", "int4", "Q8_0", "Q4_0", "Q4_K")
        for figure in ("decode_tokens_per_s", "prompt_tokens_per_s", "gb", "gb_in_file", "load_over_read")
    ),
    *StepTimeModel(1.0, 0.0, 0.0, rows=(0.0,) * MAX_ROW_COSTS).figures(),
    *(
        f"simulation_{figure}_error_{load}%"
        for figure in ("throughput", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
        for load in (30, 60, 90)
    ),
}


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> Workload:
    monkeypatch.setattr(engine_speed, "_PREFIX_S", 0)
    monkeypatch.setattr(engine, "prefix_figures", partial(engine_speed.prefix_figures, pairs=1))
    monkeypatch.setattr(engine, "rank_figures", partial(rank_figures, rounds=1))
    monkeypatch.setattr(engine_speed, "memory_bandwidth", lambda device: memory_bandwidth(device, 2**24))
    monkeypatch.setattr(engine_speed, "matmul_flops", lambda weight: matmul_flops(weight, 256))
    monkeypatch.setattr(invariance, "_ROUNDS", 1)
    monkeypatch.setattr(step_times, "_ROUNDS", 1)
    monkeypatch.setattr(host, "ROWS", HOST_ROWS)
    monkeypatch.setattr(host, "CONTEXTS", HOST_CONTEXTS)
    monkeypatch.setattr(host, "scheduler_microseconds", lambda: scheduler_microseconds(8))
    monkeypatch.setattr(speculation, "_BLOCK_S", 0.05)
    monkeypatch.setattr(speculation, "_BLOCKS", 4)
    monkeypatch.setattr(speculation, "_ORACLE_SHAPE", "pocket")
    monkeypatch.setattr(speculation, "LOADS", LOADS)
    monkeypatch.setattr(speculation, "ACCEPTANCES", ACCEPTANCES)
    return Workload(4, max_prompt=64, max_output=16)


def test_every_figure(little: Workload, tmp_path: Path) -> None:
    lines: list[str] = []
    kept: list[set[str]] = []
    options = EngineBenchOptions(tmp_path, workload=little, running=4, peers="none")
    figures = measure(options, lines.append, lambda partial: kept.append(set(partial)))
    assert set(figures) == NAMED | MORE
    assert all(math.isfinite(figure) for figure in figures.values())
    assert figures["output_tokens"] <= 4 * 16
    assert figures["spec_on_over_off_min"] == min(figures[f"spec_on_over_off_{load}"] for load in LOADS)
    assert len(lines) > len(options.groups)
    assert not list(tmp_path.iterdir())
    assert kept[0] == {"seconds_to_first_token"} and kept[-1] == set(figures)
    assert len(kept) == len(options.groups) and all(before < after for before, after in pairwise(kept))


def test_some_groups_of_a_model_that_is_never_written(
    little: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {**SHAPES["qwen3-0.6b"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    shape |= {"vocab_size": 640, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    monkeypatch.setattr(shapes, "SHAPES", {"qwen3-0.6b": shape})
    options = EngineBenchOptions(
        tmp_path, "qwen3-0.6b", workload=little, running=3, only=("throughput", "decode", "oracle"), peers="none"
    )
    assert options.groups == ["throughput", "decode", "oracle"]
    figures = measure(options, lambda _: None)
    assert {"tokens_per_s", "decode_bandwidth_share", "spec_oracle08_speedup"} < set(figures)
    assert not list(tmp_path.iterdir())


def test_an_oracle_for_several_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All get the same answer, so that one oracle knows it; all have blocks, and are drafted for as plain requests are;
    and the target is afterwards what it was."""
    monkeypatch.setattr(speculation, "_LOAD", 20)
    engines = _blocks_of_64(monkeypatch)
    are_plain = _drafted_rows(monkeypatch)
    target = random_model(shape_config("pocket"), torch.float32, torch.device("cpu"))
    weight = target.norm.weight.clone()
    figures = speculation.oracle_under_load(target, draft_of(target, "pocket"))
    assert list(figures) == ["spec_oracle08_speedup_20"]
    assert torch.equal(target.norm.weight, weight)
    assert engines[-1].stats().draft_accepted > 0
    assert are_plain
    assert all(are_plain)


def _blocks_of_64(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Collect the engines that the benchmark makes, with blocks of a GPU's size."""
    made: list[Engine] = []

    def make(model: Decoder, config: EngineConfig, **others: Any) -> Engine:
        blocks = config.num_gpu_blocks_override
        assert blocks is not None
        blocks = -(-blocks * config.block_size // 64)
        config = replace(config, block_size=64, num_gpu_blocks_override=blocks, draft_length="fixed")
        made.append(make_engine(model, config, **others))
        return made[-1]

    monkeypatch.setattr(speculation, "make_engine", make)
    return made


def _drafted_rows(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each row that is drafted for is a plain one."""
    drafted: list[bool] = []
    propose = DraftModel.propose

    def watched(drafter: DraftModel, batch: Sequence[SlotState], rows_of: RowsOf) -> None:
        drafted.extend(rows_of([item for item in batch if item.drafter == drafter.name]).are_plain.tolist())
        propose(drafter, batch, rows_of)

    monkeypatch.setattr(DraftModel, "propose", watched)
    return drafted


def test_groups_by_device(tmp_path: Path) -> None:
    everything = EngineBenchOptions(tmp_path).groups
    assert {*everything, "batches", "overlap", "escalation", "gaps"} == set(GROUPS)
    assert "peers" not in EngineBenchOptions(tmp_path, peers="none").groups
    assert {*GROUPS} - {*EngineBenchOptions(tmp_path, device="cuda").groups} == {
        "invariance",
        "pocket-drafts",
        "ranks",
        "formats",
    }
    for device, group in (("cpu", "gaps"), ("cuda", "invariance")):
        with pytest.raises(ConfigurationError, match=f"'{group}' cannot be measured on {device}"):
            EngineBenchOptions(tmp_path, device=device, only=(group,))
    with pytest.raises(ConfigurationError, match="Unknown group 'speed': choose from start, throughput"):
        EngineBenchOptions(tmp_path, only=("speed",))
    for shape, draft in (("gpt-5", None), ("pocket", "gpt-5")):
        with pytest.raises(ConfigurationError, match=r"Unknown shape 'gpt-5': choose from pocket, qwen2\.5-0\.5b"):
            EngineBenchOptions(tmp_path, shape, draft_shape=draft)


def test_random_models_are_of_their_shape() -> None:
    model = random_model(shape_config("pocket"), torch.bfloat16, torch.device("cpu"))
    weight = model.embed_tokens.weight
    assert weight.dtype == torch.bfloat16 and 0.015 < float(weight.float().std()) < 0.025
    assert (model.lm_head.weight is weight) == model.config.tie_word_embeddings
    assert bool((model.norm.weight == 1).all())
    config = shape_config("llama-3.1-8b")
    assert (config.hidden_size, config.num_kv_heads, config.vocab_size) == (4096, 8, 128256)
    draft = draft_of(model, "pocket")
    assert draft.config.context_length == model.config.context_length


def test_ratios_compare_the_best_peer_setting_with_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Updraft is measured before and after each peer; the mean of both counts."""
    theirs = {(64, 512): 16.0, (128, 1024): 12.0, (128, 2048): 30.0}
    monkeypatch.setattr(peers, "load", lambda *_: None)
    monkeypatch.setattr(peers, "static_batches", lambda *_: 5.0)
    monkeypatch.setattr(peers, "continuous_batching", lambda _model, _asked, *options: theirs[options])
    assert tuple(theirs) == CB_SETTINGS
    wanted = {"vs_transformers_static": 5 / 2, "vs_transformers_cb": 12 / 4}
    for kind, ours, names in (
        ("all", [1.0, 3.0, 5.0, 3.0, 1.0], list(wanted)),
        ("static", [1.0, 3.0], ["vs_transformers_static"]),
        ("continuous", [3.0, 5.0, 3.0, 1.0], ["vs_transformers_cb"]),
    ):
        seconds = iter(ours)
        monkeypatch.setattr(engine, "serving_time", lambda *_, seconds=seconds: next(seconds))
        options = EngineBenchOptions(tmp_path, workload=Workload(2, 8, 4), peers=kind, only=("peers",))
        assert measure(options, lambda _: None) == {name: wanted[name] for name in names}


def test_the_peers_answer_every_request() -> None:
    model = peers.load(pocket.pocket_large_folder(), DTYPES["float32"], "cpu")
    written: list[tuple[int, int]] = []
    generate = model.generate

    def counted(ids: torch.Tensor, **options: Any) -> torch.Tensor:
        out = generate(ids, **options)
        written.append((len(ids), out.shape[1] - ids.shape[1]))
        return out

    model.generate = counted
    questions = [WorkloadRequest([1, 2, 3], 4), WorkloadRequest([4], 2), WorkloadRequest([5, 6], 3)]
    assert peers.static_batches(model, questions, 2) > 0
    assert written == [(2, 4), (1, 3)]
    assert peers.continuous_batching(model, questions, 16, 64) > 0


def test_the_ceiling_counts_the_rows_of_each_step() -> None:
    questions = [WorkloadRequest([1] * 5, 3), WorkloadRequest([2] * 4, 2)]
    assert step_rows(questions, engine_config(2, 32)) == [(9, 2), (2, 2), (1, 1)]
