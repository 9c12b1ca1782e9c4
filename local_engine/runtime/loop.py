"""The engine's thread: it owns the llama.cpp context and computes the steps of all requests."""

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
from ..llama.context import LlamaContext, NoKvSlotError, TokenRows
from ..llama.library import LlamaModel
from ..sampling.signal_meter import SignalMeter
from ..sampling.signals import Floats
from .chunk_budget import ChunkBudget
from .generation import EngineJob
from .prefix_cache import LocalPrefixCache
from .scheduler import LocalScheduler, ScheduledStep, SchedulerLimits, Sequence, SequenceShare

# Minimum tokens of a shared prefix. Shorter ones are computed again: this is cheap, and gives a new engine's logits.
_SHORTEST_SHARED = 16
_CLOSED = "The local engine is closed."
_FORKED = (
    "The local engine runs only in the process that loaded it, and this process is a fork: load the engine again here, "
    "or start processes with multiprocessing's method 'spawn'."
)
_NOT_FINITE = (
    "The model produced NaN or infinite values: the model file or the llama.cpp build is damaged. "
    "Check the build with `updraft doctor`."
)


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Sizes and limits of the loop."""

    # Number of KV cache cells, one per token. No `Sequence.limit` may exceed this number.
    cells: int
    # Number of sequence ids in the context.
    sequences: int
    # Maximum number of waiting requests.
    max_waiting: int
    limits: SchedulerLimits


class LocalEngineLoop:
    """Takes jobs from any thread and computes them together. Uses no processor time while idle.

    The thread owns context and model, and frees them when it ends.
    """

    def __init__(self, model: LlamaModel, context: LlamaContext, options: LoopOptions) -> None:
        self._model = model
        self._context = context
        self._options = options
        self._meter = SignalMeter(model.vocab_size)
        self._jobs: dict[Sequence, EngineJob] = {}
        self._reset()
        # Commands from other threads. Unlike a lock, a SimpleQueue is safe to use during a garbage collection.
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._process = os.getpid()
        self._lock = threading.RLock()  # guards the next two fields; reentrant, since a finalizer may call `close`
        self._open = 0
        self._closed = False
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="updraft-local", daemon=True)
        self._thread.start()

    @property
    def threads(self) -> int:
        """Threads used by the last step."""
        return self._context.threads

    def submit(self, job: EngineJob) -> None:
        """Queue a job that fits the cache. Raises OverloadedError if the queue is full, EngineError after `close` and
        in a process forked from the engine's."""
        limits = self._options.limits
        self.refuse_fork()  # before the lock, because the fork may have copied it while locked
        with self._lock:
            if self._closed:
                raise EngineError(_CLOSED)
            if self._open >= limits.running + self._options.max_waiting:
                raise OverloadedError(
                    f"The local engine's queue is full ({self._options.max_waiting} requests waiting): try again later."
                )
            self._open += 1
            self._inbox.put(partial(self._accept, job))

    def refuse_fork(self) -> None:
        """Raise EngineError in a process forked from the engine's, where the thread is missing."""
        if os.getpid() != self._process:
            raise EngineError(_FORKED)

    def cancel(self, job: EngineJob) -> None:
        """End a running or waiting job before the next step; harmless if the job has ended."""
        self._inbox.put(partial(self._end, job))

    def close(self) -> None:
        """Fail all jobs, and free model and context after the running step. Does nothing in a process forked from the
        engine's, where the thread is missing and the lock may be held forever."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
        self._inbox.put(self._stop)
        if threading.current_thread() is not self._thread:  # a garbage collection may call this on any thread
            self._thread.join()

    def _reset(self) -> None:
        limits = self._options.limits
        self._context.clear()
        cache = LocalPrefixCache(
            self._context,
            cells=self._options.cells,
            sequences=self._options.sequences,
            sharing=limits.sharing,
            shortest=_SHORTEST_SHARED,
        )
        self._budget = ChunkBudget(limits.rows, separate_steps=not limits.mixes)
        self._scheduler = LocalScheduler(cache, self._budget, limits)

    def _work(self) -> None:
        try:
            while self._apply():
                try:
                    self._step()
                except Exception as error:  # noqa: BLE001 - an internal error fails all jobs; the engine continues
                    self._reset()
                    self._fail(list(self._jobs), f"The local engine failed: {error!r}.", error)
        finally:
            self._finish()

    def _finish(self) -> None:
        """End the thread: refuse new requests, fail pending jobs, and free model and context."""
        with self._lock:
            self._closed = True
        with ExitStack() as last:
            last.callback(self._model.close)
            last.callback(self._context.close)
            last.callback(self._report_all)
            while not self._inbox.empty():
                last.callback(self._inbox.get())

    def _report_all(self) -> None:
        """Fail all jobs without the scheduler, which may be the part that failed."""
        with ExitStack() as callbacks:
            for job in self._jobs.values():
                callbacks.callback(job.fail, EngineError(_CLOSED))

    def _apply(self) -> bool:
        """Run the commands of other threads; without other work, wait for one. Return False after `close`."""
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
        """Fail the jobs of these sequences. An InvalidRequestError is passed on; other causes become an EngineError."""
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
        """Plan a step, compute it, and deliver its results."""
        if not self._scheduler.has_work:
            return
        began = time.perf_counter()
        step = self._scheduler.plan()
        try:
            logits, hidden = self._context.decode(_rows(step))
        except NoKvSlotError as error:
            if not self._scheduler.retry(step):
                self._fail(self._scheduler.fail(step), "The KV cache is too small for this request.", error)
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
        """Give every job its results: first the hidden states from probes, then the logits for new tokens."""
        for place, probe in enumerate(step.probes, len(step.decodes)):
            assert hidden is not None  # steps with probes always return hidden states
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
        for probe in step.probes:  # after `_choose`, because a sequence with a probe may also get a new token
            if probe.sequence in self._jobs:
                self._end_if_done(self._jobs[probe.sequence])

    def _choose(self, chosen: list[tuple[EngineJob, int]], logits: Floats, hidden: Floats | None) -> None:
        """Choose a token for each job from the job's row of logits. An error ends only that job."""
        places = [place for _, place in chosen]
        rows = logits[: len(places)] if places[-1] < len(places) else logits[places]  # avoids a copy if possible
        for (job, place), row in zip(chosen, self._meter.measure(rows), strict=True):
            if not row.is_finite:
                self._fail([job.sequence], _NOT_FINITE)
                continue
            try:
                job.choose(row, None if hidden is None else hidden[place].copy())
            except Exception as error:  # noqa: BLE001 - the reader gets the error
                self._fail([job.sequence], f"The local engine could not choose a token: {error}", error)
            else:
                self._end_if_done(job)

    def _end_if_done(self, job: EngineJob) -> None:
        if job.sequence.finished and not job.sequence.pending_hidden:
            self._end(job)


def _rows(step: ScheduledStep) -> list[TokenRows]:
    """Return the rows for the context to compute, in the order of the step."""
    probes = [
        TokenRows(probe.scratch.id, probe.position, [probe.sequence.tokens[probe.position]], 1) for probe in step.probes
    ]
    return [*map(_share_rows, step.decodes), *probes, *map(_share_rows, step.chunks)]


def _share_rows(share: SequenceShare) -> TokenRows:
    sequence = share.sequence
    assert sequence.branch is not None
    tokens = sequence.tokens[share.start : share.start + share.count]
    return TokenRows(sequence.branch.id, share.start, tokens, share.outputs)


def _places(step: ScheduledStep) -> Iterator[tuple[SequenceShare, int, int]]:
    """Yield every sequence's share of the step with the start and the end of its rows in the logits."""
    at = 0
    for share in step.decodes:
        yield share, at, at + 1
        at += 1
    at += len(step.probes)
    for share in step.chunks:
        yield share, at, at + share.outputs
        at += share.outputs
