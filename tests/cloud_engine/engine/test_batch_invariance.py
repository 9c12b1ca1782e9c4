"""In batch-invariant mode a request's tokens and log-probabilities are bitwise the same, however it is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.worker.served_model import DraftWeights, ServedModel
from updraft.cloud_engine.models.config import ModelConfig
from updraft.cloud_engine.models.decoder import Decoder
from updraft.cloud_engine.models.rope import RotaryConfig
from updraft.kernels.linear import ops as linear_ops
from updraft.kernels.linear.onednn import OneDnnLinear
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.sampling import SamplingParams

VOCABULARY = 97
WIDE = 1344  # longer than what oneDNN sums in one way

Run = Callable[[Engine, Sequence[GenerationRequest]], list[Any]]
CASES = pytest.mark.parametrize(
    ("computing", "window"),
    [("the fastest here", None), ("the fastest here", 20), ("oneDNN and torch", 20)],
    indirect=["computing"],
)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if request.param == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 products")
    return request.param


@pytest.fixture
def computing(request: pytest.FixtureRequest, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of an engine: with our own products and attention where they are the fastest, and without."""
    options = {"dtype": str(dtype).removeprefix("torch.")}
    if request.param == "the fastest here":
        return options
    monkeypatch.setattr(linear_ops, "_beats_onednn", lambda *_: False)
    return {**options, "attention_backend": "torch"}


def wide_model(dtype: torch.dtype, window: int | None = None, noise: float = 0.0, context_length: int = 256) -> Decoder:
    """`noise`: of the weights, as a share of their deviation. With some it is a draft that is often wrong."""
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
        context_length=context_length,
        rms_norm_eps=1e-5,
        rotary=RotaryConfig.from_parameters({}, rotary_dim=16, context_length=context_length),
        tie_word_embeddings=False,
        windows=(window, None) if window else (),
    )
    model = Decoder(config).requires_grad_(False).eval().to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.15 * noise)
    return model


def invariant_engine(model: Decoder, *, draft: Decoder | None = None, **options: Any) -> Engine:
    config = EngineConfig(batch_invariant=True, **options)
    return Engine(ServedModel(model), config, draft=DraftWeights(draft) if draft else None)


def requests(prompts: Sequence[Sequence[int]]) -> list[GenerationRequest]:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=24, logprobs=3)
    return [GenerationRequest(str(i), list(prompt), params) for i, prompt in enumerate(prompts)]


def said(results: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(result.token_ids, result.logprobs) for result in results]


@pytest.mark.parametrize("computing", ["oneDNN and torch"], indirect=True)
@pytest.mark.parametrize(("block_size", "window", "length"), [(8, 20, 90), (16, 600, 1300), (64, 600, 1300)])
def test_the_same_bits_wherever_a_chunk_begins_in_a_block_behind_a_window(
    dtype: torch.dtype, block_size: int, window: int, length: int, computing: dict[str, Any], run: Run
) -> None:
    """A query that comes alone must not see fewer blocks than in the midst of its block."""
    model = wide_model(dtype, window, context_length=1500)
    prompt = [(7 * i) % VOCABULARY for i in range(length)]
    whole, cut = (
        said(
            run(
                invariant_engine(model, block_size=block_size, max_num_batched_tokens=budget, **computing),
                requests([prompt]),
            )
        )
        for budget in (512, 115 if length > 200 else 23)
    )
    assert whole == cut


@CASES
def test_the_same_bits_alone_in_a_batch_in_chunks_with_prefix_hits_and_preempted(
    dtype: torch.dtype,
    window: int | None,
    computing: dict[str, Any],
    make_prompts: Callable[..., list[list[int]]],
    run: Run,
) -> None:
    model, prompts = wide_model(dtype, window), make_prompts(12)
    wanted = [said(run(invariant_engine(model, **computing), requests([prompt])))[0] for prompt in prompts]
    if "attention_backend" in computing:
        assert isinstance(model.layers[0].mlp.down_proj, OneDnnLinear)
    ways: dict[str, dict[str, Any]] = {
        "batch": {},
        "chunks": {"max_num_batched_tokens": 16},
        "odd chunks": {"max_num_batched_tokens": 23, "max_num_seqs": 5},
        "preempted": {"num_gpu_blocks_override": 14},
    }
    for way, options in ways.items():
        engine = invariant_engine(model, **computing, **options)
        assert said(run(engine, requests(prompts))) == wanted, way
        if way == "preempted":
            assert engine.stats().preemptions > 0
        if way == "batch":
            again = said(run(engine, requests(prompts)))
            assert engine.stats().prefix_hit_tokens > 0
            assert again == wanted, "prefix hits"


@CASES
def test_the_same_bits_with_drafts_that_hold_and_drafts_that_do_not(
    dtype: torch.dtype,
    window: int | None,
    computing: dict[str, Any],
    make_prompts: Callable[..., list[list[int]]],
    run: Run,
) -> None:
    model, draft = wide_model(dtype, window), wide_model(dtype, window, noise=0.1)
    prompts = [prompt * 3 for prompt in make_prompts(4)]
    params = SamplingParams(temperature=0.3, repetition_penalty=0.5, seed=7, max_tokens=24, logprobs=3)

    def alone(prompt: list[int], index: int) -> tuple[Any, Any]:
        seeded = replace(params, seed=7 + index)
        return said(run(invariant_engine(model, **computing), [GenerationRequest("alone", prompt, seeded)]))[0]

    def asked(predictions: Sequence[list[int]] = ()) -> list[GenerationRequest]:
        drafts = predictions or [[]] * len(prompts)
        return [
            GenerationRequest(str(i), prompt, params, drafted, n=2)
            for i, (prompt, drafted) in enumerate(zip(prompts, drafts, strict=True))
        ]

    wanted = [alone(prompt, index) for prompt in prompts for index in (0, 1)]

    engine = invariant_engine(model, draft=draft, draft_length="fixed", **computing)
    assert said(run(engine, asked())) == wanted
    assert 0 < engine.stats().draft_accepted < engine.stats().draft_proposed

    engine = invariant_engine(model, ngram=True, draft_length="fixed", **computing)
    assert said(run(engine, asked())) == wanted
    assert 0 < engine.stats().ngram_accepted < engine.stats().ngram_proposed

    engine = invariant_engine(model, **computing)
    spoilt = [[*tokens[:8], (tokens[8] + 1) % VOCABULARY, *tokens[9:]] for tokens, _ in wanted[::2]]
    assert said(run(engine, asked(spoilt))) == wanted
    stats = engine.stats()
    assert min(stats.speculative_steps, stats.accepted_prediction_tokens, stats.rejected_prediction_tokens) > 0


class Leaky(OneDnnLinear):
    """One whose rows depend on how many there are."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * (1 + 1e-6 * len(hidden))


def test_a_layer_whose_rows_depend_on_their_number_is_refused_at_start() -> None:
    model = wide_model(torch.float32)
    model.layers[0].mlp.down_proj = Leaky(nn.Linear(WIDE, 64).requires_grad_(False), batch_invariant=True)  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match="batch_invariant is not supported on this machine"):
        invariant_engine(model)


def test_long_sums_in_pieces_are_the_same_sums() -> None:
    plain = nn.Linear(8 * WIDE, 64).requires_grad_(False)
    rows = torch.randn(40, 8 * WIDE)
    sums = OneDnnLinear(plain, batch_invariant=True)(rows)
    torch.testing.assert_close(sums, plain(rows), rtol=1e-4, atol=1e-4)
    total = torch.zeros(40, 64)
    for part, weight in zip(rows.split(1024, dim=1), plain.weight.split(1024, dim=1), strict=True):
        piece = nn.Linear(part.shape[1], 64).requires_grad_(False)
        piece.weight.copy_(weight)
        piece.bias.copy_(plain.bias if weight.data_ptr() == plain.weight.data_ptr() else torch.zeros(64))
        total += OneDnnLinear(piece)(part)
    assert torch.equal(sums, total), "not every oneDNN needs the pieces, but on every machine they are there"


def test_a_model_that_was_packed_by_onednn_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_ops, "_beats_onednn", lambda *_: False)
    model = wide_model(torch.float32)
    Engine(ServedModel(model), EngineConfig())
    with pytest.raises(ConfigurationError, match="Load the model again"):
        invariant_engine(model)
