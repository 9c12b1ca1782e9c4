"""Penalties and biases against their definitions, written the slow way; kept up to date, also behind drafts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.local_engine.sampling.row_sampler import RowSampler
from updraft.protocol.sampling import ResolvedParams
from updraft.text.logit_edits import LogitEditor

VOCABULARY = 12
ENDS = {0, 1}
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=20)
OPTIONS = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 0.8, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, -0.5, 1.5]),
        "presence_penalty": st.sampled_from([0.0, 0.7]),
        "logit_bias": st.sampled_from([(), ((3, 2.5), (5, -100.0))]),
        "min_tokens": st.sampled_from([0, 5]),
    }
)


def expected(logits: np.ndarray, params: ResolvedParams, prompt: list[int], answer: list[int], ends: set[int]):
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


@given(st.lists(st.floats(-5, 5, width=32), min_size=VOCABULARY, max_size=VOCABULARY), tokens, tokens, OPTIONS)
def test_both_engines_edit_logits_as_defined(logits, prompt, answer, options) -> None:
    torch = pytest.importorskip("torch", reason="needs the [cloud] extra")
    from plain_sampling import SamplingRow, sample

    params = ResolvedParams(temperature=0.0, **options)
    row = np.array(logits, dtype=np.float32)
    wanted = expected(row, params, prompt, answer, ENDS)
    editor = LogitEditor(params, prompt, ENDS)
    editor.extend(answer)
    local = RowSampler(params, prompt, ENDS).choose(row, answer)
    cloud = sample(torch.from_numpy(row)[None], [SamplingRow(0, 0, params, editor.edits())])[0]
    assert wanted[local] == pytest.approx(wanted.max(), abs=1e-5)
    assert wanted[cloud] == pytest.approx(wanted.max(), abs=1e-5)
    assert row.tolist() == logits  # untouched: log-probabilities are of the raw ones


@given(OPTIONS, tokens, st.lists(st.tuples(tokens, st.lists(tokens, max_size=3)), max_size=6), st.integers(0, 999))
def test_kept_up_to_date_they_are_those_counted_anew(options, prompt, growth, seed) -> None:
    """Edits are equal to the last bit, whatever drafts followed the answer before: longer, other or no drafts."""
    pytest.importorskip("torch", reason="needs the [cloud] extra")
    from plain_sampling import plain_edits

    params = ResolvedParams(**options)
    editor, answer = LogitEditor(params, prompt, ENDS), []
    random = np.random.default_rng(seed)
    for new, guesses in growth:
        editor.extend(new)
        answer += new
        given = []
        for drafts in guesses:
            for length in (*range(len(drafts) + 1), len(drafts) // 2):
                logits = random.standard_normal(VOCABULARY).astype(np.float32)
                plain = plain_edits(params, prompt, answer + drafts[:length], ENDS)
                wanted = logits if plain is None else plain.applied(logits)
                given.append((editor.edits(drafts[:length]), logits, wanted))
        for edits, logits, wanted in given:  # what was given stays as it was
            np.testing.assert_array_equal(logits if edits is None else edits.applied(logits), wanted)
            assert edits is None or len(set(edits.token_ids.tolist())) == len(edits.token_ids)


def test_many_new_tokens() -> None:
    """More tokens than the initial capacity."""
    editor = LogitEditor(ResolvedParams(repetition_penalty=2.0), [5], ())
    editor.extend(range(1000))
    edits = editor.edits([2000])
    assert edits is not None
    assert sorted(edits.token_ids.tolist()) == [*range(1000), 2000]
    assert set(edits.divisors.tolist()) == {2.0}


def test_nothing_to_edit_costs_nothing() -> None:
    assert LogitEditor(ResolvedParams(presence_penalty=1.0), [1], {0}).edits() is None
    editor = LogitEditor(ResolvedParams(min_tokens=2), [1], {0})
    assert editor.edits() is not None
    editor.extend([2, 3])
    assert editor.edits() is None
