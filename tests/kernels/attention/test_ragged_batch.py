"""Parts of a ragged batch have the rows of the whole."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from updraft.kernels.attention.ragged_batch import RaggedBatch
from updraft.kernels.attention.types import QuerySpan

SEQUENCES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=6)


@given(SEQUENCES, st.lists(st.integers(0, 200), max_size=5))
def test_parts_have_the_rows_of_the_whole(sequences: list[tuple[int, int]], cuts: list[int]) -> None:
    spans = [QuerySpan(start, rows, list(range(at * 9, at * 9 + 9))) for at, (start, rows) in enumerate(sequences)]
    num_rows = sum(rows for _, rows in sequences)
    whole = RaggedBatch.of(spans, num_rows, 8)
    edges = sorted({0, num_rows, *(cut for cut in cuts if cut < num_rows)})
    parts = [whole.between(first, last) for first, last in pairwise(edges)]
    assert [part.num_real_rows for part in parts] == [last - first for first, last in pairwise(edges)]
    for of in (RaggedBatch.positions, RaggedBatch.slots):
        assert np.array_equal(np.concatenate([of(part) for part in parts]), of(whole))
    for part in parts:
        assert (part.rows[:-1] > 0).all()
