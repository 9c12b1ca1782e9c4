"""The copy of block tables on a device equals those of the host after any changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from updraft.kernels.attention.block_tables import BlockTables

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHANGE = st.tuples(st.integers(0, 3), st.integers(0, 5), st.lists(st.integers(-1, 10**6), max_size=3))


@given(st.lists(st.tuples(st.lists(CHANGE, max_size=4), st.booleans()), max_size=8))
def test_the_copy_follows_the_host(steps: list[tuple[list[tuple[int, int, list[int]]], bool]]) -> None:
    """At one address, from the first read on, and if one step changes an entry twice."""
    tables, expected, addresses = BlockTables(4, 8), np.zeros((4, 8), np.int32), set[int]()
    for changes, is_read in steps:
        tables.replace(changes)
        for slot, start, blocks in changes:
            expected[slot, start : start + len(blocks)] = blocks
        assert tables.host.tolist() == expected.tolist()
        if is_read:
            copy = tables.on(DEVICE)
            assert copy.tolist() == expected.reshape(-1).tolist()
            addresses.add(copy.data_ptr())
    assert len(addresses) <= 1


def test_the_copy_is_apart_from_the_host() -> None:
    tables = BlockTables.of(np.array([4, 5], np.int32))
    copy = tables.on(DEVICE)
    tables.host[0, 0] = 9
    assert copy.tolist() == [4, 5] and tables.flat.tolist() == [9, 5]


def test_more_blocks_than_a_slot_has_are_an_error() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        BlockTables(2, 4).replace([(0, 3, [1, 2])])
