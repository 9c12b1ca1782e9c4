"""The cursor over a request's predicted output: text of another model, verified here as a draft."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

ALIGN_ON = 3  # number of generated tokens that must match the prediction to realign after a miss
PROBE_TOKENS = 8  # tokens proposed after a miss; the number doubles after every fully accepted window


class PredictionCursor:
    """Proposes the next tokens of a prediction and tracks the model's real output.

    Until the first miss, all remaining tokens are proposed at once. After a miss that follows accepted tokens, the
    cursor skips only the rejected token, because half of a large model's deviations are single tokens. After a second
    miss in a row, nothing is proposed until the last few generated tokens reappear later in the prediction. After any
    miss, proposals restart at `PROBE_TOKENS`.
    """

    def __init__(self, draft_ids: Sequence[int]) -> None:
        self._draft = list(draft_ids)
        self._next: int | None = 0 if self._draft else None  # position of the next proposal; None if not aligned
        self._searched_to = 0  # position before which tokens were accepted, rejected or skipped
        self._window = len(self._draft)
        self._has_held = False  # whether a token was accepted since the last realignment
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)  # n-gram -> positions after its occurrences
        for end in range(ALIGN_ON, len(self._draft)):
            self._ends[tuple(self._draft[end - ALIGN_ON : end])].append(end)
        self.num_accepted = 0

    def propose(self, limit: int, num_pending: int = 0) -> list[int]:
        """Return the predicted tokens after the next `num_pending`, which an unread step is assumed to confirm.

        At most `limit` tokens are returned; none if the prediction is used up or not aligned.
        """
        if self._next is None:
            return []
        start = self._next + num_pending
        return self._draft[start : start + min(limit, self._window)]

    def advance(self, generated: Sequence[int], num_new: int, num_proposed: int) -> None:
        """Advance over the last `num_new` of the `generated` tokens, in a step that proposed `num_proposed` tokens.

        New tokens that match the prediction count as accepted even if they were not proposed: the last token of a
        step is the model's own, and may match too.
        """
        if not self._draft:
            return
        if self._next is not None:
            new = generated[len(generated) - num_new :]
            rest = self._draft[self._next : self._next + num_new]
            agreed = next((i for i, (a, b) in enumerate(zip(new, rest, strict=False)) if a != b), len(rest))
            self.num_accepted += agreed
            self._searched_to = self._next + agreed
            self._has_held = self._has_held or agreed > 0
            if agreed == num_new:
                self._next = self._searched_to
                self._window *= 2 if num_proposed >= self._window else 1
            else:
                self._searched_to += 1  # skip the rejected token
                self._next = None
        if self._next is None:
            self._next = self._realigned(tuple(generated[-ALIGN_ON:]))

    def _realigned(self, tail: tuple[int, ...]) -> int | None:
        """Return the position to resume from after a miss, or None."""
        ends = self._ends.get(tail, [])
        index = bisect_right(ends, self._searched_to)
        if index < len(ends):
            self._searched_to = ends[index]
        elif not self._has_held:
            return None
        self._window, self._has_held = PROBE_TOKENS, False
        return self._searched_to
