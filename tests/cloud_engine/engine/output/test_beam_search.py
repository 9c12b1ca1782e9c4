"""Beam search against transformers' own, and whatever else happens to the engine meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from decoder_reference import expected_logprobs, random_tokens, reference_model
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.execution.served_model import DraftWeights, ServedModel
from updraft.cloud_engine.engine.types.outputs import TokenOutput
from updraft.cloud_engine.engine.types.request import BeamParams, GenerationRequest
from updraft.cloud_engine.models.decoder import Decoder
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.embedded import pocket
from updraft.protocol.errors import ContextLengthError, InvalidRequestError
from updraft.protocol.requests import Message
from updraft.protocol.sampling import SamplingParams

END = 14


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    reference = reference_model("Llama", num_key_value_heads=2, num_hidden_layers=2, tie_word_embeddings=False)
    folder = tmp_path_factory.mktemp("llama")
    reference.save_pretrained(folder)
    return reference, load_model(folder)


@pytest.fixture(scope="module")
def make_beams(pair: tuple[Any, Decoder]) -> Callable[..., Engine]:
    def make(draft: Decoder | None = None, **config: Any) -> Engine:
        served = ServedModel(pair[1], eos_ids=frozenset([END]))
        return Engine(served, EngineConfig(**config), draft=DraftWeights(draft) if draft else None)

    return make


def search(prompt: list[int], width: int = 4, penalty: float = 1.0, **options: Any) -> GenerationRequest:
    params = SamplingParams(max_tokens=options.pop("max_tokens", 16), temperature=0.0, logprobs=0)
    options = {"n": width, **options}
    return GenerationRequest(f"beams of {len(prompt)}", prompt, params, beam=BeamParams(width, penalty), **options)


def by_transformers(reference: Any, request: GenerationRequest, end: int = END) -> list[tuple[list[int], float]]:
    """(tokens with the one that ended them, score), best first."""
    assert request.beam is not None
    tokens = torch.tensor([request.prompt_ids])
    result = reference.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=request.params.max_tokens,
        num_beams=request.beam.width,
        num_return_sequences=request.n,
        length_penalty=request.beam.length_penalty,
        do_sample=False,
        early_stopping=False,
        eos_token_id=end,
        pad_token_id=end,
        output_scores=True,
        return_dict_in_generate=True,
    )
    beams: list[tuple[list[int], float]] = []
    for row, score in zip(result.sequences.tolist(), result.sequences_scores.tolist(), strict=True):
        answer = row[len(request.prompt_ids) :]
        beams.append((answer[: answer.index(end) + 1] if end in answer else answer, score))
    return beams


def by_us(
    reference: Any, request: GenerationRequest, results: list[Any], end: int = END
) -> list[tuple[list[int], float]]:
    """The same of our answers, scored by the log-probabilities that came with them."""
    assert request.beam is not None
    beams: list[tuple[list[int], float]] = []
    for result in results:
        tokens, total = list(result.token_ids), sum(entry.logprob for entry in result.logprobs)
        if result.finish_reason == "stop":
            total += float(expected_logprobs(reference, [*request.prompt_ids, *tokens])[-1, end])
            tokens.append(end)
        beams.append((tokens, total / len(tokens) ** request.beam.length_penalty))
    return beams


def assert_same(ours: list[tuple[list[int], float]], theirs: list[tuple[list[int], float]]) -> None:
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=1e-4)


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -0.5])
@pytest.mark.parametrize("width", [2, 4, 7])
def test_answers_and_scores_are_those_of_transformers(pair, make_beams, run, width, penalty) -> None:
    ended = 0
    for length in (3, 16, 33):
        request = search(random_tokens(length, length), width, penalty)
        results = run(make_beams(), [request])
        assert_same(by_us(pair[0], request, results), by_transformers(pair[0], request))
        ended += sum(result.finish_reason == "stop" for result in results)
    assert ended, "some answers end before their limit"


def test_the_shipped_model_answers_like_transformers() -> None:
    folder = pocket.pocket_large_folder()
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    served = ServedModel.from_folder(folder, EngineConfig())
    (end,) = served.eos_ids
    engine = Engine(served, EngineConfig())
    for question in ("What is 34 + 57?", "How many days has March?"):
        request = search(engine.tokenizer.encode_chat([Message(role="user", content=question)]), max_tokens=40)
        engine.add_request(request)
        answers: list[TokenOutput] = []
        while engine.has_work:
            answers += engine.step()
        assert_same(by_us(reference, request, answers, end), by_transformers(reference, request, end))


@pytest.mark.parametrize(
    "config",
    [
        {"block_size": 4, "max_num_batched_tokens": 16},
        {"block_size": 64, "enable_prefix_caching": False},
        {"block_size": 4, "num_gpu_blocks_override": 52, "max_num_batched_tokens": 16},  # preempts
    ],
    ids=str,
)
@pytest.mark.parametrize("with_draft", [False, True])
def test_company_chunks_preemption_and_prefix_hits_change_nothing(
    pair, make_beams, ask, run, config, with_draft
) -> None:
    searches = [search(random_tokens(length, length)) for length in (3, 16, 33, 30)]
    expected = [result.token_ids for request in searches for result in run(make_beams(), [request])]
    others = ask([random_tokens(40, seed) for seed in range(5)])
    plain = [result.token_ids for result in run(make_beams(), others)]
    engine = make_beams(pair[1] if with_draft else None, **config)
    for _ in range(2):
        results = run(engine, [*others[:2], *searches, *others[2:]])
        answers = [result.token_ids for result in results]
        assert answers[2:-3] == expected
        assert answers[:2] + answers[-3:] == plain
    if "num_gpu_blocks_override" not in config:  # else others have taken the blocks by then
        assert any(result.stats.cached_tokens for result in results[2:-3]) == config.get("enable_prefix_caching", True)
    assert bool(engine.stats().preemptions) == ("num_gpu_blocks_override" in config)


def test_the_best_of_the_beams_are_returned(pair, make_beams, run) -> None:
    request = search(random_tokens(20), width=5, n=2)
    results = run(make_beams(), [request])
    assert_same(by_us(pair[0], request, results), by_transformers(pair[0], request)[:2])


def test_aborted_at_any_step_it_leaves_nothing(make_beams) -> None:
    for steps in range(9):
        engine = make_beams(max_num_batched_tokens=16, max_num_seqs=8)
        engine.add_request(search(random_tokens(33)))
        for _ in range(steps):
            assert not list(engine.step())
        engine.abort("beams of 33")
        stats = engine.stats()
        assert (engine.has_work, stats.kv_blocks_used, stats.running, stats.waiting) == (False, 0, 0, 0)
        engine.add_request(search(random_tokens(33)))
        engine.reset()
        assert not engine.has_work


def test_beams_share_the_blocks_of_their_common_prefix(make_beams) -> None:
    engine = make_beams(block_size=16)
    engine.add_request(search(random_tokens(40), width=8, max_tokens=30))
    for _ in range(3):
        engine.step()
    assert engine.stats().running == 8
    assert engine.stats().kv_blocks_used <= 2 + 8, "the full blocks of the prompt are there once"


def test_the_prompt_can_be_scored_too(pair, make_beams, run) -> None:
    prompt = random_tokens(20)
    params = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=0)
    best, other = run(make_beams(), [GenerationRequest("a", prompt, params, n=2, beam=BeamParams(3))])
    assert len(best.prompt_logprobs) == 19
    assert other.prompt_logprobs == []


@pytest.mark.parametrize(
    "options", [{"temperature": 0.5}, {"top_p": 0.9}, {"min_tokens": 2}, {"repetition_penalty": 2.0}]
)
def test_sampling_options_are_refused(make_beams, options) -> None:
    params = SamplingParams(**{"max_tokens": 4, **options})
    with pytest.raises(InvalidRequestError, match="raw probabilities"):
        make_beams().add_request(GenerationRequest("a", [1], params, n=2, beam=BeamParams(2)))


def test_beams_that_cannot_fit_are_refused(make_beams) -> None:
    with pytest.raises(ContextLengthError, match="fewer beams"):
        make_beams(num_gpu_blocks_override=11).add_request(search(random_tokens(33)))
    with pytest.raises(InvalidRequestError, match="between 1 and 4"):
        make_beams(max_num_seqs=4).add_request(search([1], width=5))
    with pytest.raises(InvalidRequestError, match="n must not exceed the number of beams"):
        make_beams().add_request(search([1], width=2, n=3))


def test_beams_without_an_end_go_as_far_as_each_has_blocks(make_beams) -> None:
    engine = make_beams(num_gpu_blocks_override=11)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    engine.add_request(GenerationRequest("open", random_tokens(9), params, beam=BeamParams(4)))
    while engine.has_work:
        outputs = engine.step()
    (answer,) = outputs
    assert (len(answer.token_ids), answer.finish_reason) == (2 * 16 - 9, "length")
