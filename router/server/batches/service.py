"""Files and batches for the endpoints, and the worker that runs the batches."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ....protocol.errors import NotFoundError, StorageError
from ....protocol.safety.private_files import has_file
from ....protocol.safety.system import try_lock
from ...config import RouterConfig
from ...storage.batch_store import Batch, BatchError, BatchErrors, BatchJob, BatchStore
from ...storage.file_store import DATABASE, MB, FilesDatabase, FileStore
from .lines import check_lines
from .run import POLL_S, Background, BatchRun, Stores, is_set_within

log = logging.getLogger("updraft.router")
T = TypeVar("T")

#: Lock file, so that only one process at a time works on the batches of a folder.
_LOCK = "batches.lock"
_DISK_PAUSE_S = 30.0


class BatchService:
    """Files and batches of the configured folder, opened on first use. `close()` stops the worker."""

    def __init__(self, config: RouterConfig, background: Background) -> None:
        self._config = config
        self._background = background
        self._opening = threading.Lock()
        self._stores: Stores | None = None
        self._worker: asyncio.Task[None] | None = None
        self._more = asyncio.Event()

    async def start(self) -> None:
        """Resume the batches of an earlier run. If the folder is unusable, log a warning and serve without it."""
        folder = self._config.files
        if folder is not None and has_file(folder / DATABASE):
            try:
                await self.use(lambda _: None)
                self.work()
            except StorageError as error:
                log.warning("files and batches are unavailable: %s", error.message)

    async def use(self, work: Callable[[Stores], T]) -> T:
        """Return the result of `work` on the stores, in a thread. Raises the errors of `work`. Raises NotFoundError if
        files are off, and StorageError if the folder or the database cannot be used."""
        try:
            return await asyncio.to_thread(lambda: work(self._open()))
        except (sqlite3.Error, OSError) as error:
            log.exception("cannot use the files folder")
            raise StorageError(f"The files folder cannot be used: {error}.", param="files") from error

    def work(self) -> None:
        """Wake the worker, and start it if the folder is open."""
        self._more.set()
        if self._worker is None and self._stores is not None:
            self._worker = asyncio.create_task(self._run(self._stores))

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait([self._worker])
        if self._stores is not None:
            self._stores.database.close()

    def _open(self) -> Stores:
        folder = self._folder()
        with self._opening:
            if self._stores is None:
                database = FilesDatabase(folder)
                files = FileStore(folder, database, self._config.files_mb * MB)
                self._stores = Stores(database, files, BatchStore(database))
        return self._stores

    def _folder(self) -> Path:
        if self._config.files is None:
            raise NotFoundError("This router keeps no files: set `files` to a folder.", code="files_off")
        return self._config.files

    async def _run(self, stores: Stores) -> None:
        """Run batches one at a time, while no other process holds the lock."""
        lock = os.open(self._folder() / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while True:
                self._more.clear()
                job = await asyncio.to_thread(_next, stores) if try_lock(lock) else None
                if job is not None:
                    await self._work_on(stores, job)
                else:
                    await is_set_within(self._more, POLL_S)
        finally:
            os.close(lock)

    async def _work_on(self, stores: Stores, job: BatchJob) -> None:
        try:
            if (begun := job if job.output_id else await asyncio.to_thread(_begin, stores, job)) is not None:
                with closing(await asyncio.to_thread(BatchRun, stores, begun, self._background)) as run:
                    await run.run()
        except Exception as error:
            log.exception("batch %s failed", job.batch.id)
            fault = BatchError("internal_error", f"The router failed to run this batch ({type(error).__name__}).")
            try:
                await asyncio.to_thread(stores.batches.change, job.batch.id, lambda batch: _fail(batch, [fault]))
            except sqlite3.Error:  # the disk may be full, so retry the batch after a pause
                await asyncio.sleep(_DISK_PAUSE_S)


def _next(stores: Stores) -> BatchJob | None:
    stores.files.prune()
    return stores.batches.next()


def _begin(stores: Stores, job: BatchJob) -> BatchJob | None:
    """Create the output files and start the batch. Return None if the batch is invalid or was cancelled."""
    path = stores.files.path(job.batch.input_file_id)
    total, errors = check_lines(path, job.batch.endpoint)
    if errors:
        stores.batches.change(job.batch.id, lambda batch: _fail(batch, errors))
        return None
    writers = [stores.files.begin(job.owner) for _ in range(2)]
    for writer in writers:
        writer.close()
    output_id, error_id = (writer.id for writer in writers)
    batch = stores.batches.begin(job.batch.id, total, output_id, error_id)
    if batch.status != "in_progress":
        stores.files.discard(output_id)
        stores.files.discard(error_id)
        return None
    return replace(job, output_id=output_id, error_id=error_id, batch=batch)


def _fail(batch: Batch, errors: list[BatchError]) -> None:
    if batch.status != "cancelled":
        batch.set_status("failed")
        batch.errors = BatchErrors(errors)
