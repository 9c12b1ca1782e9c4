"""Host time of engine steps: a device that answers at once leaves only the work of the engine's process.

Times are processor time, which other processes hardly change.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...cloud_engine.engine.config import EngineConfig
from ...cloud_engine.engine.engine import Engine
from ...cloud_engine.engine.process.messages import OutputReport
from ...cloud_engine.engine.types.request import GenerationRequest
from ...cloud_engine.engine.worker.launched_step import UnreadInputs
from ...cloud_engine.engine.worker.model_runner import ForwardBatch
from ...cloud_engine.engine.worker.served_model import ServedModel
from ...protocol.sampling import SamplingParams
from .scheduling import VOCABULARY, smallest_model

#: Numbers of sequences and their tokens of context.
ROWS, CONTEXTS = (1, 64, 256), (1024, 8192, 32_768)
_STEPS, _WARM_UP = 60, 8
_TOKEN = VOCABULARY - 1  # the token that the device answers
_PREDICTED = [*[_TOKEN] * 4, 0]  # repeated in predictions, so that half of the tokens that a step verifies are wrong
_TOKENS_PER_STEP = 5
#: Of 100 sequences, 10 have a prediction, 5 a penalty, and 5 report log-probabilities.
PREDICTION, PENALTY, LOGPROBS = range(10), range(10, 15), range(15, 20)


class _InstantRunner:
    """A runner that prepares the arrays of a step, as a model's attention needs them, but computes nothing."""

    runs_ahead = False

    def __init__(self) -> None:
        self._logits = torch.zeros(8192, VOCABULARY)
        self._logits[:, _TOKEN] = 9.0
        self.prepare_s = 0.0

    def compute(self, batch: ForwardBatch, _unread: UnreadInputs | None = None) -> Tensor:
        started = time.thread_time()
        batch.sequences.positions()
        batch.sequences.slots()
        self.prepare_s += time.thread_time() - started
        return self._logits[: len(batch.token_ids if batch.logit_rows is None else batch.logit_rows)]


def host_figures(
    rows: Sequence[int], contexts: Sequence[int], say: Callable[[str], None], steps: int = _STEPS
) -> dict[str, float]:
    """Return the microseconds of a step, for plain and for mixed batches of all sizes and contexts. Says the phases."""
    figures, threads = dict[str, float](), torch.get_num_threads()
    torch.set_num_threads(1)  # threads speed up models, not the host's small arrays
    for size in rows:
        for context in contexts:
            for kind in ("plain", "mixed"):
                phases = step_phases(size, context, is_mixed=kind == "mixed", steps=steps)
                figures[f"host_us_{kind}_{size}x{context}"] = sum(phases.values())
                shares = ", ".join(f"{phase} {value:.0f}" for phase, value in phases.items())
                say(f"{kind}, {size} sequences of {context} tokens: {sum(phases.values()):.0f} us ({shares})")
    torch.set_num_threads(threads)
    return figures


def scheduler_microseconds(sequences: int = 256) -> float:
    """Return the microseconds of a plain step outside the worker."""
    phases = step_phases(sequences, 32, is_mixed=False)
    return sum(phases[phase] for phase in ("schedule", "plan", "process", "other"))


def step_phases(rows: int, context: int, *, is_mixed: bool, steps: int = _STEPS) -> dict[str, float]:
    """Return the microseconds of a step in which every sequence decodes, by phase, as medians over `steps`.

    `encode` and `report` include what a message between processes costs. `other` is the remaining time of the engine.
    """
    engine, runner = _engine(rows, context, is_mixed=is_mixed, steps=steps)
    taken: dict[str, list[float]] = {}
    made: dict[str, Any] = {}  # results of the phases of the last step

    def timed(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            before, started = runner.prepare_s, time.thread_time()
            made[phase] = result = call(*args)
            taken.setdefault(phase, []).append(time.thread_time() - started - (runner.prepare_s - before))
            return result

        return wrapped

    scheduler, worker, outputs = engine._scheduler, engine._worker, engine._outputs
    for part, name, phase in (
        (scheduler, "schedule", "schedule"),
        (scheduler, "plan", "plan"),
        (worker, "launch", "launch"),
        (worker, "sample", "sample"),
        (worker, "read", "result"),
        (outputs, "process", "process"),
    ):
        setattr(part, name, timed(phase, getattr(part, name)))
    encoder = msgspec.msgpack.Encoder()
    encode = timed("encode", encoder.encode)
    report = timed("report", lambda output: encoder.encode(OutputReport([output], engine.stats())))
    step_s, prepare_s = list[float](), list[float]()
    gc.collect()
    gc.freeze()  # as a deployed engine does
    for _ in range(steps):
        before, started = runner.prepare_s, time.thread_time()
        output = engine.step()
        step_s.append(time.thread_time() - started)
        prepare_s.append(runner.prepare_s - before)
        encode(made["plan"])
        report(output)
    gc.unfreeze()
    phases = {phase: 1e6 * statistics.median(values) for phase, values in taken.items()}
    phases["prepare"] = 1e6 * statistics.median(prepare_s)
    outside = phases["encode"] + phases["report"]
    return phases | {"other": max(0.0, 1e6 * statistics.median(step_s) + outside - sum(phases.values()))}


def _engine(rows: int, context: int, *, is_mixed: bool, steps: int) -> tuple[Engine, _InstantRunner]:
    """Return an engine whose `rows` sequences have computed their prompts, and its device."""
    size = 16
    most = _TOKENS_PER_STEP * (steps + 2 * _WARM_UP)
    tokens = context + most + size
    config = EngineConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=rows * context + 1,
        max_waiting=rows,
        num_gpu_blocks_override=rows * (tokens // size + 1),
        block_size=size,
        draft_length="fixed",
        enable_prefix_caching=False,
    )
    engine = Engine(ServedModel(smallest_model(tokens)), config)
    runner = _InstantRunner()
    engine._worker.runner = runner  # type: ignore[assignment]
    for number in range(rows):
        share = 100 * number // rows if is_mixed else 100
        params = SamplingParams(
            temperature=0.0,
            max_tokens=most,
            ignore_eos=True,
            repetition_detection=False,
            frequency_penalty=0.5 if share in PENALTY else 0.0,
            logprobs=1 if share in LOGPROBS else None,
        )
        prediction = _PREDICTED * (2 * steps) if share in PREDICTION else []
        engine.add_request(GenerationRequest(str(number), [number % VOCABULARY] * context, params, prediction))
    for _ in range(_WARM_UP):
        engine.step()
    return engine, runner
