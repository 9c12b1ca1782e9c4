"""Penalties and biases against their definitions, written the slow way, and the same in both engines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.local_engine.row_sampler import RowSampler
from updraft.protocol.errors import InvalidRequestError
from updraft.protocol.sampling import SamplingParams, logit_edits

VOCABULARY = 12
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=20)


def expected(logits: np.ndarray, params: SamplingParams, prompt: list[int], answer: list[int], ends: set[int]):
    out = logits.astype(np.float64).copy()
    for token in range(VOCABULARY):
        if token in prompt or token in answer:
            out[token] = (
                out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
            )
        out[token] -= params.frequency_penalty * answer.count(token)
        out[token] -= params.presence_penalty * (token in answer)
        out[token] += dict(params.logit_bias).get(token, 0.0)
        if token in ends and len(answer) < params.min_tokens:
            out[token] = -np.inf
    return out


@given(
    st.lists(st.floats(-5, 5, width=32), min_size=VOCABULARY, max_size=VOCABULARY),
    tokens,
    tokens,
    st.fixed_dictionaries(
        {
            "repetition_penalty": st.sampled_from([1.0, 0.8, 1.3]),
            "frequency_penalty": st.sampled_from([0.0, -0.5, 1.5]),
            "presence_penalty": st.sampled_from([0.0, 0.7]),
            "logit_bias": st.sampled_from([(), ((3, 2.5), (5, -100.0))]),
            "min_tokens": st.sampled_from([0, 5]),
        }
    ),
)
def test_both_engines_edit_logits_as_defined(logits, prompt, answer, options) -> None:
    torch = pytest.importorskip("torch", reason="needs the [cloud] extra")
    from updraft.cloud_engine.engine.sampler import SamplingRow, sample

    params = SamplingParams(temperature=0.0, **options)
    row = np.array(logits, dtype=np.float32)
    wanted = expected(row, params, prompt, answer, {0, 1})
    edits = logit_edits(params, prompt, answer, {0, 1})
    local = RowSampler(params, VOCABULARY, prompt, {0, 1}, 0.0).choose(row, answer)
    cloud = sample(torch.from_numpy(row)[None], [SamplingRow(0.0, 0, 0, params, edits)])[0]
    assert wanted[local] == pytest.approx(wanted.max(), abs=1e-5)
    assert wanted[cloud] == pytest.approx(wanted.max(), abs=1e-5)
    assert row.tolist() == logits  # untouched: log-probabilities are of the raw ones


def test_nothing_to_edit_costs_nothing() -> None:
    assert logit_edits(SamplingParams(), [1], [2], {0}) is None
    assert logit_edits(SamplingParams(min_tokens=2), [1], [2, 3], {0}) is None


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"typical_p": 0.0}, "typical_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_options_out_of_range_are_refused(options, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**options)
    assert caught.value.param == param


@pytest.mark.parametrize("options", [{"logit_bias": ((97, 1.0),)}, {"stop_token_ids": (-1,)}])
def test_tokens_outside_the_vocabulary_are_refused(options) -> None:
    with pytest.raises(InvalidRequestError, match="from 0 to 96"):
        SamplingParams(**options).check_vocabulary(97)
