"""A whole model over each attention backend, step by step: the same hidden states. Triton is interpreted on a CPU."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from updraft.cloud_engine.engine.kv.sizing import cache_spec
from updraft.kernels.attention.ops import AttentionBackend, NativeBackend, TorchBackend, TritonBackend, choose_backend
from updraft.kernels.attention.ragged_batch import RaggedBatch
from updraft.kernels.attention.types import QuerySpan
from updraft.kernels.runtime.native_library import load
from updraft.protocol.errors import ConfigurationError

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported

TABLES = [[3, 1, 5], [2, 4, 0]]
STEPS = [  # (start, length) of each sequence
    [(0, 20), (0, 3)],
    [(20, 1), (3, 17)],
    [(21, 4), (20, 1)],
    [(25, 1), (21, 1)],
]


def hidden_states(model, backend: AttentionBackend) -> list[torch.Tensor]:
    """Of every step, two rows of padding included."""
    states: list[torch.Tensor] = []
    with torch.inference_mode():
        for step in STEPS:
            spans = [QuerySpan(*chunk, table) for chunk, table in zip(step, TABLES, strict=True)]
            batch = RaggedBatch.of(spans, sum(length for _, length in step) + 2, 16)
            positions = torch.from_numpy(batch.positions().clip(0))
            states.append(model((positions * 7 + 3) % 97, positions, backend.begin(batch))[:-2])
    return states


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(NativeBackend, marks=pytest.mark.skipif(load() is None, reason="no C compiler")),
        pytest.param(TritonBackend, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="not interpreted")),
    ],
)
def test_steps_of_a_model(kind: type[NativeBackend | TritonBackend], target) -> None:
    if kind is TritonBackend:
        pytest.importorskip("triton")
    spec = cache_spec(target, 6, 16)
    for given, expected in zip(
        hidden_states(target, kind(spec)), hidden_states(target, TorchBackend(spec)), strict=True
    ):
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


def test_the_choice_and_its_reason(target) -> None:
    spec = cache_spec(target, 6, 16)
    backend, why = choose_backend(spec, "torch")
    assert (backend.name, why) == ("torch", "requested")
    if load() is not None:
        assert choose_backend(spec)[0].name == "native"
    backend, why = choose_backend(cache_spec(target, 6, 8))
    assert backend.name == "torch" and "multiples of 16" in why
    with pytest.raises(ConfigurationError, match="not on a CUDA device"):
        choose_backend(spec, "triton")
    with pytest.raises(ConfigurationError, match="multiples of 16"):
        choose_backend(cache_spec(target, 6, 8), "native")


def test_planner_gets_the_window_of_any_layer(target) -> None:
    assert not cache_spec(target, 6, 16).windowed
    config = replace(target.config, windows=(None, 8))
    assert config.windowed and not replace(config, windows=(None, target.config.context_length)).windowed
    pytest.importorskip("triton")
    assert TritonBackend(replace(cache_spec(target, 6, 16), windowed=True)).shape.windowed
