"""The figures of `make gpu` about a node's use, on tiny models and a CPU: each path runs and gives its figures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from updraft.bench.engine import batches, measure, peers, shapes
from updraft.bench.engine.batches import batch_figures, escalation_figures, overlap_figures
from updraft.bench.engine.measure import EngineBenchOptions
from updraft.bench.engine.shapes import SHAPES, random_model, shape_config
from updraft.bench.shared.workload import WorkloadRequest
from updraft.cloud_engine.engine import engine as engine_module
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.models.decoder import Decoder
from updraft.cloud_engine.planning.roofline import GPUS
from updraft.protocol.errors import ConfigurationError

TINY = {**SHAPES["qwen3-0.6b"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2} | {
    **{"vocab_size": 640, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    monkeypatch.setattr(shapes, "SHAPES", {"qwen3-0.6b": TINY})
    monkeypatch.setattr(batches, "_ROUNDS", 1)
    monkeypatch.setattr(batches, "_PROMPT", 24)
    return random_model(shape_config("qwen3-0.6b"), torch.float32, torch.device("cpu"))


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch steps ahead, as on a GPU."""
    monkeypatch.setattr(Runner, "runs_ahead", True)
    monkeypatch.setattr(engine_module, "make_ready", lambda *_: None)


def test_batches_with_graphs_without_and_beside_a_peer(model: Decoder, ahead: None) -> None:
    asked: list[list[WorkloadRequest]] = []
    eager: list[bool] = []
    lines: list[str] = []

    def peer(requests: Sequence[WorkloadRequest]) -> float:
        asked.append(list(requests))
        return 1.0

    def failing_peer(requests: Sequence[WorkloadRequest]) -> float:
        raise RuntimeError("out of memory")

    made = batches.make_engine
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batches, "make_engine", lambda *of: eager.append(of[1].enforce_eager) or made(*of))
        figures = batch_figures(model, GPUS["NVIDIA H200"], peer, lines.append, (1, 5))
    names = ("decode_tokens_per_s", "graphs_over_eager", "roofline_share", "batch_over_peer")
    assert set(figures) == {f"{name}_{size}" for name in names for size in (1, 5)}
    assert all(figure > 0 for figure in figures.values()) and len(lines) == len(figures)
    assert [len(requests) for requests in asked] == [1, 5] and eager == [False, True]
    assert {(len(request.prompt), request.output) for requests in asked for request in requests} == {(24, 64)}
    own = {"decode_tokens_per_s_1", "graphs_over_eager_1"}
    assert set(batch_figures(model, None, None, lines.append, (1,))) == own
    assert set(batch_figures(model, None, failing_peer, lines.append, (1,))) == own
    assert lines[-1] == "batch of 1: transformers' continuous batching failed: out of memory"


def test_a_mixed_batch_overlaps(model: Decoder, ahead: None) -> None:
    figures = overlap_figures(model, 20)
    assert figures["overlap_share_mixed"] >= 0.95 and 0 <= figures["vain_row_share"] < 0.05


@pytest.mark.usefixtures("ahead")
def test_escalations_with_a_draft_are_faster(model: Decoder) -> None:
    figures = escalation_figures(model, lambda _: None, (1, 3))
    assert list(figures) == ["escalation_draft_over_without_1", "escalation_draft_over_without_3"]
    assert 0 < figures["escalation_draft_over_without_1"] < 1


def test_the_peer_serves_a_model_without_a_file() -> None:
    peer = peers.random(TINY, torch.float32, "cpu")
    requests = [WorkloadRequest([1, 2, 3], 2), WorkloadRequest([4] * 300, 1)]
    assert peer.config.num_hidden_layers == 2 and peers.continuous_batch(peer, requests) > 0


def test_the_roofline_is_predicted_without_a_device(tmp_path) -> None:
    lines: list[str] = []
    figures = measure.measure(EngineBenchOptions(tmp_path, peers="none", only=("roofline",)), lines.append)
    assert round(figures["predicted_tokens_per_s_1x1024"]) == 221
    assert set(figures) == {f"predicted_tokens_per_s_{size}x{of}" for size in (1, 64, 256) for of in (1024, 8192)}
    assert all(line.startswith(("predicted for an NVIDIA H100", "roofline: predicted")) for line in lines)
    assert any("batch of 256, context 8,192 (53 fit)" in line for line in lines)


@pytest.mark.parametrize("group", ["batches", "overlap", "escalation"])
def test_groups_of_a_gpu_node(group: str, model: Decoder, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=f"'{group}' cannot be measured on cpu"):
        EngineBenchOptions(tmp_path, only=(group,))
    monkeypatch.setattr(measure, "_NOT_ON", {})
    monkeypatch.setattr(measure, "SHAPES", {"qwen3-0.6b": TINY})
    monkeypatch.setattr(measure, "batch_figures", partial(batch_figures, batches=(1,)))
    monkeypatch.setattr(measure, "overlap_figures", partial(overlap_figures, sequences=4))
    monkeypatch.setattr(measure, "escalation_figures", partial(escalation_figures, loads=(1,)))
    options = EngineBenchOptions(tmp_path, "qwen3-0.6b", "float32", peers="continuous", only=(group,))
    assert measure.measure(options, lambda _: None)
    assert not list(tmp_path.iterdir())  # no model is written for the peer
