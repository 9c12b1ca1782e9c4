"""Options out of range are refused, each by its name."""

from __future__ import annotations

import pytest
from updraft.protocol.errors import InvalidRequestError
from updraft.protocol.sampling import SamplingParams


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
