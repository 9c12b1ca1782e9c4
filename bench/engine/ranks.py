"""Speed of a model on two ranks over its speed in one process, on the same processors."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from ...cloud_engine.engine.config import EngineConfig
from ...cloud_engine.engine.process.engine_process import EngineProcess
from ...cloud_engine.engine.process.messages import Load
from ...cloud_engine.engine.types.request import GenerationRequest
from ...embedded import pocket
from ...protocol.sampling import SamplingParams

_PREFILL, _DECODE, _BATCH = 512, 24, 8
#: Ranks per stage and stages, by the name in the figures.
_LAYOUTS = {"one": (1, 1), "tensor": (2, 1), "pipeline": (1, 2)}
_WEIGHTS = ("config.json", "model.safetensors")


def rank_figures(folder: Path, dtype: Literal["float32", "bfloat16"], rounds: int = 5) -> dict[str, float]:
    """Return the speed of two ranks over that of one process: medians of `rounds`, in which all take turns.

    Measured are a prompt of `_PREFILL` tokens, or as long as the model allows, and answers to one and to `_BATCH` short
    prompts.
    """
    return asyncio.run(_figures(folder, dtype, rounds))


async def _figures(folder: Path, dtype: Literal["float32", "bfloat16"], rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as linked, ExitStack() as stack:
        _link(folder, Path(linked))
        engines: dict[str, EngineProcess] = {}
        context = _PREFILL + _DECODE
        for name, (tensor, stages) in _LAYOUTS.items():
            config = EngineConfig(
                max_num_seqs=_BATCH,
                max_num_batched_tokens=_PREFILL,
                dtype=dtype,
                enable_prefix_caching=False,
                draft_length="fixed",
                tensor_parallel=tensor,
                pipeline_parallel=stages,
            )
            engines[name] = engine = stack.enter_context(EngineProcess(Load(linked, None, config)))
            context = engine.wait_ready().context_length
            await engine.start()
        prompt = [1] * min(_PREFILL, context - _DECODE)
        ratios: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            seconds = {name: await _seconds(engine, number, prompt) for name, engine in engines.items()}
            for name in list(_LAYOUTS)[1:]:
                for what, taken in seconds[name].items():
                    ratios.setdefault(f"{what}_{name}_over_one", []).append(seconds["one"][what] / taken)
        for engine in engines.values():
            await engine.close()
    return {name: statistics.median(values[1:]) for name, values in ratios.items()}  # the first round warms up


async def _seconds(engine: EngineProcess, number: int, prompt: list[int]) -> dict[str, float]:
    """Return the seconds of a long prompt, and of answers without their first tokens."""
    started = time.perf_counter()
    await _answer(engine, f"prompt-{number}", prompt, 1)
    taken = {"prefill": time.perf_counter() - started}
    for batch in (1, _BATCH):
        names = [f"answer-{number}-{batch}-{index}" for index in range(batch)]
        times = await asyncio.gather(*(_answer(engine, name, [1] * 8, _DECODE) for name in names))
        taken[f"decode{batch}"] = max(last for _, last in times) - max(first for first, _ in times)
    return taken


async def _answer(engine: EngineProcess, name: str, prompt: list[int], max_tokens: int) -> tuple[float, float]:
    """Return the times of the first and of the last token."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    times = [time.perf_counter() async for _ in engine.generate(GenerationRequest(name, prompt, params))]
    return times[0], times[-1]


def _link(folder: Path, target: Path) -> None:
    """Link a model's weights, with the tokenizer of another model, because random models have none."""
    for name in _WEIGHTS:
        (target / name).symlink_to((folder / name).resolve())
    for path in pocket.pocket_large_folder().iterdir():
        if path.name not in _WEIGHTS:
            (target / path.name).symlink_to(path)
