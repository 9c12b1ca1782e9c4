"""Amounts in messages have no exponent."""

from __future__ import annotations

import pytest
from updraft.accounting.budget import plain_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1e-8, "0.00000001"),
        (0.1 + 0.2, "0.3"),
        (899.9999999, "900"),
        (1e6, "1000000"),
        (1.5e9, "1500000000"),
    ],
)
def test_numbers_have_no_exponent(value: float, text: str) -> None:
    assert plain_number(value) == text
