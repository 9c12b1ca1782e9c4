"""What `/metrics` counts of the relayed requests."""

from __future__ import annotations

from ..ledger.metering import UsageRow


class Counters:
    """Sums since the process began."""

    def __init__(self) -> None:
        self.by_status: dict[int, int] = {}
        self.retries = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0

    def count(self, row: UsageRow) -> None:
        self.by_status[row.status] = self.by_status.get(row.status, 0) + 1
        self.retries += row.retries
        self.prompt_tokens += row.prompt_tokens
        self.completion_tokens += row.completion_tokens
