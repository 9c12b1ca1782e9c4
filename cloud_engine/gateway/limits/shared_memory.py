"""Limit accounts in a memory-mapped file, shared by the worker processes of one machine.

Workers write under a file lock, which the kernel releases when a worker dies. Each change is one aligned 8-byte
store, so a kill in between leaves every account consistent. Each worker has its own column of reservations. After the
worker's death, the column is cleared, and its reservations from budgets count as spent.

Rates use the clock `boot_time`, so that changes of the wall clock neither freeze nor reset them. The first
worker empties the file, so that no value outlives a reboot.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from struct import Struct

from ....accounting import accounts
from ....accounting.accounts import AccountUsage, Claim, Kind, Owner, account_name
from ....accounting.budget import TokenDemand
from ....accounting.ledger.workers import MAX_WORKERS, WorkerSlot
from ....protocol.errors import ConfigurationError, OverloadedError
from ....protocol.safety.private_files import private_file
from ....protocol.safety.system import boot_time, locked, reserve_blocks, try_lock, unlock
from .store import Admission, Settlement, unreachable

_KEY_BYTES = 16
_RECORD = Struct(f"=dd{MAX_WORKERS}d")  # fields after the key: value, expiry, reservation of each worker
_COLUMNS = tuple(Struct(f"=dd{count}d") for count in range(MAX_WORKERS + 1))  # `_RECORD` for `count` workers
_RECORD_BYTES = _KEY_BYTES + _RECORD.size
_RECORDS = 65_536
_BUDGET = 1  # last byte of a budget's key; other keys end in 0
_HEADER_BYTES = 64  # one flag per worker: whether its column may be non-zero
_MEMORY_BYTES = _HEADER_BYTES + _RECORDS * _RECORD_BYTES
_PROBED = 16  # number of records to search for one account
_NUMBER, _USED = Struct("=d"), Struct("=dd")  # an amount; a value with its expiry
_NOTHING = bytes(_NUMBER.size)
_VALUE_AT, _EXPIRY_AT, _RESERVED_AT = _KEY_BYTES, _KEY_BYTES + 8, _KEY_BYTES + 16
_LOCK_S = 2.0
_TRIES = 50  # attempts to lock without a pause between them; the lock is rarely held for longer
_PAUSE_S = 0.0002
_MAX_UNSETTLED = 10_000


class SharedMemoryStore:
    """Accounts in shared memory. The first worker clears the file. Raises ConfigurationError, DiskSpaceError."""

    failing = False

    def __init__(self, path: Path) -> None:
        self._turn = asyncio.Lock()
        self._unsettled: deque[Sequence[Settlement]] = deque(maxlen=_MAX_UNSETTLED)
        try:
            self._file = os.open(private_file(path), os.O_RDWR | getattr(os, "O_BINARY", 0))  # no newline translation
            with locked(self._file):
                self._slot = WorkerSlot(path.with_name(f"{path.name}.workers"))
                if not self._slot.living(set(range(MAX_WORKERS)) - {self._slot.number}):
                    os.ftruncate(self._file, 0)
                reserve_blocks(self._file, path, _MEMORY_BYTES)
                self._memory = mmap.mmap(self._file, _MEMORY_BYTES)
                self._clear(self._slot.number)
                self._memory[self._slot.number] = 1
            unlock(self._file)
        except OSError as error:
            raise ConfigurationError(f"Cannot use {path} for the limits: {error}. Choose another --ledger.") from error

    async def admit(self, claims: Sequence[Claim], wanted: TokenDemand | None = None) -> Admission:
        await self._lock()
        try:
            self._settle_all()
            admission = self._admit(claims, wanted)
            if admission.refused is not None and self._sweep():
                admission = self._admit(claims, wanted)
            return admission
        finally:
            unlock(self._file)

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        self._unsettled.append(settlements)
        try:
            await self._lock()
        except OverloadedError:
            return  # this worker's next call settles the claims
        try:
            self._settle_all()
        finally:
            unlock(self._file)

    async def seed(self, claim: Claim, spent: float) -> None:
        await self._lock()
        try:
            now = boot_time()
            if self._find(claim) is None:
                self._use(self._allocate(claim, now, ()), claim, spent, now)
        finally:
            unlock(self._file)

    async def close(self) -> None:
        await self.settle(())  # those that could not be settled before
        self._memory.close()
        self._slot.close()
        os.close(self._file)

    def _admit(self, claims: Sequence[Claim], wanted: TokenDemand | None) -> Admission:
        now, memory, records, usages = boot_time(), self._memory, list[int](), list[AccountUsage]()
        unpack = _COLUMNS[memory.rfind(b"\1", 0, MAX_WORKERS) + 1].unpack_from
        for claim in claims:
            record = self._find(claim)
            if record is None:
                if claim.is_budget:
                    return Admission(usages, unknown=claim)
                record = self._allocate(claim, now, records)
            value, _, *reserved = unpack(memory, record + _KEY_BYTES)
            usage = AccountUsage(accounts.used(claim, value, now), sum(reserved))
            usages.append(usage)
            if not usage.fits(claim):
                return Admission(usages, refused=claim, now=time.time())
            records.append(record)
        tokens = 0 if wanted is None else accounts.granted(wanted, claims, usages)
        if wanted is not None and tokens > wanted.least:
            more = tokens - wanted.least
            claims = [claim.extended(more) if claim.per_token else claim for claim in claims]
        for claim, record in zip(claims, records, strict=True):
            if claim.kind == "requests":
                self._use(record, claim, claim.amount, now)
            else:
                self._reserve(record, claim.amount)
        return Admission(usages, now=time.time(), claims=claims, tokens=tokens)

    def _settle_all(self) -> None:
        now = boot_time() if self._unsettled else 0.0
        while self._unsettled:
            for claim, amount, _ in self._unsettled.popleft():
                if (record := self._find(claim)) is not None:
                    self._reserve(record, -claim.amount)
                    if claim.kind != "concurrent":
                        self._use(record, claim, amount, now)

    def _use(self, record: int, claim: Claim, amount: float, now: float) -> None:
        (value,) = _NUMBER.unpack_from(self._memory, record + _VALUE_AT)
        value = accounts.settled(claim, value, amount, now)
        expiry = accounts.expires(claim, value, now - time.time() if claim.ends > 0 else 0.0)
        _USED.pack_into(self._memory, record + _VALUE_AT, value, expiry)

    def _reserve(self, record: int, amount: float) -> None:
        at = record + _RESERVED_AT + 8 * self._slot.number
        (reserved,) = _NUMBER.unpack_from(self._memory, at)
        reserved += amount
        _NUMBER.pack_into(self._memory, at, reserved if reserved > 1e-12 else 0.0)

    def _find(self, claim: Claim) -> int | None:
        """Return the offset of the account's record; None if the account does not exist."""
        key, first = _place(claim.owner, claim.kind, claim.begins, claim.name)
        at, end = first, first + _PROBED * _RECORD_BYTES
        while (at := self._memory.find(key, at, end)) >= 0:
            if (at - first) % _RECORD_BYTES == 0:
                return at
            at += 1
        return None

    def _allocate(self, claim: Claim, now: float, kept: Sequence[int]) -> int:
        """Return the offset of a free or expired record that is not in `kept`, prepared for a new account."""
        key, first = _place(claim.owner, claim.kind, claim.begins, claim.name)
        for record in range(first, first + _PROBED * _RECORD_BYTES, _RECORD_BYTES):
            _, expiry, *reserved = _RECORD.unpack_from(self._memory, record + _KEY_BYTES)
            if expiry < now and not any(reserved) and record not in kept:
                self._memory[record : record + _RECORD_BYTES] = bytes(_RECORD_BYTES)
                self._memory[record : record + _KEY_BYTES] = key
                return record
        raise OverloadedError("The table of limits is full: use a Redis server (--limits-url) for this many limits.")

    def _sweep(self) -> bool:
        """Clear the reservations of dead workers. Return whether there were any."""
        flagged = {number for number in range(MAX_WORKERS) if self._memory[number]}
        dead = flagged - self._slot.living(flagged)
        for number in dead:
            self._clear(number)
        return bool(dead)

    def _clear(self, worker: int) -> None:
        memory, column = self._memory, _RESERVED_AT + 8 * worker
        for record in range(_HEADER_BYTES, _MEMORY_BYTES, _RECORD_BYTES):
            reserved = memory[record + column : record + column + 8]
            if reserved == _NOTHING:
                continue
            if memory[record + _KEY_BYTES - 1] == _BUDGET:  # the cost is unknown: the reservation counts as spent
                (value,) = _NUMBER.unpack_from(memory, record + _VALUE_AT)
                _NUMBER.pack_into(memory, record + _VALUE_AT, value + _NUMBER.unpack(reserved)[0])
            memory[record + column : record + column + 8] = _NOTHING
        memory[worker] = 0

    async def _lock(self) -> None:
        """Lock the shared memory for this process until `unlock`. Do not await while holding the lock."""
        if try_lock(self._file):
            return
        until = time.monotonic() + _LOCK_S
        async with self._turn:  # only one task per process polls
            while not any(try_lock(self._file) for _ in range(_TRIES)):
                if time.monotonic() > until:
                    raise unreachable("Another worker has locked the limits store for too long")
                await asyncio.sleep(_PAUSE_S)


@lru_cache(4096)
def _place(owner: Owner, kind: Kind, begins: float, name: str) -> tuple[bytes, int]:
    """Return the key of an account, and the offset of its first candidate record. The last byte marks budgets."""
    account = account_name(owner, kind, begins, name)
    key = blake2b(account.encode(), digest_size=_KEY_BYTES - 1).digest() + bytes([_BUDGET if begins else 0])
    return key, int.from_bytes(key[:8], "big") % (_RECORDS - _PROBED) * _RECORD_BYTES + _HEADER_BYTES
