"""Our attention under llama.cpp: right, and to the bit the same whatever is computed beside a row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.local_engine.llama.attention_check import AttentionCase, agrees
from updraft.local_engine.llama.library import llama

pytestmark = pytest.mark.skipif(not llama().kernels.attention, reason=llama().kernels.reason)
NEVER = np.float16(-np.inf)


@st.composite
def cases(draw, most_streams: int = 2) -> AttentionCase:
    """Rows that see whatever cells: of one sequence, of several, some nothing at all; scores of any spread."""
    count, key_heads, together = (
        draw(st.integers(1, most_streams)),
        draw(st.integers(1, 20)),
        draw(st.sampled_from([1, 2, 3, 5, 7, 8, 9, 96])),
    )
    rows, cells = draw(st.integers(1, 40 if key_heads * together < 50 else 4)), draw(st.integers(1, 300))
    length = draw(st.sampled_from([16, 32, 64, 80, 128]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.1, 1.0, 30.0]))
    query = random.normal(size=(count, key_heads * together, rows, length)).astype(np.float32) * np.float32(spread)
    key, value = random.normal(size=(2, count, key_heads, cells, length)).astype(np.float16)
    kind = draw(st.sampled_from(["none", "causal", "sequences", "anything"]))
    if kind == "none":
        return AttentionCase(query, key, value, None)
    if kind == "causal":
        visible = np.tri(rows, cells, cells - rows, dtype=bool)
    elif kind == "sequences":
        visible = random.integers(0, 3, (rows, 1)) == random.integers(0, 3, cells)
    else:
        visible = random.random((rows, cells)) < 0.5
    mask = np.where(visible, np.float16(0), NEVER)
    if draw(st.booleans()):  # what is not forbidden may still be pushed down
        mask = (mask - random.random(mask.shape).astype(np.float16)).astype(np.float16)
    return AttentionCase(query, key, value, mask[None])


@given(case=cases(), threads=st.integers(1, 5))
def test_every_case_is_right(ggml, case: AttentionCase, threads: int) -> None:
    output = case.computed(ggml, threads)
    assert output is not None
    # Scores of a few hundred have an error of some 1e-5 each in float32.
    scores = np.abs(case.query).max() * np.abs(case.key).max() * case.query.shape[3] ** 0.5
    assert np.abs(output - case.expected()).max() <= 1e-5 * max(1.0, float(scores) / 30)


@given(case=cases(most_streams=1), data=st.data())
def test_a_row_has_the_same_bits_alone_and_in_company(ggml, case: AttentionCase, data) -> None:
    """Whichever rows are beside it and whatever cells are in the cache that it does not see. Wherever its own lie, too,
    but for one number in a very great many: double sums in another order may round to the next of float32."""
    whole = case.computed(ggml, data.draw(st.integers(1, 4)))
    row = data.draw(st.integers(0, case.query.shape[2] - 1))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    cells = np.arange(case.key.shape[2]) if case.mask is None else np.flatnonzero(case.mask[0, row] != NEVER)
    moved = data.draw(st.booleans())
    if moved:
        random.shuffle(cells)
    if not len(cells):  # it sees nothing, but there has to be a cache
        cells = np.arange(1)
    alone = AttentionCase(
        case.query[:, :, row : row + 1].copy(),
        case.key[:, :, cells].copy(),
        case.value[:, :, cells].copy(),
        None if case.mask is None else case.mask[:, row : row + 1, cells].copy(),
    )
    output = alone.computed(ggml, data.draw(st.integers(1, 4)))
    assert whole is not None
    assert output is not None
    bits, expected = output[0, 0].view(np.int32), whole[0, row].view(np.int32)
    assert np.count_nonzero(bits != expected) <= moved
    assert np.abs(bits - expected).max() <= moved


def test_unsupported_shapes_are_declined(ggml) -> None:
    """Caches of float32, heads of odd or great length: ggml computes these."""
    case = AttentionCase(np.ones((1, 2, 3, 32), np.float32), *np.ones((2, 1, 2, 9, 32), np.float16), None)
    assert case.computed(ggml) is not None
    for other in (
        replace(case, key=case.key.astype(np.float32), value=case.value.astype(np.float32)),
        AttentionCase(np.ones((1, 2, 3, 24), np.float32), *np.ones((2, 1, 2, 9, 24), np.float16), None),
        AttentionCase(np.ones((1, 2, 3, 272), np.float32), *np.ones((2, 1, 2, 9, 272), np.float16), None),
    ):
        assert other.computed(ggml) is None


def test_infinite_values_of_cells_that_nobody_sees_do_not_matter(ggml) -> None:
    case = AttentionCase(
        np.ones((1, 1, 2, 32), np.float32), *np.ones((2, 1, 1, 100, 32), np.float16), np.zeros((1, 2, 100), np.float16)
    )
    assert case.mask is not None
    case.mask[:, :, 50:] = NEVER
    case.key[:, :, 50:], case.value[:, :, 50:] = np.inf, np.nan
    output = case.computed(ggml)
    assert output is not None
    assert np.allclose(output, 1)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("heads", "rows"), [(1, 2), (7, 2), (7, 16)])
def test_infinite_values_of_cells_that_others_see_do_not_matter(ggml, value: float, heads: int, rows: int) -> None:
    """Nor change a bit of rows before them."""
    random = np.random.default_rng(5)
    query = random.normal(size=(1, 2 * heads, rows, 64)).astype(np.float32)
    key, values = random.normal(size=(2, 1, 2, 90, 64)).astype(np.float16)
    mask = np.where(np.tri(rows, 90, 90 - rows, dtype=bool), np.float16(0), NEVER)[None]
    expected = AttentionCase(query, key, values.copy(), mask).computed(ggml)
    values[:, :, -1] = value
    output = AttentionCase(query, key, values, mask).computed(ggml)
    assert output is not None
    assert expected is not None
    assert np.array_equal(output[:, :-1].view(np.int32), expected[:, :-1].view(np.int32))
    assert not np.isfinite(output[:, -1]).any()


def test_wrong_results_do_not_agree(ggml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert agrees(ggml)
    expected = AttentionCase.expected
    monkeypatch.setattr(AttentionCase, "expected", lambda case: expected(case) * np.float32(1.0001))
    assert not agrees(ggml)
