"""In batch-invariant mode a request's tokens and log-probabilities are bitwise the same, however it is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.request import GenerationRequest
from updraft.cloud_engine.engine.served_model import DraftWeights, ServedModel
from updraft.cloud_engine.models.config import ModelConfig
from updraft.cloud_engine.models.decoder import Decoder
from updraft.cloud_engine.models.rope import RotaryConfig
from updraft.kernels import packed_linear
from updraft.kernels.onednn_linear import OneDnnLinear
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.sampling import SamplingParams

VOCABULARY = 97
WIDE = 1344  # longer than what oneDNN sums in one way

Run = Callable[[Engine, Sequence[GenerationRequest]], list[Any]]


def wide_model(dtype: torch.dtype, window: int | None = None) -> Decoder:
    torch.manual_seed(3)
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=WIDE,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        context_length=256,
        rms_norm_eps=1e-5,
        rotary=RotaryConfig.from_parameters({}, rotary_dim=16, context_length=256),
        tie_word_embeddings=False,
        windows=(window, None) if window else (),
    )
    model = Decoder(config).requires_grad_(False).eval().to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    return model


def invariant_engine(model: Decoder, *, draft: Decoder | None = None, **options: Any) -> Engine:
    config = EngineConfig(batch_invariant=True, **options)
    return Engine(ServedModel(model), config, draft=DraftWeights(draft) if draft else None)


def requests(prompts: Sequence[Sequence[int]]) -> list[GenerationRequest]:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=24, logprobs=3)
    return [GenerationRequest(str(i), list(prompt), params) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
def test_the_same_bits_alone_in_a_batch_in_chunks_with_prefix_hits_preempted_and_speculated(
    dtype: torch.dtype, window: int | None, make_prompts: Callable[..., list[list[int]]], run: Run
) -> None:
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 products")
    model, draft = wide_model(dtype, window), wide_model(dtype)
    name = str(dtype).removeprefix("torch.")
    prompts = make_prompts(12)
    alone = [run(invariant_engine(model, dtype=name), requests([prompt]))[0] for prompt in prompts]
    wanted = [(result.token_ids, result.logprobs) for result in alone]
    ways: dict[str, dict[str, Any]] = {
        "batch": {},
        "chunks": {"token_budget": 16},
        "odd chunks": {"token_budget": 23, "max_batch_size": 5},
        "preempted": {"num_blocks": 14},
        "speculated": {"draft": draft},
    }
    for way, options in ways.items():
        engine = invariant_engine(model, dtype=name, **options)
        got = [(result.token_ids, result.logprobs) for result in run(engine, requests(prompts))]
        assert got == wanted, way
        if way == "preempted":
            assert engine.stats().preemptions > 0
        if way == "batch":
            again = [(result.token_ids, result.logprobs) for result in run(engine, requests(prompts))]
            assert engine.stats().prefix_hit_tokens > 0
            assert again == wanted, "prefix hits"


class Leaky(OneDnnLinear):
    """One whose rows depend on how many there are."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * (1 + 1e-6 * len(hidden))


def test_a_layer_whose_rows_depend_on_their_number_is_refused_at_start() -> None:
    model = wide_model(torch.float32)
    model.layers[0].mlp.down_proj = Leaky(nn.Linear(WIDE, 64).requires_grad_(False), batch_invariant=True)  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match="batch_invariant cannot be had here"):
        invariant_engine(model)


def test_long_sums_in_pieces_are_the_same_sums() -> None:
    plain = nn.Linear(8 * WIDE, 64).requires_grad_(False)
    rows = torch.randn(40, 8 * WIDE)
    torch.testing.assert_close(OneDnnLinear(plain, batch_invariant=True)(rows), plain(rows), rtol=1e-4, atol=1e-4)


def test_a_model_that_was_packed_by_onednn_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "_is_ahead_of_onednn", lambda weight: False)
    model = wide_model(torch.float32)
    Engine(ServedModel(model), EngineConfig())
    with pytest.raises(ConfigurationError, match="Load it once more"):
        invariant_engine(model)
