"""Prompt-token estimates, corrected by the actual counts of earlier requests with the same key and model.

Counting with the model's own tokenizer would need its files and chat template here, and time on the event loop.
Nodes report the true count with every answer anyway.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

_KEPT = 16  # ratios kept per class, which is a key, model and prompt size
_LEAST = 8
_MAX_CLASSES = 4096

_Class = tuple[str, str, int]


class PromptTokens:
    """Ratios of counted to estimated prompt tokens by key, model and size, since templates weigh more in short prompts.

    Ratios are per key, so that no key can lower another key's reservations.
    """

    def __init__(self) -> None:
        self._ratios: OrderedDict[_Class, deque[float]] = OrderedDict()

    def estimate(self, key: str, model: str, reckoned: int) -> int:
        """Return `reckoned`, an estimate from bytes, times the largest recent ratio if there are enough ratios."""
        ratios = self._ratios.get((key, model, reckoned.bit_length()), ())
        return reckoned if len(ratios) < _LEAST else math.ceil(reckoned * max(ratios))

    def learn(self, key: str, model: str, reckoned: int, counted: int) -> None:
        """Learn from a finished request. `counted`: prompt tokens reported by the node, or 0."""
        if not (reckoned and counted):
            return
        name = key, model, reckoned.bit_length()
        self._ratios.setdefault(name, deque(maxlen=_KEPT)).append(counted / reckoned)
        self._ratios.move_to_end(name)
        if len(self._ratios) > _MAX_CLASSES:
            self._ratios.popitem(last=False)
