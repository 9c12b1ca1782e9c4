"""The return of requests to the engine after a failed step or a dead core, so that only the culprit fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

#: Tokens after which a suspect is cleared. The engine's last reports before its death may be this far behind.
CLEARING_TOKENS = 8


class Recovery:
    """Decides which requests return to the engine next. All of them are computed again from their tokens so far.

    Suspects return first: half of them, then half of the others, and so on. Each group joins the earlier groups once
    these are cleared. If the engine fails during the trial of a group, only this group remains suspected. A suspect
    during whose trial the engine fails although no other request was in it is the culprit. All other requests, also
    new ones, are held until the trials end.
    """

    def __init__(self) -> None:
        self.trial: set[str] = set()  # suspects in the engine that are not cleared yet
        self._groups: deque[list[str]] = deque()  # suspects to return later
        self._held: dict[str, None] = {}

    @property
    def is_active(self) -> bool:
        return bool(self.trial or self._groups)

    def holds(self, request_id: str) -> bool:
        """Return whether the request waits for its return, and so is not in the engine."""
        return request_id in self._held or any(request_id in group for group in self._groups)

    def hold(self, request_id: str) -> None:
        self._held[request_id] = None

    def failed(self, lost: Sequence[str], suspects: Sequence[str]) -> str | None:
        """Plan the return of the `lost` requests. Return the culprit, or None if it is not known yet.

        `suspects` were in the engine's last step; a step without them would have succeeded.
        """
        tried = [request_id for request_id in suspects if request_id in self.trial]
        culprit = tried[0] if tried and len(suspects) == 1 else None
        later = [request_id for group in self._groups for request_id in group]
        groups = [] if culprit is not None else _halves(tried or suspects)
        returning = {request_id for group in groups for request_id in group} | {culprit}
        self.trial = set()
        self._groups = deque([*groups, later] if later else groups)
        self._held |= dict.fromkeys(request_id for request_id in lost if request_id not in returning)
        return culprit

    def returning(self, is_unfinished: Callable[[str], bool]) -> list[str]:
        """Return the requests to send to the engine now: the next group if the trial is over, in the end the others."""
        while not self.trial and self._groups:
            group = list(filter(is_unfinished, self._groups.popleft()))
            self.trial = set(group)
            if group:
                return group
        if self.trial:
            return []
        held, self._held = self._held, {}
        return list(filter(is_unfinished, held))


def _halves(ids: Sequence[str]) -> list[list[str]]:
    """Split into groups, each half as large as the rest."""
    groups: list[list[str]] = []
    while ids:
        size = max(1, len(ids) // 2)
        groups.append(list(ids[:size]))
        ids = ids[size:]
    return groups
