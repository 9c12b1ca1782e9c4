"""Detection of endlessly repeating answers, the same for both engines and checked at fixed lengths.

An answer repeats itself if it ends with one period repeated at least `MIN_REPEATS` times, over at least `SPAN` tokens.
A list of a hundred zeros does not count, because it is shorter; rows of a table or of code do not count, because they
differ. Checks at fixed lengths make the result independent of the number of tokens per step.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Maximum length of a period, in tokens.
MAX_PERIOD = 128
#: Minimum length of the repetition, in tokens.
SPAN = 256
#: Minimum number of repeats of the period.
MIN_REPEATS = 4
#: Number of tokens between two checks of an answer.
INTERVAL = 64
#: Number of last tokens that a check examines.
WINDOW = MAX_PERIOD * MIN_REPEATS


def next_check(num_generated: int) -> int:
    """Return the answer length, in tokens, at which the next check is due."""
    return max(SPAN, (num_generated // INTERVAL + 1) * INTERVAL)


def repeats(token_ids: Sequence[int], num_generated: int) -> bool:
    """Return whether to end the answer here. The answer is the last `num_generated` tokens of `token_ids`."""
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
