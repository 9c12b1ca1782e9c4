"""Penalties, biases and bans on the logits of one answer, updated incrementally for each token.

`protocol.sampling.SamplingParams` defines their meaning. With a repetition penalty on a prompt of thousands of tokens,
recomputing all edits for each token would take most of the time between two steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..protocol.sampling import ResolvedParams

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class LogitEdits:
    """Changes to logits, as arrays of shape (edits,)."""

    # Unique token ids.
    token_ids: npt.NDArray[np.int32]
    # Positive logits are divided by these numbers, other logits are multiplied by them.
    divisors: Floats
    # Offsets added after the division.
    offsets: Floats

    def applied(self, logits: Floats) -> Floats:
        """Return an edited copy of `logits` (vocab,)."""
        edited, chosen = logits.copy(), logits[self.token_ids]
        edited[self.token_ids] = np.where(chosen > 0, chosen / self.divisors, chosen * self.divisors) + self.offsets
        return edited


class LogitEditor:
    """Source of the logit edits for the next token of one answer, updated as the answer and its draft tokens grow."""

    def __init__(self, params: ResolvedParams, prompt_ids: Iterable[int], end_ids: Iterable[int]) -> None:
        """Start with an empty answer. `end_ids`: the tokens that end the answer, from `SamplingParams.end_ids`."""
        repetition = params.repetition_penalty
        self.num_tokens = 0  # number of the answer's tokens that the edits include
        self._params = params
        self._penalises = repetition != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        self._bias = dict(params.logit_bias)
        self._prompt = frozenset(prompt_ids) if repetition != 1 else frozenset[int]()
        held_open = frozenset(end_ids) if params.min_tokens else frozenset[int]()
        token_ids = sorted({*self._prompt, *self._bias, *held_open})
        self._places = {token: place for place, token in enumerate(token_ids)}
        self._counts = [0] * len(token_ids)
        # Arrays with spare capacity; `_places` maps tokens to the used entries.
        self._ids = np.array(token_ids, np.int32)
        self._divisors = np.array([repetition if token in self._prompt else 1.0 for token in token_ids], np.float32)
        self._offsets = np.array([self._bias.get(token, 0.0) for token in token_ids], np.float32)
        self._ends = np.array([self._places[token] for token in held_open], np.intp)
        self._ahead: list[int] = []  # draft tokens that the edits include

    def extend(self, tokens: Sequence[int]) -> None:
        """Add `tokens` to the answer."""
        self._follow(())
        for token in tokens if self._penalises else ():
            self._count(token, 1)
        self.num_tokens += len(tokens)

    def edits(self, drafts: Sequence[int] = ()) -> LogitEdits | None:
        """Return the edits for the next token, after the answer so far and `drafts`; None if no logits change."""
        self._follow(drafts)
        number, held_open = len(self._places), self.num_tokens + len(drafts) < self._params.min_tokens
        if not number or not (held_open or self._penalises or self._bias):
            return None
        offsets = self._offsets[:number].copy()
        if held_open:
            offsets[self._ends] = -np.inf
        return LogitEdits(self._ids[:number], self._divisors[:number].copy(), offsets)

    def _follow(self, drafts: Sequence[int]) -> None:
        """Count `drafts` instead of the previous draft tokens. Fast in the usual case of one more draft token."""
        if not self._penalises:
            return
        known = len(self._ahead)
        if list(drafts[:known]) != self._ahead:
            for token in self._ahead:
                self._count(token, -1)
            self._ahead, known = [], 0
        for token in drafts[known:]:
            self._count(token, 1)
            self._ahead.append(token)

    def _count(self, token: int, by: int) -> None:
        """Change the count of a token. A rejected draft token keeps its entry, which then changes no logit."""
        params, place = self._params, self._place_of(token)
        self._counts[place] += by
        count = self._counts[place]
        self._divisors[place] = params.repetition_penalty if count or token in self._prompt else 1.0
        penalty = params.frequency_penalty * count
        self._offsets[place] = self._bias.get(token, 0.0) - penalty - params.presence_penalty * (count > 0)

    def _place_of(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._counts):
            self._counts.append(0)
            if place == len(self._ids):
                capacity = 2 * place + 64
                self._ids = np.resize(self._ids, capacity)
                self._divisors, self._offsets = np.resize(self._divisors, capacity), np.resize(self._offsets, capacity)
            self._ids[place] = token
        return place
