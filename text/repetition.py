"""Answers that repeat themselves without end: one definition for both engines, looked for at fixed lengths.

An answer repeats itself if its last tokens are one period over and over: at least `MIN_REPEATS` times, and at least
`SPAN` tokens in all. A list of a hundred zeros, a table and indented code are shorter, or differ from row to row. The
fixed lengths make the end of an answer independent of how many tokens a step brings.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Tokens of a period at most.
MAX_PERIOD = 128
#: Tokens that a period must have filled.
SPAN = 256
#: Times that a period must have come.
MIN_REPEATS = 4
#: An answer is looked at whenever it has grown by so many tokens.
INTERVAL = 64
#: Its last tokens that are looked at.
WINDOW = MAX_PERIOD * MIN_REPEATS


def next_check(num_generated: int) -> int:
    """The length at which an answer of so many tokens is looked at next."""
    return max(SPAN, (num_generated // INTERVAL + 1) * INTERVAL)


def repeats(token_ids: Sequence[int], num_generated: int) -> bool:
    """Whether an answer is to end here; its `num_generated` tokens are the last of `token_ids`."""
    if num_generated < SPAN or num_generated % INTERVAL:
        return False
    tail = token_ids[-min(num_generated, WINDOW) :]
    last, size = tail[-1], len(tail)
    for period in range(1, min(MAX_PERIOD, size // MIN_REPEATS) + 1):
        if tail[-1 - period] == last:
            span = max(SPAN, period * MIN_REPEATS)
            if tail[size - span : size - period] == tail[size - span + period :]:
                return True
    return False
