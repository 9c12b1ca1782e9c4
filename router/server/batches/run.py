"""Run of one batch: every request gets exactly one answer line, even if the process is interrupted and restarted.

A batch waits while interactive requests are answered.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ....protocol.errors import DiskSpaceError, invalid_field
from ....protocol.http.wire import WireRequest, WireResponse, close_body, error_body, new_id
from ...request.chat_request import DIGEST_HEADER
from ...storage.batch_store import Batch, BatchError, BatchErrors, BatchJob, BatchStore, Status
from ...storage.file_store import FileMetadata, FilesDatabase, FileStore, FileWriter
from .lines import BatchLine, answer_line, answered, body_fault, expired_line, read_line, read_lines

#: Maximum number of concurrent requests of a batch.
CONCURRENCY = 2
#: Seconds between checks for changes made by other processes.
POLL_S = 1.0
#: Seconds before each retry of a temporary failure.
RETRY_S = (1.0, 5.0, 25.0)
_RETRYABLE = frozenset({429, 502, 503, 504})
#: Prefix of the owner of Anthropic's batches, so that OpenAI's API does not show their files.
MESSAGES = "messages:"
_OUTPUT_PURPOSE = "batch_output"


class InteractiveRequests:
    """Counter of interactive requests in progress. A streamed answer counts until its end."""

    def __init__(self) -> None:
        self._running = 0
        self._none = asyncio.Event()
        self._none.set()

    async def counted(self, answer: Awaitable[WireResponse]) -> WireResponse:
        self._running += 1
        self._none.clear()
        try:
            response = await answer
        except BaseException:
            self._end()
            raise
        if isinstance(response.body, bytes):
            self._end()
            return response
        return replace(response, body=TrackedBody(response.body, self._end))

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until no request is in progress. Return False if `timeout_s` seconds are not enough."""
        return await is_set_within(self._none, timeout_s)

    def _end(self) -> None:
        self._running -= 1
        if not self._running:
            self._none.set()


async def is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for `event`. Return False if `timeout_s` seconds are not enough."""
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False


class TrackedBody:
    """Streamed body that calls `end` once, when the stream ends or is closed."""

    def __init__(self, body: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        self._body = body
        self._ending = ExitStack()  # calls `end` only once
        self._ending.callback(end)

    def __aiter__(self) -> TrackedBody:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._body)
        except BaseException:
            self._ending.close()
            raise

    async def aclose(self) -> None:
        self._ending.close()
        await close_body(self._body)


@dataclass(frozen=True, slots=True)
class Stores:
    """Database, files and batches of the files folder."""

    database: FilesDatabase
    files: FileStore
    batches: BatchStore


@dataclass(frozen=True, slots=True)
class Background:
    """Access to the router for requests that no client waits for."""

    ask: Callable[[WireRequest], Awaitable[WireResponse]]
    interactive: InteractiveRequests


class BatchRun:
    """A started batch, resumed from its output files. Call `close` at the end."""

    def __init__(self, stores: Stores, job: BatchJob, background: Background) -> None:
        assert job.output_id is not None and job.error_id is not None, "the batch has begun"
        self._stores = stores
        self._job = job
        self._background = background
        self._status: Status = job.batch.status
        self._full: DiskSpaceError | None = None
        self._writing = threading.Lock()
        self._reading = asyncio.Lock()
        self._output, completed = self._opened(job.output_id)
        self._errors, failed = self._opened(job.error_id)
        self._completed, self._failed = len(completed), len(failed)
        self._done = completed | failed
        self._lines = self._open_lines()

    async def run(self) -> Batch:
        """Answer the remaining requests and return the finished batch. Failed requests are recorded, not raised."""
        try:
            async with asyncio.timeout(self._job.batch.expires_at - time.time()), asyncio.TaskGroup() as workers:
                for _ in range(CONCURRENCY):
                    workers.create_task(self._work())
        except TimeoutError:
            return await asyncio.to_thread(self._expire)
        if self._full is not None:
            return await asyncio.to_thread(self._finish, "failed")
        return await asyncio.to_thread(self._finish, "cancelled" if self._status == "cancelling" else "completed")

    def close(self) -> None:
        with self._writing:
            self._output.close()
            self._errors.close()

    def _opened(self, file_id: str) -> tuple[FileWriter, set[str]]:
        writer = self._stores.files.append(file_id)
        done = answered(self._stores.files.path(file_id))
        writer.close()
        return self._stores.files.append(file_id), done

    def _open_lines(self) -> Iterator[BatchLine]:
        for _, raw in read_lines(self._stores.files.path(self._job.batch.input_file_id)):
            line = read_line(raw)
            if line.custom_id not in self._done:
                yield line

    async def _work(self) -> None:
        while await self._may_send() and (line := await self._next_line()) is not None:
            response = await self._answer(line)
            await asyncio.to_thread(self._append_output, line.custom_id, response)

    async def _may_send(self) -> bool:
        """Wait while interactive requests run. Return False if no more requests should be sent."""
        while self._status == "in_progress" and self._full is None:
            if await self._background.interactive.wait_until_idle(POLL_S):
                return True
            batch = self._job.batch
            self._status = (await asyncio.to_thread(self._stores.batches.get, self._job.owner, batch.id)).status
        return False

    async def _next_line(self) -> BatchLine | None:
        async with self._reading:
            return await asyncio.to_thread(next, self._lines, None)

    async def _answer(self, line: BatchLine) -> WireResponse:
        headers = {"content-type": "application/json", DIGEST_HEADER: self._job.owner.removeprefix(MESSAGES)}
        if (fault := body_fault(line)) is not None:
            error = invalid_field(fault.param, fault.message).to_body()["error"]
            return WireResponse.json(error_body(error, line.url), status=400)
        request = WireRequest("POST", line.url, headers, bytes(line.body))
        for pause in RETRY_S:
            response = await self._background.ask(request)
            after = response.headers.get("retry-after", "")
            is_final = after.isdecimal() and int(after) > sum(RETRY_S)  # such as a budget that renews tomorrow
            if response.status not in _RETRYABLE or is_final:
                return response
            await asyncio.sleep(pause)
        return await self._background.ask(request)

    def _append_output(self, custom_id: str, response: WireResponse) -> None:
        line = answer_line(custom_id, response, response.headers.get("x-updraft-request-id") or new_id("req"))
        try:
            self._write(custom_id, line, succeeded=response.status == 200)
        except DiskSpaceError as error:
            self._full = error
            return
        self._status = self._stores.batches.change(self._job.batch.id, self._count).status

    def _write(self, custom_id: str, line: bytes, *, succeeded: bool) -> None:
        with self._writing:
            if custom_id in self._done:  # the batch has expired, so the line has an error already
                return
            (self._output if succeeded else self._errors).write(line)
            self._done.add(custom_id)
            self._completed += succeeded
            self._failed += not succeeded

    def _expire(self) -> Batch:
        for line in self._open_lines():
            try:
                self._write(line.custom_id, expired_line(line.custom_id), succeeded=False)
            except DiskSpaceError as error:
                self._full = error
                break
        return self._finish("expired")

    def _finish(self, status: Status) -> Batch:
        name = self._job.batch.id
        outputs = {
            writer.id: FileMetadata(writer.size, f"{name}_{kind}.jsonl", _OUTPUT_PURPOSE, self._job.outputs_expire_s)
            if writer.size
            else None
            for writer, kind in ((self._output, "output"), (self._errors, "error"))
        }

        def finish(batch: Batch) -> None:
            batch.set_status("finalizing")
            batch.set_status(status)
            self._count(batch)
            batch.output_file_id = self._output.id if self._output.size else None
            batch.error_file_id = self._errors.id if self._errors.size else None
            if self._full is not None:
                batch.errors = BatchErrors([BatchError("files_full", self._full.message)])

        self.close()
        for file_id, label in outputs.items():
            if label is None:
                self._stores.files.path(file_id).unlink(missing_ok=True)
        return self._stores.batches.finish(name, finish, outputs)

    def _count(self, batch: Batch) -> None:
        batch.request_counts.completed = self._completed
        batch.request_counts.failed = self._failed
