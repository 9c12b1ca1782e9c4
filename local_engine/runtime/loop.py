"""The engine's thread: the one that owns the llama.cpp context and computes step after step for everybody."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from ...protocol.errors import EngineError, InvalidRequestError, OverloadedError, UpdraftError
from ..llama.context import LlamaContext, NoRoomError, Rows
from ..llama.library import LlamaModel
from ..sampling.signal_meter import SignalMeter
from ..sampling.signals import Floats
from .chunk_budget import ChunkBudget
from .generation import EngineJob
from .prefix_cache import LocalPrefixCache
from .scheduler import LocalScheduler, ScheduledStep, SchedulerLimits, Sequence, SequenceShare

# Computing fewer tokens again costs next to nothing, and the answer keeps the last bits it has on a fresh engine.
_SHORTEST_SHARED = 16
_CLOSED = "The local engine is closed."
_FORKED = (
    "The local engine runs in the process that loaded it, and this one was forked from that: load it here again, or "
    "start processes with multiprocessing's method 'spawn'."
)
_NOT_FINITE = (
    "The model produced values that are not numbers: the file or the llama.cpp build is damaged. "
    "`updraft doctor` checks the build."
)


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Sizes and limits of the loop."""

    # Of the KV cache, for `Sequence.limit` of any request.
    cells: int
    # Ids of the context.
    sequences: int
    # Requests that may wait.
    queue_limit: int
    limits: SchedulerLimits


class LocalEngineLoop:
    """Takes jobs from any thread and runs them together. Idle, it waits without using the processor.

    The thread owns context and model, and frees them when it ends.
    """

    def __init__(self, model: LlamaModel, context: LlamaContext, options: LoopOptions) -> None:
        self._model = model
        self._context = context
        self._options = options
        self._meter = SignalMeter(model.vocab_size)
        self._jobs: dict[Sequence, EngineJob] = {}
        self._begin_afresh()
        # Commands of other threads. Unlike a lock, this may be used even where a garbage collection interrupts it.
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._process = os.getpid()
        self._lock = threading.RLock()  # guards the next two; a garbage collection may come back to it
        self._open = 0
        self._closed = False
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="updraft-local", daemon=True)
        self._thread.start()

    @property
    def threads(self) -> int:
        """The threads of the last step."""
        return self._context.threads

    def submit(self, job: EngineJob) -> None:
        """Queue a job that fits the cache. Raises OverloadedError if the queue is full, EngineError after `close`, and
        in a process that was forked from the engine's."""
        limits = self._options.limits
        self.refuse_fork()  # before the lock, which another thread may have held
        with self._lock:
            if self._closed:
                raise EngineError(_CLOSED)
            if self._open >= limits.running + self._options.queue_limit:
                raise OverloadedError(
                    f"The local engine's queue is full ({self._options.queue_limit} requests waiting): try again later."
                )
            self._open += 1
            self._inbox.put(partial(self._accept, job))

    def refuse_fork(self) -> None:
        """Raises EngineError in a process that was forked from the engine's: nobody would ever answer there."""
        if os.getpid() != self._process:
            raise EngineError(_FORKED)

    def cancel(self, job: EngineJob) -> None:
        """Let a job end before the next step, wherever it is; harmless if it has ended."""
        self._inbox.put(partial(self._end, job))

    def close(self) -> None:
        """Let all jobs fail and free everything; returns when that is done, after a step that is running. Does nothing
        in a process that was forked from the engine's: the thread is not there, and its lock may be held for ever."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
        self._inbox.put(self._stop)
        if threading.current_thread() is not self._thread:  # a garbage collection may happen on any
            self._thread.join()

    def _begin_afresh(self) -> None:
        limits = self._options.limits
        self._context.clear()
        cache = LocalPrefixCache(
            self._context,
            cells=self._options.cells,
            sequences=self._options.sequences,
            sharing=limits.sharing,
            shortest=_SHORTEST_SHARED,
        )
        self._budget = ChunkBudget(limits.rows, apart=not limits.mixes)
        self._scheduler = LocalScheduler(cache, self._budget, limits)

    def _work(self) -> None:
        try:
            while self._apply():
                try:
                    self._step()
                except Exception as error:  # noqa: BLE001 - a fault of ours: all are told, and the engine goes on
                    self._begin_afresh()
                    self._fail(list(self._jobs), f"The local engine failed: {error!r}.", error)
        finally:
            self._finish()

    def _finish(self) -> None:
        """Ends the thread: new requests are refused, waiting ones get the error, and everything is freed."""
        with self._lock:
            self._closed = True
        with ExitStack() as last:
            last.callback(self._model.close)
            last.callback(self._context.close)
            last.callback(self._report_all)
            while not self._inbox.empty():
                last.callback(self._inbox.get())

    def _report_all(self) -> None:
        """Without a look at the scheduler, which may be what has failed."""
        with ExitStack() as each:
            for job in self._jobs.values():
                each.callback(job.fail, EngineError(_CLOSED))

    def _apply(self) -> bool:
        """Do what other threads ask for; waits for it if there is nothing to compute. False: the engine is closed."""
        if not self._scheduler.has_work and not self._stopped:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()
        return not self._stopped

    def _stop(self) -> None:
        self._stopped = True

    def _accept(self, job: EngineJob) -> None:
        self._jobs[job.sequence] = job
        self._scheduler.add(job.sequence)

    def _end(self, job: EngineJob, *, keep: bool = True) -> None:
        if self._jobs.pop(job.sequence, None) is not None:
            self._scheduler.remove(job.sequence, keep=keep)
            with self._lock:
                self._open -= 1

    def _fail(self, sequences: list[Sequence], message: str, cause: Exception | None = None) -> None:
        """Tell their readers; a request that cannot be answered as it is comes as that error, not as the engine's."""
        for sequence in sequences:
            job = self._jobs[sequence]
            self._end(job, keep=False)
            if isinstance(cause, InvalidRequestError):
                job.fail(cause)
                continue
            error = EngineError(message)
            error.__cause__ = cause
            job.fail(error)

    def _step(self) -> None:
        """Schedule, compute, choose."""
        if not self._scheduler.has_work:
            return
        began = time.perf_counter()
        step = self._scheduler.plan()
        try:
            logits, hidden = self._context.decode(_rows(step))
        except NoRoomError as error:
            if not self._scheduler.retry(step):
                self._fail(self._scheduler.fail(step), "The KV cache has no room for this request.", error)
            return
        except UpdraftError as error:
            self._fail(self._scheduler.fail(step), error.message, error)
            return
        self._scheduler.complete(step)
        self._deliver(step, logits, hidden)
        if not step.probes:
            seconds = time.perf_counter() - began
            self._budget.measured(step.decoding, step.chunk_tokens, seconds, self._context.threads)

    def _deliver(self, step: ScheduledStep, logits: Floats, hidden: Floats | None) -> None:
        """Give every job its rows: first what was looked at again, then what new tokens are chosen from."""
        for place, probe in enumerate(step.probes, len(step.decodes)):
            assert hidden is not None  # as in all steps with probes
            self._jobs[probe.sequence].take_hidden_state(hidden[place].copy())
        chosen: list[tuple[EngineJob, int]] = []
        for share, first, last in _places(step):
            job = self._jobs[share.sequence]
            if share.start < share.sequence.scored and last - first == share.count:
                job.prompt_rows(share.start, logits[first:last])
            if share.is_caught_up:
                chosen.append((job, last - 1))
        if chosen:
            self._choose(chosen, logits, hidden)
        for probe in step.probes:  # by now, as one that is done may have decoded, too
            if probe.sequence in self._jobs:
                self._end_if_done(self._jobs[probe.sequence])

    def _choose(self, chosen: list[tuple[EngineJob, int]], logits: Floats, hidden: Floats | None) -> None:
        """A new token for each of these jobs, from these rows; what fails ends one job only."""
        places = [place for _, place in chosen]
        rows = logits[: len(places)] if places[-1] < len(places) else logits[places]  # a view, if they are the first
        for (job, place), row in zip(chosen, self._meter.measure(rows), strict=True):
            if not row.is_finite:
                self._fail([job.sequence], _NOT_FINITE)
                continue
            try:
                job.choose(row, None if hidden is None else hidden[place].copy())
            except Exception as error:  # noqa: BLE001 - told to the reader
                self._fail([job.sequence], f"The local engine could not choose a token: {error}", error)
            else:
                self._end_if_done(job)

    def _end_if_done(self, job: EngineJob) -> None:
        if job.sequence.finished and not job.sequence.pending_hidden:
            self._end(job)


def _rows(step: ScheduledStep) -> list[Rows]:
    """The rows for the context to compute, in the order of the step."""
    probes = [
        Rows(probe.scratch.id, probe.position, [probe.sequence.tokens[probe.position]], 1) for probe in step.probes
    ]
    return [*map(_share_rows, step.decodes), *probes, *map(_share_rows, step.chunks)]


def _share_rows(share: SequenceShare) -> Rows:
    sequence = share.sequence
    assert sequence.branch is not None
    tokens = sequence.tokens[share.start : share.start + share.count]
    return Rows(sequence.branch.id, share.start, tokens, share.outputs)


def _places(step: ScheduledStep) -> Iterator[tuple[SequenceShare, int, int]]:
    """Every share with the slice of the outputs that is its own."""
    at = 0
    for share in step.decodes:
        yield share, at, at + 1
        at += 1
    at += len(step.probes)
    for share in step.chunks:
        yield share, at, at + share.outputs
        at += share.outputs
