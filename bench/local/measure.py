"""`updraft bench local`: the on-device engine and other runners of the same model files, in one run.

Figures with `_over_` divide our speed, seconds or bytes by the peer's. They are medians of rounds that alternate.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from ...local_engine.engine import LocalEngine, LocalOptions
from ...local_engine.machine.machine import default_threads, this_machine
from ...model_files.gguf_reader import read_header
from ...protocol.errors import EngineError
from ...protocol.safety.system import child_environment, python_command
from ...protocol.sampling import SamplingParams
from .gaps import gaps_during_prefill
from .peers import LlamaCppPython, Peer, RawLlama, Setup, has_llama_cpp_server, llama_cpp_server, llama_server
from .shapes import q4_k_m, q8_0

ModelName = Literal["pocket-small", "qwen2.5-0.5b-q8_0", "qwen2.5-0.5b-q4_k_m"]
MODELS: tuple[ModelName, ...] = ("pocket-small", "qwen2.5-0.5b-q8_0", "qwen2.5-0.5b-q4_k_m")
_CONTEXT = 4096
_STREAMS = 8
_LOGPROBS = 5
_PREFIX = 512
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LocalBenchOptions:
    models: tuple[ModelName, ...] = MODELS
    # Tokens of each prompt, and of each answer. Runs with log-probabilities use a quarter of `tokens` and one round,
    # because with log-probabilities peers generate only four tokens a second.
    tokens: int = 64
    rounds: int = 3
    # Maximum seconds of a long prefill during which the gaps of other streams are measured.
    prefill_seconds: float = 30.0
    threads: int | None = None
    llama_server: Path | None = None
    # Folder in which models are built; None: a temporary folder.
    model_dir: Path | None = None


def measure(options: LocalBenchOptions, say: Say) -> dict[str, float]:
    """Return figures named `MODEL.FIGURE`, and the worst value of each FIGURE over the 0.5B files (of pocket-small if
    no 0.5B file is given). Raises ModelLoadError, EngineError, MissingDependencyError."""
    by_model: dict[str, dict[str, float]] = {}
    with _folder(options.model_dir) as folder:
        for name in options.models:
            path = _model(name, folder)
            threads = options.threads or default_threads(read_header(path).parameters)
            say(f"{name}: {path.stat().st_size / 1e6:,.1f} MB, threads: {threads}")
            context = min(_CONTEXT, int(read_header(path).hyperparameter("context_length") or _CONTEXT))
            by_model[name] = _Bench(Setup(path, context, threads), options, say).run()
    large = [figures for name, figures in by_model.items() if name != "pocket-small"]
    headline = worst(large or list(by_model.values()))
    return headline | {f"{name}.{key}": value for name, figures in by_model.items() for key, value in figures.items()}


class OwnEngine:
    """The on-device engine with the interface of `Peer`."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    def answer(self, prompt: str, max_tokens: int, logprobs: int | None = None) -> int:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=logprobs)
        run = self._engine.start_text(prompt, params)
        for _ in run:
            pass
        return len(run.token_ids)


class _Bench:
    """Benchmark of one model file."""

    def __init__(self, setup: Setup, options: LocalBenchOptions, say: Say) -> None:
        self._setup = setup
        self._options = options
        self._say = say
        self._random = random.Random(0)

    def run(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        with self._engine() as engine:
            for part in (self._single, self._streams, partial(self._streams, logprobs=_LOGPROBS), self._prefix):
                figures |= self._described(part(engine))
        for part in (self._gaps, self._start):
            figures |= self._described(part())
        return figures

    def _single(self, engine: LocalEngine) -> dict[str, float]:
        """Compare the decoding speed of one answer with `RawLlama`, and the whole request with `llama_cpp.Llama`."""
        count = self._options.tokens
        over_raw, over_llama, speeds, threads = list[float](), list[float](), list[float](), list[int]()
        with closing(RawLlama(self._setup)) as raw, closing(LlamaCppPython(self._setup)) as llama_cpp:
            for _ in range(2 * self._options.rounds + 1):  # more rounds, to resolve differences of 3 %
                prompt = self._digits(count)
                raw_arrivals = self._raw(engine, raw, [prompt], count)
                params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
                run = partial(engine.start_text, prompt, params)
                arrivals = _arrivals(lambda run=run: _record_threads(threads, engine, run()))
                over_raw.append(_decoding_speed(arrivals) / _decoding_speed(raw_arrivals))
                speeds.append(_decoding_speed(arrivals))
                over_llama.append(count / arrivals[-1] / _speed(llama_cpp, [prompt], count))
        return {
            "single_tokens_per_s": statistics.median(speeds),
            "single_threads": statistics.mean(threads),
            "single_over_raw": statistics.median(over_raw),
            "single_over_llama_cpp": statistics.median(over_llama),
        }

    def _streams(self, engine: LocalEngine, logprobs: int | None = None) -> dict[str, float]:
        """Compare the throughput of all engines with eight concurrent prompts; the engines take turns."""
        name, count, rounds = "streams8", self._options.tokens, self._options.rounds
        if logprobs is not None:
            name, count, rounds = "streams8_logprobs", max(2, count // 4), 1
        engine_speeds: list[float] = []
        over: dict[str, list[float]] = {}
        with ExitStack() as stack:
            speeds: dict[str, Callable[[list[str]], float]] = {
                peer_name: partial(_speed, peer, max_tokens=count, logprobs=logprobs)
                for peer_name, peer in self._servers(stack, logprobs=logprobs is not None).items()
            }
            if logprobs is None:
                raw = stack.enter_context(closing(RawLlama(self._setup, _STREAMS)))
                speeds["raw"] = lambda prompts: len(prompts) * count / self._raw(engine, raw, prompts, count)[-1]
            for _ in range(rounds):
                prompts = [self._digits(count) for _ in range(_STREAMS)]
                engine_speeds.append(_speed(OwnEngine(engine), prompts, count, logprobs))
                for peer_name, speed in speeds.items():
                    over.setdefault(peer_name, []).append(engine_speeds[-1] / speed(prompts))
        return {f"{name}_tokens_per_s": statistics.median(engine_speeds)} | {
            f"{name}_over_{peer_name}": statistics.median(ratios) for peer_name, ratios in over.items()
        }

    def _raw(self, engine: LocalEngine, raw: RawLlama, prompts: Sequence[str], count: int) -> list[float]:
        return _arrivals(lambda: raw.steps([engine.encode(prompt) for prompt in prompts], count))

    def _servers(self, stack: ExitStack, *, logprobs: bool) -> dict[str, Peer]:
        """Return the available servers. If llama-cpp-python's server is missing, a `Llama` with a lock replaces it."""
        servers: dict[str, Peer] = {}
        if has_llama_cpp_server():
            servers["llama_cpp_server"] = stack.enter_context(llama_cpp_server(self._setup, logprobs=logprobs))
        else:
            self._say("llama_cpp.server is missing (pip install '.[bench]' in a clone): using one locked Llama")
            locked = stack.enter_context(closing(LlamaCppPython(self._setup, logprobs=logprobs)))
            servers["locked_llama_cpp"] = locked
        if self._options.llama_server is not None:
            server = llama_server(self._options.llama_server, self._setup, _STREAMS)
            servers["llama_server"] = stack.enter_context(server)
        return servers

    def _prefix(self, engine: LocalEngine) -> dict[str, float]:
        """Return the time to the first token after a cached prefix, over the time with a new prefix."""
        length = min(_PREFIX, self._setup.context_length - 64)
        params = SamplingParams(max_tokens=1, temperature=0)
        cold: list[float] = []
        warm: list[float] = []
        for _ in range(self._options.rounds):
            prefix = self._digits(length)
            for times in (cold, warm):
                prompt = prefix + self._digits(16)
                times.append(_arrivals(lambda prompt=prompt: engine.start_text(prompt, params))[0])
        return {
            "cold_ttft_s": statistics.median(cold),
            "warm_over_cold_ttft": statistics.median(b / a for a, b in zip(cold, warm, strict=True)),
        }

    def _gaps(self) -> dict[str, float]:
        """Measure the gaps of three streams during the prefill of a long prompt: a quarter of an enlarged context."""
        trained = int(read_header(self._setup.path).hyperparameter("context_length") or _CONTEXT)
        setup = replace(self._setup, context_length=min(4 * _CONTEXT, trained))
        with self._engine(setup) as engine:
            return gaps_during_prefill(engine, self._digits(setup.context_length // 4), self._options.prefill_seconds)

    def _start(self) -> dict[str, float]:
        """Measure start time and memory of fresh processes, while the model file is in the page cache."""
        starts = [first for first, _ in (self._child(weigh=False) for _ in range(3))]
        _, held = self._child(weigh=True)
        return {"first_token_s": statistics.median(starts), "memory_over_file": held / self._setup.path.stat().st_size}

    def _child(self, *, weigh: bool) -> tuple[float, int]:
        """Return the seconds to a process's first token, and, with `weigh`, its memory in bytes with a full context."""
        setup = self._setup
        command = python_command("-m", f"{__package__}.start", str(setup.path))
        command += [str(setup.context_length), str(setup.threads)]
        started = time.perf_counter()
        with subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None, "Popen creates a pipe for PIPE"
            first = process.stdout.readline().strip()
            seconds = time.perf_counter() - started
            held = process.stdout.readline().strip() if weigh else "0"
            process.kill()
        if first != "first token" or not held:
            raise EngineError(f"{' '.join(command)} exited without a token")
        return seconds, int(held)

    def _engine(self, setup: Setup | None = None) -> LocalEngine:
        setup = setup or self._setup
        options = LocalOptions(max_model_len=setup.context_length, threads=setup.threads, kv_cache_type="f16")
        return LocalEngine.load(setup.path, options)

    def _digits(self, count: int) -> str:
        """Return a new prompt of `count` tokens: in these vocabularies each digit is one token."""
        return "".join(self._random.choices("0123456789", k=count))

    def _described(self, figures: dict[str, float]) -> dict[str, float]:
        self._say("  " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
        return figures


def _arrivals(start: Callable[[], Iterable[object]]) -> list[float]:
    """Return the seconds from the call of `start` to each token."""
    began = time.perf_counter()
    return [time.perf_counter() - began for _ in start()]


def _record_threads(threads: list[int], engine: LocalEngine, run: Iterable[object]) -> Iterator[object]:
    """Yield the tokens of `run`; append to `threads` the number of threads that computed each token."""
    for token in run:
        threads.append(engine.threads)
        yield token


def _decoding_speed(arrivals: Sequence[float]) -> float:
    """Return tokens per second after the first token."""
    return (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])


def _speed(peer: Peer, prompts: Sequence[str], max_tokens: int, logprobs: int | None = None) -> float:
    """Return tokens per second of all answers, requested at once, from the first request to the last answer."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        began = time.perf_counter()
        written = sum(pool.map(lambda prompt: peer.answer(prompt, max_tokens, logprobs), prompts))
        return written / (time.perf_counter() - began)


def worst(by_model: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the least favourable value of each figure: the lowest speed, the highest time or size."""
    return {
        name: (min if name.startswith(("single_", "streams8_")) else max)(figures[name] for figures in by_model)
        for name in by_model[0]
    }


@contextmanager
def _folder(model_dir: Path | None) -> Iterator[Path]:
    if model_dir is None:
        with tempfile.TemporaryDirectory(prefix="updraft-bench-") as temporary:
            yield Path(temporary)
    else:
        model_dir.mkdir(parents=True, exist_ok=True)
        yield model_dir


def _model(name: ModelName, folder: Path) -> Path:
    if name == "pocket-small":
        from ...embedded.pocket import pocket_small_gguf

        return pocket_small_gguf()
    source = q8_0(folder / "qwen2.5-0.5b-q8_0.gguf")
    if name == "qwen2.5-0.5b-q8_0":
        return source
    return q4_k_m(folder / f"{name}.gguf", source, this_machine().threads)
