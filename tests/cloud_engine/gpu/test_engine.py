"""On a GPU: the engine's answers are those of the CPU, with and without graphs, drafts and sampling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from device_waits import forbid_device_waits
from forward_chunks import Chunk, compute
from slot_batches import slot_batch
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.worker.cuda_graphs import GraphLimits
from updraft.cloud_engine.engine.worker.model_runner import ForwardBatch, Runner
from updraft.cloud_engine.engine.worker.served_model import DraftWeights, ServedModel
from updraft.cloud_engine.models.config import ModelConfig
from updraft.cloud_engine.models.decoder import Decoder
from updraft.cloud_engine.models.rope import RotaryConfig
from updraft.kernels.attention.block_tables import BlockTables
from updraft.protocol.sampling import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=515,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    context_length=512,
    rms_norm_eps=1e-5,
    rotary=RotaryConfig.from_parameters({}, rotary_dim=64, context_length=512),
    tie_word_embeddings=False,
)


def model(device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    """The same weights on any device."""
    weights = Decoder(CONFIG).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in weights.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.06, generator=generator)
        else:
            parameter.fill_(1.0)
    return weights.to(device, dtype)


def answers(device: str, params: SamplingParams, *, draft: bool = False, **options: Any) -> list[list[int]]:
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=96, device=device, **options)
    weights = DraftWeights(model(device), None) if draft else None
    engine = Engine(ServedModel(model(device)), config, draft=weights)
    generator = torch.Generator().manual_seed(7)
    collected: list[list[int]] = [[] for _ in range(12)]
    for number in range(12):
        prompt = torch.randint(515, (5 + 17 * number,), generator=generator).tolist()
        engine.add_request(GenerationRequest(str(number), prompt, params))
    while engine.has_work:
        for output in engine.step():
            collected[int(output.request_id)].extend(output.token_ids)
    return collected


GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("block_size", [16, 64])
def test_greedy_answers_of_the_cpu(block_size: int, graphs: bool) -> None:
    expected = answers("cpu", GREEDY)
    assert answers("cuda", GREEDY, block_size=block_size, enforce_eager=not graphs) == expected


@pytest.mark.parametrize("graphs", [True, False])
def test_drafts_change_nothing(graphs: bool) -> None:
    expected = answers("cpu", GREEDY)
    assert answers("cuda", GREEDY, draft=True, draft_length="fixed", enforce_eager=not graphs) == expected


def test_seeds_give_the_tokens_of_the_cpu() -> None:
    params = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=40, seed=3, max_tokens=40, ignore_eos=True, repetition_penalty=1.1
    )
    assert answers("cuda", params) == answers("cpu", params)


def test_bfloat16_is_near_the_cpu() -> None:
    tokens = torch.randint(515, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    chunk = Chunk(tokens, 0, list(range(13)), len(tokens))
    exact = compute(Runner(model("cpu"), 16, 16), [chunk]).log_softmax(-1)
    near = compute(Runner(model("cuda", torch.bfloat16), 16, 16), [chunk]).log_softmax(-1).cpu()
    assert ((near - exact).norm() / exact.norm()).item() < 0.02


@pytest.mark.parametrize("graphs", [True, False])
def test_bfloat16_decodes_and_verifies_near_the_cpu(graphs: bool) -> None:
    """Rows for one token and for eight of each of three sequences, which is what graphs are captured for."""
    generator = torch.Generator().manual_seed(2)
    contexts = [torch.randint(515, (length,), generator=generator).tolist() for length in (40, 129, 64)]
    tables = [list(range(9 * number, 9 * number + 9)) for number in range(3)]
    prompts = [Chunk(tokens, 0, table, 1) for tokens, table in zip(contexts, tables, strict=True)]
    slots = BlockTables(3, 9)
    slots.replace([(slot, 0, table) for slot, table in enumerate(tables)])
    cpu, gpu = (Runner(each, 27, 16, tables=slots) for each in (model("cpu"), model("cuda", torch.bfloat16)))
    if graphs:
        gpu.capture(GraphLimits(3, 24))
    for runner in (cpu, gpu):
        compute(runner, prompts)
    for length in (1, 8):
        chunks = [
            Chunk([5] * length, len(tokens), table, length) for tokens, table in zip(contexts, tables, strict=True)
        ]
        batch = ForwardBatch(
            slot_batch(slots, [chunk.span for chunk in chunks], 3 * length, 16), torch.full((3 * length,), 5)
        )
        exact, near = (runner.compute(batch).log_softmax(-1).cpu() for runner in (cpu, gpu))
        assert ((near - exact).norm() / exact.norm()).item() < 0.02


def test_a_pass_does_not_wait_for_the_device() -> None:
    runner = Runner(model("cuda"), 64, 16)
    chunks = [Chunk([number], 20, [2 * number, 2 * number + 1], 1) for number in range(4)]
    compute(runner, chunks)
    with forbid_device_waits():
        compute(runner, chunks)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, temperature=0.8, seed=3)], ids=["greedy", "drawn"])
def test_steps_wait_for_events_only(params: SamplingParams, draft: bool) -> None:
    """Tokens come by copies into pinned memory, of which each is waited for by itself."""
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=96, device="cuda", draft_length="fixed")
    weights = DraftWeights(model("cuda"), None) if draft else None
    engine = Engine(ServedModel(model("cuda")), config, draft=weights)
    for number in range(4):
        engine.add_request(GenerationRequest(str(number), [number + 1] * 20, params))
    for _ in range(3):
        engine.step()
    with forbid_device_waits():
        for _ in range(3):
            engine.step()
    assert draft or engine.stats().overlapped_steps >= 5


@pytest.mark.parametrize("stop", [False, True])
def test_steps_launched_ahead_change_nothing(stop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ends that are known beforehand, and with those that come as a surprise."""
    params = replace(GREEDY, ignore_eos=not stop, stop_token_ids=tuple(range(0, 515, 20)) if stop else ())
    ahead_answers = answers("cuda", params)
    monkeypatch.setattr(Runner, "runs_ahead", False)
    assert ahead_answers == answers("cuda", params) == answers("cpu", params)


def test_the_second_of_several_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one")
    assert answers("cuda:1", GREEDY) == answers("cpu", GREEDY)
