"""Finds the settings with which a model is fastest on this machine, by short measurements in processes of their own.

One setting after the other is tried beside the best so far. What wins has to win once more against the default, in a
second comparison; differences within the noise change nothing.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ...model_files.gguf_header import GgufHeader
from ...model_files.gguf_reader import read_model_header
from ...protocol.errors import ModelLoadError
from ..machine.child_process import run_child
from ..machine.machine import Machine, default_threads, this_machine
from ..machine.memory_fit import KvCacheType, ensure_fits, estimate, quantizable
from ..opening import layout_of, plan_of
from ..options import LocalOptions
from ..runtime.context_layout import settled
from ..runtime.tuned_options import Settings, remember
from ..trial_load import ensure_loadable
from .measurement import MeasurementJob, Speeds

BUDGET_S = 26.0
_PROMPT, _ANSWER = 256, 128  # tokens of the request whose time is compared
_MIN_GAIN = 0.05
_CONTEXT_STEP = 256
_FEWER = (None, 4, 2, 1)  # answers at once
_RUN_S = 4.0  # a run that may take longer than what is left is not begun
_FIRST_S = 10.0  # what the default gets at least: without its speed nothing is decided


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings that are measured, each with a value."""

    threads: int
    repack: bool
    ubatch: int
    kv_cache_type: KvCacheType


@dataclass(frozen=True, slots=True)
class TrialResult:
    """A measured choice."""

    choice: Choice
    # The purpose of the measurement, or why it failed.
    note: str
    # Medians, as `answer_tokens_per_s`.
    prompt_tokens_per_s: float = 0.0
    answer_tokens_per_s: float = 0.0
    # The larger relative spread of the two speeds.
    noise: float = 0.0

    @property
    def seconds(self) -> float:
        """Of a request of 256 tokens that is answered with 128; infinite if it failed."""
        if not self.answer_tokens_per_s:
            return float("inf")
        return _PROMPT / self.prompt_tokens_per_s + _ANSWER / self.answer_tokens_per_s

    def beats(self, other: TrialResult) -> bool:
        """By more than the noise of both, and by 5 % at least."""
        return self.seconds < other.seconds * (1 - max(_MIN_GAIN, self.noise, other.noise))


@dataclass(frozen=True, slots=True)
class Tuning:
    """`settings` is what is remembered."""

    settings: Settings
    default: Choice
    runs: tuple[TrialResult, ...]
    # How much sooner a request is done than with the default, in the comparison that decided.
    gain: float
    # Choices that there was no time for.
    skipped: tuple[str, ...]
    seconds: float


def tune(path: Path, room: int, *, report: Callable[[TrialResult], None] = lambda _: None) -> Tuning:
    """Measure, decide and remember; at most half a minute after a first load on trial. `room`: bytes of memory that the
    model may take.

    Raises ModelLoadError for a file that cannot be used, ModelTooLargeError for one that does not fit.
    """
    started, machine, header = time.monotonic(), this_machine(), read_model_header(path)
    fitting = _fitting(path.name, header, room)
    layout = layout_of(header, fitting)
    ensure_loadable(path)
    usual = settled(header, fitting)
    rows = layout_of(header, usual).rows
    default = Choice(default_threads(header.parameters), usual.repack is True, rows, layout.kv_cache_type)
    search = _Search(path, time.monotonic() + BUDGET_S, report)
    best, gain = _descend(search, default, machine, header)
    settings = Settings(
        threads=None if best.threads == default.threads else best.threads,
        repack=None if best.repack == default.repack else best.repack,
        ubatch=None if best.ubatch == default.ubatch else best.ubatch,
        kv_cache_type=fitting.kv_cache_type,
        context_length=fitting.context_length,
        parallel=fitting.parallel,
    )
    remember(path, settings)
    return Tuning(settings, default, tuple(search.runs), gain, tuple(search.skipped), time.monotonic() - started)


def _fitting(name: str, header: GgufHeader, room: int) -> LocalOptions:
    """The default options, or the nearest to them that fit. Raises ModelTooLargeError."""
    options = LocalOptions()
    for options in _smaller_and_smaller(header):
        if estimate(header, plan_of(header, options)).total <= room:
            return options
    ensure_fits(name, header, plan_of(header, options), room)
    return options


def _smaller_and_smaller(header: GgufHeader) -> Iterator[LocalOptions]:
    """These cost memory or precision, not time: so they follow from what there is. The smaller type of the cache is
    taken before fewer answers at once, and those before a smaller context, which would refuse what could be asked."""
    yield LocalOptions()
    kind: KvCacheType | None = "q8_0" if quantizable(header) else None
    longest = layout_of(header, LocalOptions()).context_length
    for context in (None, *range((longest - 1) // _CONTEXT_STEP * _CONTEXT_STEP, 0, -_CONTEXT_STEP)):
        for parallel in _FEWER:
            yield LocalOptions(kv_cache_type=kind, context_length=context, parallel=parallel)


def _descend(search: _Search, default: Choice, machine: Machine, header: GgufHeader) -> tuple[Choice, float]:
    """The best choice, and how much less time it takes than the default."""
    first = best = search.run(default, "default")
    if best is None:
        return default, 0.0
    if not best.answer_tokens_per_s:
        raise ModelLoadError(
            f"The default settings cannot be measured: {best.note}. If other programs use the processors, try again "
            "without them."
        )
    for note, candidates in _candidates(default, machine, header):
        for change in candidates:
            found = search.run(change(best.choice), note)
            if found is not None and found.beats(best):
                best = found
    if best is first:
        return default, 0.0
    again, winner = search.run(default, "default again"), search.run(best.choice, "winner again")
    if again is None or winner is None or not winner.beats(again):
        return default, 0.0
    return winner.choice, 1 - winner.seconds / again.seconds


def _candidates(
    default: Choice, machine: Machine, header: GgufHeader
) -> Iterator[tuple[str, list[Callable[[Choice], Choice]]]]:
    """The choices to try, setting by setting; each changes one field of the best choice so far."""
    numbers = sorted({1, (machine.threads + 1) // 2, machine.threads, machine.processors} - {default.threads})
    yield "threads", [lambda best, number=number: replace(best, threads=number) for number in reversed(numbers)]
    if any(tensor.kind not in (0, 1, 30) for tensor in header.tensors if len(tensor.shape) > 1):
        yield "repack", [lambda best: replace(best, repack=not best.repack)]
    sizes = sorted({512, 128, 64} - {default.ubatch}, reverse=True)
    yield "ubatch", [lambda best, size=size: replace(best, ubatch=size) for size in sizes]


class _Search:
    """The runs so far, and the time that is left."""

    def __init__(self, path: Path, deadline: float, report: Callable[[TrialResult], None]) -> None:
        self.runs: list[TrialResult] = []
        self.skipped: list[str] = []
        self._path = path
        self._deadline = deadline
        self._report = report
        self._longest = _RUN_S
        self._prompt = 0

    def run(self, choice: Choice, note: str) -> TrialResult | None:
        """None where there is no time left for it."""
        if self.runs and self._deadline - time.monotonic() < self._longest:
            self.skipped.append(note)
            return None
        if not self._prompt:
            self._prompt = self._prompt_length(choice)
        started = time.monotonic()
        found = self._measure(choice, note, prompt=self._prompt, seconds=0.8)
        self._longest = time.monotonic() - started
        self.runs.append(found)
        self._report(found)
        return found

    def _prompt_length(self, choice: Choice) -> int:
        """As long as the request's, or as what takes a second: the same for all runs, or they could not be compared.
        This run also brings the file into memory."""
        speed = self._measure(choice, "first", prompt=32, seconds=0.1).prompt_tokens_per_s
        return next((length for length in (_PROMPT, 128, 64) if length <= speed * 1.5), 32)

    def _measure(self, choice: Choice, note: str, *, prompt: int, seconds: float) -> TrialResult:
        job = MeasurementJob(
            path=str(self._path),
            threads=choice.threads,
            ubatch=choice.ubatch,
            repack=choice.repack,
            kv_cache_type=choice.kv_cache_type,
            flash_attention=choice.kv_cache_type != "f32",
            prompt=prompt,
            seconds=seconds,
        )
        left = max(_RUN_S if self.runs else _FIRST_S, self._deadline - time.monotonic())
        end = run_child(
            "updraft.local_engine.tuning.measurement", [json.dumps(msgspec.to_builtins(job))], timeout_s=left
        )
        if end.status != "ok" or "error" in end.found:
            return TrialResult(choice, f"{note}: {end.found.get('error') or end.detail or end.status}")
        return _measured(choice, note, msgspec.convert(end.found, Speeds))


def _measured(choice: Choice, note: str, speeds: Speeds) -> TrialResult:
    answer = sorted(speeds.answer)[1:]  # the slowest slice met somebody else
    noise = max((max(each) - min(each)) / statistics.median(each) for each in (answer, speeds.prompt))
    return TrialResult(choice, note, max(speeds.prompt), statistics.median(answer), noise)
