"""Which captured graph a step takes; the graphs themselves need a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.cloud_engine.engine.cuda_graphs import GraphLimits, Rung, ladder, rung_for

LIMITS = st.builds(GraphLimits, st.integers(1, 300), st.integers(1, 9), st.just(4))


def test_a_ladder() -> None:
    assert ladder(GraphLimits(6, 1, 4)) == [Rung(1, 1), Rung(2, 2), Rung(4, 4), Rung(6, 6)]
    verified = [rung for rung in ladder(GraphLimits(4, 5, 4)) if rung.rows > rung.sequences]
    assert verified == [Rung(3, 1), Rung(5, 1), Rung(6, 2), Rung(10, 2), Rung(12, 4), Rung(20, 4)]


@given(LIMITS, st.data())
def test_every_step_within_the_limits_has_a_graph(limits: GraphLimits, data: st.DataObject) -> None:
    sequences = data.draw(st.integers(1, limits.sequences))
    rows = data.draw(st.integers(sequences, sequences * limits.queries))
    rungs = ladder(limits)
    rung = rung_for(rungs, rows, sequences)
    assert rung is not None and rung.rows >= rows and rung.sequences >= sequences
    assert all(other.rows >= rung.rows for other in rungs if other.rows >= rows and other.sequences >= sequences)


@given(LIMITS)
def test_few_graphs_and_none_too_many_rows(limits: GraphLimits) -> None:
    rungs = ladder(limits)
    assert len(rungs) <= 60
    assert rungs[-1].rows == limits.sequences * limits.queries


@pytest.mark.parametrize(("rows", "sequences"), [(21, 4), (5, 5)])
def test_what_does_not_fit_runs_without(rows: int, sequences: int) -> None:
    assert rung_for(ladder(GraphLimits(4, 5, 4)), rows, sequences) is None
