"""The device draws the very tokens that the cloud engine draws, whatever the options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_sampling import SamplingRow, plain_edits, sample
from updraft.local_engine.sampling import gumbel_noise
from updraft.local_engine.sampling.row_sampler import RowSampler
from updraft.local_engine.sampling.truncation import largest
from updraft.protocol.sampling import PLAIN_SAMPLING, ResolvedParams, SamplingDefaults, SamplingParams

ENDS = frozenset({2, 5})
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 1e-6, 1e-5, 0.3, 0.7, 1.0, 2.0]),
    "top_k": st.sampled_from([0, 0, 1, 3, 40, 2000]),
    "top_p": st.sampled_from([1.0, 1.0, 0.95, 0.5, 1e-6]),
    "min_p": st.sampled_from([0.0, 0.0, 0.05, 0.9]),
    "typical_p": st.sampled_from([1.0, 1.0, 1.0, 0.8, 0.2]),
    "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.5]),
    "frequency_penalty": st.sampled_from([0.0, 0.0, 0.7, -2.0]),
    "presence_penalty": st.sampled_from([0.0, 0.0, 1.5]),
    "logit_bias": st.sampled_from([(), (), ((3, 4.5), (11, -100.0))]),
    "min_tokens": st.sampled_from([0, 0, 3]),
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.sampled_from([(), (7,)]),
    "seed": st.integers(-(2**63), 2**63 - 1),
}
SHAPES = ["normal", "peaked", "flat", "few values", "banned"]


def row_of_logits(shape: str, size: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    row = random.standard_normal(size) * 3
    if shape == "peaked":
        row = random.standard_normal(size) - 9
        row[random.integers(size, size=3)] += 12 * random.random(3)
    elif shape == "flat":
        row = np.full(size, random.standard_normal())
    elif shape == "few values":
        row = random.integers(0, 4, size) * 1.5
    elif shape == "banned":
        row[random.random(size) < 0.7] = -np.inf
        row[size // 2] = 0.0
    return row.astype(np.float32)


def in_the_cloud(params: ResolvedParams, logits: np.ndarray, prompt: list[int], answer: list[int]) -> int:
    assert params.seed is not None
    edits = plain_edits(params, prompt, answer, params.end_ids(ENDS))
    row = SamplingRow(params.seed, len(prompt) + len(answer), params, edits)
    return sample(torch.from_numpy(logits)[None], [row])[0]


@given(
    st.fixed_dictionaries(OPTIONS),
    st.sampled_from(SHAPES),
    st.sampled_from([12, 70, 1024, 3000, 20_000]),
    st.integers(0, 2**32 - 1),
)
def test_the_same_tokens_as_the_cloud(options: dict[str, Any], shape: str, size: int, seed: int) -> None:
    params = ResolvedParams(**options)
    prompt = [1, 4, 4, 9]
    sampler = RowSampler(params, prompt, params.end_ids(ENDS))
    answer: list[int] = []
    for step in range(5):
        logits = row_of_logits(shape, size, seed + step)
        before = logits.copy()
        token = sampler.choose(logits, answer)
        assert token == in_the_cloud(params, logits, prompt, answer)
        np.testing.assert_array_equal(logits, before)
        answer.append(token)


@pytest.mark.parametrize("options", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02}, {"temperature": 0.2}], ids=str)
def test_the_same_tokens_over_a_large_vocabulary(options: dict[str, Any]) -> None:
    size = 151_936
    for seed, shape in enumerate(SHAPES * 3):
        params = ResolvedParams(**{"temperature": 1.0, "seed": seed, **options})
        logits = row_of_logits(shape, size, seed)
        assert RowSampler(params, [8], ENDS).choose(logits, [6]) == in_the_cloud(params, logits, [8], [6])


@given(
    st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=900),
    st.floats(1e-5, 2),
    st.integers(0, 2**64 - 1),
    st.booleans(),
)
def test_the_race_is_won_by_who_has_the_best_score(
    logits: list[float], temperature: float, key: int, thinned: bool
) -> None:
    """`draw` against its definition, also where it would not bother to look ahead."""
    row = np.array(logits, np.float32)
    ids = np.arange(len(row)) * 7 if thinned else None
    named = np.arange(len(row)) if ids is None else ids
    scores = row.astype(np.float64) / temperature - np.log(-np.log(gumbel_noise.uniforms(key, named)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gumbel_noise, "_FEW", 0)
        patch.setattr(gumbel_noise, "_BLOCK", 64)
        assert gumbel_noise.draw(key, ids, row, temperature) == scores.argmax()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=700), st.integers(1, 800))
def test_the_largest_in_order(values: list[int], count: int) -> None:
    row = np.array(values, np.float32)
    assert largest(row, count).tolist() == np.argsort(-row, kind="stable")[:count].tolist()


def test_the_token_that_fills_top_p_is_the_last_one_in() -> None:
    sampled = {
        RowSampler(ResolvedParams(top_p=0.5, seed=seed), [], ()).choose(np.zeros(8, np.float32), [])
        for seed in range(300)
    }
    assert sampled == {0, 1, 2, 3}


def test_frequencies_are_those_of_the_softmax() -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.log(probabilities).astype(np.float32)
    sampler = RowSampler(ResolvedParams(temperature=1, seed=0), [], ())
    draws = [sampler.choose(logits, range(position)) for position in range(20_000)]  # a sequence of such a length
    np.testing.assert_allclose(np.bincount(draws, minlength=4) / len(draws), probabilities, atol=0.015)


def test_the_models_own_values_and_a_seed_by_chance() -> None:
    logits = np.array([0.0, 0.1, 0.0], np.float32)

    def sampled(own: SamplingDefaults, **options: Any) -> set[int]:
        params = SamplingParams(**options).resolved(own)
        return {RowSampler(params, [], ()).choose(logits, []) for _ in range(50)}

    assert sampled(replace(PLAIN_SAMPLING, temperature=0.0)) == {1}
    assert len(sampled(PLAIN_SAMPLING)) == 3
    assert len(sampled(PLAIN_SAMPLING, seed=4)) == 1
    assert sampled(PLAIN_SAMPLING, temperature=0.0) == {1}
    assert sampled(replace(PLAIN_SAMPLING, top_k=1)) == {1}
    assert len(sampled(replace(PLAIN_SAMPLING, top_k=1), top_k=0)) == 3


def test_a_penalty_needs_no_second_look_at_the_prompt() -> None:
    """Edits grow with the answer: in pieces or at once, they are the same."""
    params = ResolvedParams(temperature=0.0, repetition_penalty=1.7, frequency_penalty=0.4, seed=0)
    logits, prompt, answer = row_of_logits("normal", 50, 1), [3, 3, 8], [1, 2, 1, 3, 40]
    grown = RowSampler(params, prompt, ENDS)
    for length in range(len(answer) + 1):
        fresh = RowSampler(replace(params), prompt, ENDS)
        assert grown.choose(logits, answer[:length]) == fresh.choose(logits, answer[:length])
