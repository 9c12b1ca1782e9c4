"""The counters of relayed requests for `/metrics`, over all workers. Each has a row of its own in shared memory."""

from __future__ import annotations

import mmap

from ..ledger.metering import UsageRow

_STATUSES = 600
_SUMS = 3
_ROW = _STATUSES + _SUMS


class SharedRows:
    """Zeros, shared with the processes that are forked from this one."""

    def __init__(self, workers: int = 1) -> None:
        self._memory = memoryview(mmap.mmap(-1, workers * _ROW * 8)).cast("Q")

    def of(self, worker: int) -> memoryview:
        return self._memory[worker * _ROW : (worker + 1) * _ROW]

    def sum(self, column: int) -> int:
        return sum(self._memory[column::_ROW])


class Counters:
    """Sums since the gateway began. A worker writes into its own row only, so that nothing needs a lock."""

    def __init__(self, rows: SharedRows | None = None, worker: int = 0) -> None:
        self._rows = rows or SharedRows()
        self._own = self._rows.of(worker)

    def count(self, row: UsageRow) -> None:
        self._own[min(row.status, _STATUSES - 1)] += 1
        for column, more in enumerate((row.retries, row.prompt_tokens, row.completion_tokens), _STATUSES):
            self._own[column] += more

    @property
    def by_status(self) -> dict[int, int]:
        sums = {status: self._rows.sum(status) for status in range(_STATUSES)}
        return {status: count for status, count in sums.items() if count}

    @property
    def retries(self) -> int:
        return self._rows.sum(_STATUSES)

    @property
    def prompt_tokens(self) -> int:
        return self._rows.sum(_STATUSES + 1)

    @property
    def completion_tokens(self) -> int:
        return self._rows.sum(_STATUSES + 2)
