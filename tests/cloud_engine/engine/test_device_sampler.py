"""The sampler for devices draws the tokens that the plain one draws."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from updraft.cloud_engine.engine.device_sampler import can_sample, sample_on_device
from updraft.cloud_engine.engine.sampler import SamplingRow, sample
from updraft.protocol.sampling import SamplingParams
from updraft.text.logit_edits import LogitEdits

VOCABULARY = 70
PARAMS = st.builds(
    SamplingParams,
    top_k=st.sampled_from([0, 0, 1, 3, 70]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05]),
)
EDITS = st.none() | st.just(LogitEdits([0, 3, 69], [1.3, 1.0, 2.0], [-1.0, float("-inf"), 5.0]))
MASK = st.none() | st.sets(st.integers(0, VOCABULARY - 1), min_size=1).map(
    lambda allowed: np.packbits(np.isin(np.arange(96), list(allowed)), bitorder="little").view(np.int32)
)
ROW = st.builds(
    SamplingRow,
    st.sampled_from([0.0, 0.7, 1.0, 2.0]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**31),
    PARAMS,
    EDITS,
    MASK,
)


@settings(max_examples=200)
@given(st.lists(ROW, min_size=1, max_size=6), st.integers(0, 1000))
def test_the_same_tokens(rows: list[SamplingRow], seed: int) -> None:
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    assert sample_on_device(logits, rows) == sample(logits, rows)
    assert torch.equal(logits, before)


def test_typical_rows_are_left_to_the_plain_one() -> None:
    row = SamplingRow(1.0, 0, 0, SamplingParams(typical_p=0.5))
    assert not can_sample([row]) and can_sample([SamplingRow(1.0, 0, 0, SamplingParams())])
