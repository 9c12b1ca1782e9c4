"""StepResult output with speculation has the model's distribution: chi-square against one computed in numpy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from forward_chunks import Chunk, compute
from scipy.stats import chi2
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.engine.worker.served_model import DraftWeights, ServedModel
from updraft.cloud_engine.models.decoder import Decoder
from updraft.protocol.sampling import SamplingParams

VOCABULARY, PROMPT, SAMPLES = 20, [3, 1, 4, 1, 5], 5000
Pair = tuple[int, int]


def distribution(model: Decoder, tokens: list[int], params: SamplingParams) -> np.ndarray:
    """Softmax at the temperature, cut to top-k, renormalised, cut to at least top-p, renormalised."""
    logits = compute(Runner(model, 1, 16), [Chunk(tokens, 0, [0], 1)])[0].double().numpy()
    scaled = logits / params.temperature
    order = np.argsort(-scaled)[: params.top_k or VOCABULARY]
    probabilities = np.exp(scaled[order] - scaled.max())
    probabilities /= probabilities.sum()
    kept = order[: int(np.searchsorted(np.cumsum(probabilities), params.top_p)) + 1]
    full = np.zeros(VOCABULARY)
    full[kept] = probabilities[: len(kept)]
    return full / full.sum()


def expected_pairs(model: Decoder, params: SamplingParams) -> dict[Pair, float]:
    first = distribution(model, PROMPT, params)
    return {
        (a, b): float(first[a] * chance)
        for a in np.flatnonzero(first)
        for b, chance in enumerate(distribution(model, [*PROMPT, int(a)], params))
        if chance > 0
    }


def p_value(counts: Counter[Pair], expected: dict[Pair, float]) -> float:
    """Of Pearson's test; pairs expected less than five times are one class, impossible ones refute at once."""
    if counts.keys() - expected.keys():
        return 0.0
    frequent = {pair: share * SAMPLES for pair, share in expected.items() if share * SAMPLES >= 5}
    observed = [counts[pair] for pair in frequent]
    rest = SAMPLES - sum(frequent.values())
    classes = list(zip([*observed, SAMPLES - sum(observed)], [*frequent.values(), rest], strict=True))
    statistic = sum((count - expected) ** 2 / expected for count, expected in classes if expected > 1e-9)
    return float(chi2.sf(statistic, len(classes) - 1))


@pytest.fixture(scope="module")
def models(make_llama) -> tuple[Decoder, Decoder]:
    """A target and a draft that is quite another model."""
    return make_llama(0, vocab_size=VOCABULARY, context_length=16), make_llama(
        7, vocab_size=VOCABULARY, context_length=16
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_pairs_of_tokens_are_drawn_as_often_as_they_should(models: tuple[Decoder, Decoder], temperature: float) -> None:
    target, draft = models
    params = SamplingParams(temperature=temperature, top_p=0.9, top_k=12, max_tokens=3)
    config = EngineConfig(max_num_seqs=64, max_waiting=SAMPLES, num_speculative_tokens=2, draft_length="fixed")
    engine = Engine(ServedModel(target), config, draft=DraftWeights(draft))
    for number in range(SAMPLES):
        engine.add_request(GenerationRequest(str(number), PROMPT, replace(params, seed=number)))
    answers: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    counts = Counter((answer[0], answer[1]) for answer in answers.values())
    assert p_value(counts, expected_pairs(target, params)) > 1e-3
    for other in (draft, target):  # the test can tell: neither the draft's nor a slightly different temperature
        wrong = SamplingParams(temperature=temperature * 1.15, top_p=0.9, top_k=12)
        assert p_value(counts, expected_pairs(other, wrong if other is target else params)) < 1e-6
    stats = engine.stats()
    assert 0.02 < stats.draft_accepted / stats.draft_proposed < 0.9
    assert stats.speculative_steps > 0
