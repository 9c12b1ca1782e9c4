"""Search for the fastest settings of a model on this machine, by short measurements in subprocesses.

Each setting is varied in turn from the best choice so far. The winner must beat the default again in a second
comparison; differences within the noise change nothing.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
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
from ..runtime.tuned_options import TunedSettings, remember
from ..trial_load import ensure_loadable
from .measurement import MeasurementJob, Speeds

BUDGET_S = 26.0
_PROMPT, _ANSWER = 256, 128  # prompt and answer tokens of the request whose time is compared
_MIN_GAIN = 0.05
_CONTEXT_STEP = 256
_FEWER = (None, 4, 2, 1)  # numbers of concurrent answers to try if memory is short; None: the default
_RUN_S = 4.0  # minimum time limit of a measurement, and the assumed duration of the first measurement
_FIRST_S = 10.0  # minimum time limit for the default settings, whose speed every comparison needs


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete set of settings to measure."""

    threads: int
    repack: bool
    ubatch: int
    kv_cache_type: KvCacheType


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Result of measuring one set of settings."""

    choice: Candidate
    # Purpose of the measurement, or the reason for its failure.
    note: str
    # Tokens per second: for the prompt the faster of two runs, for the answer the median of several short intervals.
    prompt_tokens_per_s: float = 0.0
    answer_tokens_per_s: float = 0.0
    # Relative spread of the prompt speeds or of the answer speeds, whichever is larger.
    noise: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of a request of 256 tokens with an answer of 128; infinite if the measurement failed."""
        if not self.answer_tokens_per_s:
            return float("inf")
        return _PROMPT / self.prompt_tokens_per_s + _ANSWER / self.answer_tokens_per_s

    def beats(self, other: TrialResult) -> bool:
        """Return whether this choice is faster by more than the noise of either result, and by at least 5 %."""
        return self.seconds < other.seconds * (1 - max(_MIN_GAIN, self.noise, other.noise))


@dataclass(frozen=True, slots=True)
class Tuning:
    """Result of a search; `settings` has been saved."""

    settings: TunedSettings
    default: Candidate
    runs: tuple[TrialResult, ...]
    # Share of request time that the winner saves against the default, from the second comparison.
    gain: float
    # Choices that were skipped for lack of time.
    skipped: tuple[str, ...]
    seconds: float


def tune(path: Path, available: int, *, report: Callable[[TrialResult], None] = lambda _: None) -> Tuning:
    """Measure, decide and save the settings, in at most half a minute after a trial load.

    `available`: bytes of memory for the model. Raises ModelLoadError for an unusable file, ModelTooLargeError.
    """
    started, machine, header = time.monotonic(), this_machine(), read_model_header(path)
    fitting = _fitting(path.name, header, available)
    layout = layout_of(header, fitting)
    ensure_loadable(path)
    usual = settled(header, fitting)
    rows = layout_of(header, usual).rows
    default = Candidate(default_threads(header.parameters), usual.repack is True, rows, layout.kv_cache_type)
    search = _Search(path, time.monotonic() + BUDGET_S, report)
    best, gain = _descend(search, default, machine, header)
    settings = TunedSettings(
        threads=None if best.threads == default.threads else best.threads,
        repack=None if best.repack == default.repack else best.repack,
        ubatch=None if best.ubatch == default.ubatch else best.ubatch,
        kv_cache_type=fitting.kv_cache_type,
        max_model_len=fitting.max_model_len,
        max_num_seqs=fitting.max_num_seqs,
    )
    remember(path, settings)
    return Tuning(settings, default, tuple(search.runs), gain, tuple(search.skipped), time.monotonic() - started)


def _fitting(name: str, header: GgufHeader, available: int) -> LocalOptions:
    """Return the default options, or the nearest options that fit into memory. Raises ModelTooLargeError."""
    options = LocalOptions()
    for options in _options_by_memory(header):
        if estimate(header, plan_of(header, options)).total <= available:
            return options
    ensure_fits(name, header, plan_of(header, options), available)
    return options


def _options_by_memory(header: GgufHeader) -> Iterator[LocalOptions]:
    """Yield options that need less and less memory: first a smaller cache type, then fewer concurrent answers, and
    last a smaller context, which would reject longer requests."""
    yield LocalOptions()
    kind: KvCacheType | None = "q8_0" if quantizable(header) else None
    longest = layout_of(header, LocalOptions()).context_length
    for context in (None, *range((longest - 1) // _CONTEXT_STEP * _CONTEXT_STEP, 0, -_CONTEXT_STEP)):
        for running in _FEWER:
            yield LocalOptions(kv_cache_type=kind, max_model_len=context, max_num_seqs=running)


def _descend(search: _Search, default: Candidate, machine: Machine, header: GgufHeader) -> tuple[Candidate, float]:
    """Return the best choice, and the share of time that it saves against the default."""
    first = best = search.run(default, "default")
    if best is None:
        return default, 0.0
    if not best.answer_tokens_per_s:
        raise ModelLoadError(
            f"The default settings cannot be measured: {best.note}. Close other programs that use the processors, "
            "then try again."
        )
    for note, candidates in _candidates(default, machine, header):
        for change in candidates:
            result = search.run(change(best.choice), note)
            if result is not None and result.beats(best):
                best = result
    if best is first:
        return default, 0.0
    baseline, winner = search.run(default, "default again"), search.run(best.choice, "winner again")
    if baseline is None or winner is None or not winner.beats(baseline):
        return default, 0.0
    return winner.choice, 1 - winner.seconds / baseline.seconds


def _candidates(
    default: Candidate, machine: Machine, header: GgufHeader
) -> Iterator[tuple[str, list[Callable[[Candidate], Candidate]]]]:
    """Yield the choices to try, one setting at a time; each changes one field of the best choice so far."""
    numbers = sorted({1, (machine.threads + 1) // 2, machine.threads, machine.processors} - {default.threads})
    yield "threads", [lambda best, number=number: replace(best, threads=number) for number in reversed(numbers)]
    if any(tensor.kind not in (0, 1, 30) for tensor in header.tensors if len(tensor.shape) > 1):
        yield "repack", [lambda best: replace(best, repack=not best.repack)]
    sizes = sorted({512, 128, 64} - {default.ubatch}, reverse=True)
    yield "ubatch", [lambda best, size=size: replace(best, ubatch=size) for size in sizes]


class _Search:
    """Measurements so far, and the time left for more."""

    def __init__(self, path: Path, deadline: float, report: Callable[[TrialResult], None]) -> None:
        self.runs: list[TrialResult] = []
        self.skipped: list[str] = []
        self._path = path
        self._deadline = deadline
        self._report = report
        self._longest = _RUN_S
        self._prompt = 0

    def run(self, choice: Candidate, note: str) -> TrialResult | None:
        """Measure a choice. Return None if too little time is left."""
        if self.runs and self._deadline - time.monotonic() < self._longest:
            self.skipped.append(note)
            return None
        if not self._prompt:
            self._prompt = self._prompt_length(choice)
        started = time.monotonic()
        result = self._measure(choice, note, prompt=self._prompt, seconds=0.8)
        self._longest = time.monotonic() - started
        self.runs.append(result)
        self._report(result)
        return result

    def _prompt_length(self, choice: Candidate) -> int:
        """Return the prompt length for all measurements, shorter on a slow machine.

        A short measurement of the speed decides. The measurement also reads the model file into memory."""
        speed = self._measure(choice, "first", prompt=32, seconds=0.1).prompt_tokens_per_s
        return next((length for length in (_PROMPT, 128, 64) if length <= speed * 1.5), 32)

    def _measure(self, choice: Candidate, note: str, *, prompt: int, seconds: float) -> TrialResult:
        job = MeasurementJob(
            path=str(self._path),
            **asdict(choice),
            flash_attention=choice.kv_cache_type != "f32",
            prompt=prompt,
            seconds=seconds,
        )
        remaining_s = max(_RUN_S if self.runs else _FIRST_S, self._deadline - time.monotonic())
        end = run_child(
            "updraft.local_engine.tuning.measurement", [json.dumps(msgspec.to_builtins(job))], timeout_s=remaining_s
        )
        if end.status != "ok" or "error" in end.result:
            return TrialResult(choice, f"{note}: {end.result.get('error') or end.detail or end.status}")
        return _measured(choice, note, msgspec.convert(end.result, Speeds))


def _measured(choice: Candidate, note: str, speeds: Speeds) -> TrialResult:
    answer = sorted(speeds.answer)[1:]  # drop the slowest interval, which other programs may have disturbed
    noise = max((max(rates) - min(rates)) / statistics.median(rates) for rates in (answer, speeds.prompt))
    return TrialResult(choice, note, max(speeds.prompt), statistics.median(answer), noise)
