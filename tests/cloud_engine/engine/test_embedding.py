"""Embeddings through the step loop against transformers' hidden states, whatever the steps look like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoder_reference import SHAPES, random_tokens, reference_model
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.worker.served_model import DraftWeights, ServedModel
from updraft.cloud_engine.models.decoder import Decoder
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.protocol.errors import ContextLengthError, InvalidRequestError
from updraft.protocol.sampling import SamplingParams

torch.set_num_threads(1)
LENGTHS = (1, 15, 16, 17, 40, 64, 131)
PROMPTS = [random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=["llama-gqa-tied", "qwen3", "gemma3", "mistral-window"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    architecture, options = SHAPES[request.param]
    reference = reference_model(architecture, **options)
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    return reference, load_model(folder)


def expected(reference: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        hidden = reference.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
    return torch.nn.functional.normalize(hidden.mean(0), dim=0)


def engine_of(model: Decoder, *, draft: DraftWeights | None = None, **config: Any) -> Engine:
    return Engine(ServedModel(model), EngineConfig(**config), draft=draft)


def embedding_of(name: str, tokens: list[int]) -> GenerationRequest:
    return GenerationRequest(name, tokens, embed=True)


def step_to_the_end(engine: Engine, *requests: GenerationRequest) -> dict[str, Any]:
    """The last output of each request."""
    for request in requests:
        engine.add_request(request)
    last: dict[str, Any] = {}
    while engine.has_work:
        for output in engine.step():
            last[output.request_id] = output
    assert engine.stats().kv_blocks_used == 0
    return last


@pytest.mark.usefixtures("both_depths")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_batched_tokens": 23},
        {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 10, "max_num_seqs": 3},
    ],
    ids=["whole", "chunked", "preempted"],
)
def test_values_match_transformers(pair: tuple[Any, Decoder], config: dict[str, Any]) -> None:
    reference, model = pair
    engine = engine_of(model, **config)
    outputs = step_to_the_end(engine, *(embedding_of(str(i), prompt) for i, prompt in enumerate(PROMPTS)))
    for index, prompt in enumerate(PROMPTS):
        output = outputs[str(index)]
        torch.testing.assert_close(torch.tensor(output.embedding), expected(reference, prompt), atol=1e-4, rtol=0)
        assert (output.token_ids, output.finish_reason) == ([], "stop")
        assert (output.stats.prompt_tokens, output.stats.completion_tokens) == (len(prompt), 0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    reference = reference_model(*SHAPES["llama-gqa-tied"][:1], **SHAPES["llama-gqa-tied"][1])
    folder = tmp_path_factory.mktemp("llama")
    reference.save_pretrained(folder)
    return reference, load_model(folder)


@pytest.mark.usefixtures("both_depths")
def test_a_preempted_embedding_begins_anew(llama: tuple[Any, Decoder]) -> None:
    """The answer's second block is one of those that the embedding has begun to fill."""
    reference, model = llama
    engine = engine_of(model, num_gpu_blocks_override=8, max_num_batched_tokens=16, max_num_seqs=2)
    prompt = PROMPTS[-1][:100]
    answer = GenerationRequest("a", PROMPTS[1], SamplingParams(temperature=0, max_tokens=60))
    outputs = step_to_the_end(engine, answer, embedding_of("e", prompt))
    assert engine.stats().preemptions > 0
    torch.testing.assert_close(torch.tensor(outputs["e"].embedding), expected(reference, prompt), atol=1e-4, rtol=0)


@pytest.mark.usefixtures("both_depths")
@pytest.mark.parametrize("with_draft", [False, True])
def test_neither_disturbs_the_other(llama: tuple[Any, Decoder], with_draft: bool) -> None:
    """Answers beside embeddings are the same, and a prompt that is cached is still embedded whole."""
    reference, model = llama
    prompt = PROMPTS[-1]
    question = GenerationRequest("q", prompt, SamplingParams(temperature=0, max_tokens=30))
    draft = DraftWeights(model) if with_draft else None
    engine = engine_of(model, draft=draft, max_num_batched_tokens=48, max_num_seqs=4)
    alone = step_to_the_end(engine_of(model), question)
    step_to_the_end(engine, question)
    queried = engine.stats().prefix_query_tokens
    beside = step_to_the_end(engine, embedding_of("e1", prompt), question, embedding_of("e2", PROMPTS[3]))
    assert beside["q"].stats.completion_tokens == alone["q"].stats.completion_tokens == 30
    assert beside["q"].token_ids[-1] == alone["q"].token_ids[-1]
    assert beside["q"].stats.cached_tokens == 128
    for name, tokens in (("e1", prompt), ("e2", PROMPTS[3])):
        torch.testing.assert_close(torch.tensor(beside[name].embedding), expected(reference, tokens), atol=1e-4, rtol=0)
        assert beside[name].stats.cached_tokens == 0
    assert engine.stats().prefix_query_tokens == queried + len(prompt)


@pytest.mark.usefixtures("both_depths")
def test_an_aborted_embedding_leaves_nothing_behind(llama: tuple[Any, Decoder]) -> None:
    _, model = llama
    engine = engine_of(model, max_num_batched_tokens=16)
    engine.add_request(embedding_of("e", PROMPTS[-1]))
    assert not list(engine.step())
    engine.abort("e")
    assert not engine.has_work
    assert engine.stats().kv_blocks_used == 0


def test_an_embedding_takes_no_blocks_of_the_prefix_cache(llama: tuple[Any, Decoder]) -> None:
    _, model = llama
    engine = engine_of(model, num_gpu_blocks_override=16)
    prompt = PROMPTS[-1][:70]
    question = GenerationRequest("q", prompt, SamplingParams(temperature=0, max_tokens=1))
    step_to_the_end(engine, question)
    for number in range(12):
        step_to_the_end(engine, embedding_of("e", [number, *prompt[:50]]))
    assert step_to_the_end(engine, question)["q"].stats.cached_tokens == 64


def test_limits(llama: tuple[Any, Decoder]) -> None:
    _, model = llama
    engine = engine_of(model)
    full = random_tokens(256)
    assert len(step_to_the_end(engine, embedding_of("full", full))["full"].embedding) == 64
    with pytest.raises(ContextLengthError):
        engine.add_request(embedding_of("over", [*full, 1]))
    with pytest.raises(ContextLengthError, match="context is 64 tokens"):
        engine_of(model, num_gpu_blocks_override=4).add_request(embedding_of("over", full))
    with pytest.raises(InvalidRequestError, match="no tokens"):
        engine.add_request(embedding_of("empty", []))
    with pytest.raises(InvalidRequestError, match="one embedding"):
        engine.add_request(GenerationRequest("two", [1], embed=True, n=2))
