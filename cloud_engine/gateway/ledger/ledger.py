"""The ledger of the gateway: an intent before a request is sent to a node, settled once, whatever became of it.

A thread commits what has come together since its last commit (group commit), so that one wait for the disk serves
many requests. A disk that fails or hangs never holds up the gateway for longer than the bounds below.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from ....protocol.errors import OverloadedError
from .metering import UsageRow, Values, is_settled, record_of, values_of
from .store import LedgerWriteError, RowRefusedError, UsageStore

FailurePolicy = Literal["stop", "continue"]
"""Whether requests are refused (503) or answered while the ledger cannot be written."""

MAX_WAITING = 20_000
"""Rows, of less than a kilobyte each, that wait in memory for a disk to come back."""

_OPEN_S = 2.0  # that a request waits for its intent
_CLOSE_S = 5.0
_MAX_BATCH = 1000
_SETTLED_S = 0.005  # that rows for which nobody waits may wait for an intent, to share its commit
_RETRY_S = 0.5
_HOUSEKEEPING_S = 60.0
_HOUSEKEEPING_AGAIN_S = 5.0  # after a failure
_PRUNED_AT_ONCE = 500
_DAY_S = 86_400
_log = logging.getLogger("updraft.gateway")


class _Entry(msgspec.Struct, frozen=True):
    """One row on its way to the disk."""

    # In the order of the columns.
    values: Values
    # Settled, or still an intent.
    settled: bool
    # Who waits for the commit.
    committed: asyncio.Future[bool] | None = None
    # Of its intent in the store's file, until the commit.
    place: int | None = None


class UsageLedger:
    """Safe in one event loop; several processes may have one each on one database. `close()` it in the end."""

    def __init__(
        self, store: UsageStore, *, on_failure: FailurePolicy = "stop", keep_days: float | None = None
    ) -> None:
        self.worker = store.worker
        #: Rows that are not in the ledger and never will be.
        self.lost = 0
        #: Commits that failed.
        self.failures = 0
        #: Whether the last commit failed.
        self.failing = False
        self._store = store
        self._on_failure: FailurePolicy = on_failure
        self._keep_days = keep_days
        self._calls: queue.SimpleQueue[threading.Event | Literal["write", "end"]] = queue.SimpleQueue()
        self._places: dict[str, int] = {}  # of intents, by row
        self._entered: deque[_Entry] = deque()
        self._unwritten: list[_Entry] = []
        self._late: asyncio.TimerHandle | None = None
        self._closes_at: float | None = None
        self._committing_since: float | None = None
        self._housekeeping_at = 0.0
        self._failure_is_logged = False
        self._thread = threading.Thread(target=self._run, name="updraft-ledger", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Rows that wait to be written, about."""
        return len(self._entered) + len(self._unwritten)

    async def open(self, row: UsageRow) -> None:
        """Keep the intent of a request that is about to be sent to a node, safe from the death of this process.

        Raises OverloadedError where the ledger cannot be written and the operator wants requests to stop then.
        """
        if self._on_failure == "stop" and (self.failing or self._hangs or self.waiting >= MAX_WAITING):
            raise _unwritable()
        row.worker, row.state = self.worker, "abandoned"  # if nothing follows
        if (self.failing or not self._store.commits_intents) and self._keep(row.id, values_of(row)):
            return
        row.state = "intent"
        if self.failing:
            self._enter(_Entry(values_of(row), settled=False))
            return
        loop = asyncio.get_running_loop()
        committed: asyncio.Future[bool] = loop.create_future()
        self._enter(_Entry(values_of(row), settled=False, committed=committed))
        late = loop.call_later(_OPEN_S, _note, committed, False)
        try:
            if not await committed and self._on_failure == "stop":
                raise _unwritable()
        finally:
            late.cancel()

    def settle(self, row: UsageRow) -> None:
        """Writes the request's usage. It needs no intent before it, and a second call changes nothing."""
        if row.state != "settled":
            self.book(row)
        self._enter(_Entry(values_of(row), settled=True, place=self._places.pop(row.id, None)))

    def book(self, row: UsageRow) -> None:
        """Makes the usage so far safe from the death of this process. `settle` is to follow."""
        row.worker, row.state = self.worker, "settled"
        self._keep(row.id, values_of(row))

    def flush(self, timeout_s: float = _OPEN_S) -> bool:
        """Wait until what was entered before is committed. False: it is not yet."""
        done = threading.Event()
        self._calls.put(done)
        return done.wait(timeout_s)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Write what is left, for which there are `timeout_s` seconds."""
        self._closes_at = time.monotonic() + timeout_s
        self._calls.put("end")
        self._thread.join(timeout_s + 0.1)
        if self._thread.is_alive():
            _log.error("The ledger hangs: up to %d rows of this process are not in it.", self.waiting)

    @property
    def _hangs(self) -> bool:
        """Whether the disk, or another process, has held a commit up for long."""
        since = self._committing_since
        return since is not None and time.monotonic() > since + _OPEN_S

    def _keep(self, row_id: str, values: Values) -> bool:
        """Whether the store has a place for the row as it is now, until its commit."""
        intents, before = self._store.intents, self._places.get(row_id)
        if self._closes_at is not None:
            return False
        with contextlib.suppress(UnicodeError):  # the database will say so
            record = record_of(values)
            place = intents.add(record) if before is None else intents.replace(before, record)
            if place is not None:
                self._places[row_id] = place
        return row_id in self._places

    def _enter(self, entry: _Entry) -> None:
        if self.waiting >= MAX_WAITING:
            self.lost += 1
            self._forget([entry])
            if entry.committed is not None:
                entry.committed.set_result(False)
            return
        self._entered.append(entry)
        if entry.committed is not None:
            self._calls.put("write")
        elif self._late is None:
            self._late = asyncio.get_running_loop().call_later(_SETTLED_S, self._write_late)

    def _write_late(self) -> None:
        self._late = None
        if self._entered:
            self._calls.put("write")

    def _run(self) -> None:
        self._keep_house()
        goes_on = True
        while goes_on or (self.waiting and self._has_time()):
            goes_on, flushed = self._take(goes_on)
            self._write()
            for done in flushed:
                if self.failing:
                    self._calls.put(done)
                else:
                    done.set()
            if self.failing:
                time.sleep(_RETRY_S)
            self._keep_house()
        if self.waiting:
            self.lost += self.waiting
            _log.error("%d rows are not in the ledger.", self.waiting)
        self._store.close()

    def _take(self, goes_on: bool) -> tuple[bool, list[threading.Event]]:
        """Move what has come to `_unwritten`. False: it was the last."""
        flushed: list[threading.Event] = []
        pause_s = _RETRY_S if self.failing else _HOUSEKEEPING_AGAIN_S
        with contextlib.suppress(queue.Empty):
            call = self._calls.get(timeout=0 if self._unwritten or not goes_on else pause_s)
            while True:
                goes_on = goes_on and call != "end"
                if isinstance(call, threading.Event):
                    flushed.append(call)
                call = self._calls.get_nowait()
        while self._entered and len(self._unwritten) < _MAX_BATCH:
            self._unwritten.append(self._entered.popleft())
        if self._entered:  # more than one batch
            for call in (*flushed, "write"):
                self._calls.put(call)
            flushed.clear()
        return goes_on, flushed

    def _has_time(self) -> bool:
        return self._closes_at is None or time.monotonic() < self._closes_at

    def _write(self) -> None:
        batch = self._unwritten
        if not batch:
            self.failing = False  # the next row finds out
            return
        self._committing_since = time.monotonic()
        try:
            self._commit(batch)
        except Exception as error:  # noqa: BLE001 - whatever it was, the thread goes on and says so
            if not self._failure_is_logged:
                message = "The ledger cannot be written: %s. Requests %s."
                is_unknown = not isinstance(error, LedgerWriteError)
                _log.error(message, error, _CONSEQUENCES[self._on_failure], exc_info=is_unknown)
            self.failing = self._failure_is_logged = True
            self.failures += 1
            kept = [each for each in batch if each.settled or self._on_failure == "continue"]
            self._unwritten = [_Entry(each.values, each.settled, place=each.place) for each in kept]
            _tell(batch, is_written=False)
        else:
            if self._failure_is_logged:
                _log.warning("The ledger is written again.")
            self.failing = self._failure_is_logged = False
            self._unwritten = []
            self._forget(batch)
            _tell(batch, is_written=True)
        finally:
            self._committing_since = None

    def _forget(self, batch: Sequence[_Entry]) -> None:
        """Their intents have come to an end."""
        for each in batch:
            if each.place is not None:
                self._store.intents.remove(each.place)

    def _commit(self, batch: Sequence[_Entry]) -> None:
        try:
            self._store.write(
                [each.values for each in batch if not each.settled], [each.values for each in batch if each.settled]
            )
        except RowRefusedError as error:
            if len(batch) > 1:
                for each in batch:
                    self._commit([each])
            else:
                self.lost += 1
                _log.error("A row cannot be entered in the ledger: %s.", error)

    def _keep_house(self) -> None:
        """Now and then: mark what dead workers left behind, and delete what is older than the operator wants."""
        if self.failing or time.monotonic() < self._housekeeping_at:
            return
        deleted, pause_s = 0, _HOUSEKEEPING_S
        try:
            count = 0
            for rows in self._store.left_behind():
                self._commit([_Entry(values, settled=is_settled(values)) for values in rows])
                count += sum(not is_settled(values) for values in rows)
            if count := count + self._store.abandon():
                _log.warning("%d requests were cut off by the death of their worker: marked as abandoned.", count)
            if self._keep_days is not None:
                deleted = self._store.prune(time.time() - self._keep_days * _DAY_S, _PRUNED_AT_ONCE)
        except Exception as error:  # noqa: BLE001 - as above
            pause_s = _HOUSEKEEPING_AGAIN_S
            _log.warning(
                "Old rows of the ledger stay for now: %s.", error, exc_info=not isinstance(error, LedgerWriteError)
            )
        self._housekeeping_at = time.monotonic() + (0.0 if deleted == _PRUNED_AT_ONCE else pause_s)


_CONSEQUENCES = {"stop": "are refused until it can", "continue": "go on, and rows wait in memory"}


def _tell(batch: Sequence[_Entry], *, is_written: bool) -> None:
    """One wake-up for all who wait for this commit."""
    waiting = [each.committed for each in batch if each.committed is not None]
    if not waiting:
        return

    def wake() -> None:
        for each in waiting:
            _note(each, is_written)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        waiting[0].get_loop().call_soon_threadsafe(wake)


def _note(committed: asyncio.Future[bool], is_written: bool) -> None:
    if not committed.done():
        committed.set_result(is_written)


def _unwritable() -> OverloadedError:
    return OverloadedError("The gateway cannot account for requests now: try again later.", code="ledger_unavailable")
