"""A request's place in its predicted output: the text another model wrote, verified here as a draft."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence

ALIGN_ON = 3  # generated tokens that must reappear in the prediction before it is trusted again
# These go ahead of a prediction, and tell whether it holds: twice as many cost a useless one twice as much.
FIRST_TOKENS = 4
PROBE_TOKENS = 8  # proposed where more would be bold; after a miss it doubles with every window that holds


class PredictionCursor:
    """Proposes the next stretch of a prediction and follows what the model really said.

    Until the first miss everything that is left is proposed at once, or a few tokens first as a probe. After a miss
    behind tokens that held it goes on behind the refuted one, as if only that had been another: half of what a larger
    model changes are single tokens. After a second miss at once nothing is proposed, until the last few generated
    tokens reappear further on in the prediction. Wherever it goes on, it does so cautiously.
    """

    def __init__(self, draft_ids: Sequence[int]) -> None:
        self._draft = list(draft_ids)
        self._next: int | None = 0 if self._draft else None  # None: lost
        self._searched_to = 0  # draft tokens before this are spent: confirmed, refuted or passed over
        self._window = len(self._draft)
        self._has_held = False  # any token since it went on from where it is
        self._judged = False
        self._held: bool | None = None
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)  # run of tokens -> where it ends
        for end in range(ALIGN_ON, len(self._draft)):
            self._ends[tuple(self._draft[end - ALIGN_ON : end])].append(end)
        self.num_accepted = 0

    def again(self) -> PredictionCursor:
        """The same prediction, from its start."""
        return PredictionCursor(self._draft)

    def propose(self, limit: int, takes_whole: Callable[[int], bool] = lambda _: True) -> list[int]:
        """The next predicted tokens, at most `limit`; empty where the prediction is used up or lost.

        Nothing behind its first few tokens until these have held, unless `takes_whole` of so many says otherwise.
        """
        if self._next is None:
            return []
        proposed = self._draft[self._next : self._next + min(limit, self._window)]
        num_first = FIRST_TOKENS - self._next
        if not 0 < num_first < len(proposed) or takes_whole(len(proposed) - num_first):
            return proposed
        return proposed[:num_first]

    def take_verdict(self) -> bool | None:
        """Whether the first few tokens held, as soon as that is known, and once; None before and after."""
        held, self._held = self._held, None
        return held

    def advance(self, generated: Sequence[int], num_new: int, num_proposed: int) -> None:
        """Follow the last `num_new` of the `generated` tokens, which came after `num_proposed` were proposed.

        Any run of new tokens that repeats the prediction counts as accepted, proposed or not: the last token of a
        step is the model's own, and may well be the predicted one.
        """
        if not self._draft:
            return
        if self._next is not None:
            new = generated[len(generated) - num_new :]
            rest = self._draft[self._next : self._next + num_new]
            agreed = next((i for i, (a, b) in enumerate(zip(new, rest, strict=False)) if a != b), len(rest))
            self.num_accepted += agreed
            self._searched_to = self._next + agreed
            if not self._judged and (agreed < num_new or self._searched_to >= FIRST_TOKENS):
                self._judged, self._held = True, self._searched_to >= min(FIRST_TOKENS, len(self._draft))
            self._has_held = self._has_held or agreed > 0
            if agreed == num_new:
                self._next = self._searched_to
                self._window *= 2 if num_proposed >= self._window else 1
            else:
                self._searched_to += 1  # the refuted token
                self._next = None
        if self._next is None:
            self._next = self._realigned(tuple(generated[-ALIGN_ON:]))

    def _realigned(self, tail: tuple[int, ...]) -> int | None:
        """The place to go on from after a miss, if there is one."""
        ends = self._ends.get(tail, [])
        index = bisect_right(ends, self._searched_to)
        if index < len(ends):
            self._searched_to = ends[index]
        elif not self._has_held:
            return None
        self._window, self._has_held = PROBE_TOKENS, False
        return self._searched_to
