"""A circuit breaker of one node: failures open it, good probes half-open it, one good answer closes it."""

from __future__ import annotations

from typing import Literal

_GOOD_PROBES = 2  # in a row, until a node that failed is tried again
_MAX_GOOD_PROBES = 64
_ERRORS_TO_OPEN = 5  # in a row, each of a request that another node answered

State = Literal["closed", "half-open", "open"]


class NodeBreaker:
    """`trips`: how often it opened; requests that failed by the same trip failed by the same fault."""

    def __init__(self) -> None:
        self.state: State = "open"
        self.reason = "it has not answered yet"
        self.trips = 0
        self._in_a_row = 0  # trips without a good answer between them
        self._probes_missing = 1  # a first success is enough at the start
        self._errors = 0

    @property
    def needs_trial(self) -> bool:
        """Whether it takes a single request, to show whether it is well again."""
        return self.state == "half-open"

    def trip(self, reason: str) -> bool:
        """A failure that opens it at once. False: it was open already. Trips in a row need more probes each time."""
        was_open = self.state == "open"
        if not was_open:
            self.trips += 1
            self._in_a_row += 1
        self.state, self.reason, self._errors = "open", reason, 0
        self._probes_missing = min(_MAX_GOOD_PROBES, _GOOD_PROBES * 2 ** max(0, self._in_a_row - 1))
        return not was_open

    def probed(self) -> bool:
        """A good probe. True: with it, the node is in again."""
        if self.state != "open":
            return False
        self._probes_missing -= 1
        if self._probes_missing > 0:
            return False
        self.state, self.reason = ("half-open" if self.trips else "closed"), ""
        return True

    def answered(self) -> None:
        """A request went well."""
        self._errors = self._in_a_row = 0
        if self.state == "half-open":
            self.state = "closed"

    def erred(self) -> bool:
        """An error of this node, where another node answered the same request. True: one too many."""
        self._errors += 1
        return self.needs_trial or self._errors >= _ERRORS_TO_OPEN
