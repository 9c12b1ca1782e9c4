"""The prompt tokens to reserve for a request, learned from what earlier ones of the same key and model really had.

A count by the model's own tokenizer needs its file and its chat template here, and time on the event loop. Nodes tell
the true count with every answer anyway.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

_KEPT = 16  # requests
_LEAST = 8
_MAX_CLASSES = 4096

_Class = tuple[str, str, int]


class PromptTokens:
    """Of one worker. Sizes are learned in powers of two: templates weigh more in short prompts.

    A key learns for itself alone: nobody else's requests lower its reservations.
    """

    def __init__(self) -> None:
        self._ratios: OrderedDict[_Class, deque[float]] = OrderedDict()

    def estimate(self, key: str, model: str, reckoned: int) -> int:
        """`reckoned` from the bytes, times the largest ratio of the last requests; unchanged while there are few."""
        ratios = self._ratios.get((key, model, reckoned.bit_length()), ())
        return reckoned if len(ratios) < _LEAST else math.ceil(reckoned * max(ratios))

    def learn(self, key: str, model: str, reckoned: int, counted: int) -> None:
        """A request is over: `counted` is what its node says, 0 where it said nothing."""
        if not (reckoned and counted):
            return
        name = key, model, reckoned.bit_length()
        self._ratios.setdefault(name, deque(maxlen=_KEPT)).append(counted / reckoned)
        self._ratios.move_to_end(name)
        if len(self._ratios) > _MAX_CLASSES:
            self._ratios.popitem(last=False)
