"""Speed of a model on two ranks over its speed in one process, on the same processors (tensor parallelism)."""

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

_PREFILL, _DECODE = 512, 24
_WEIGHTS = ("config.json", "model.safetensors")


def rank_figures(folder: Path, dtype: Literal["float32", "bfloat16"], rounds: int = 5) -> dict[str, float]:
    """Return the speed of two ranks over that of one process, for one request: medians of `rounds` alternating pairs.

    A prompt of `_PREFILL` tokens, or as long as the model allows, and an answer to a short prompt are measured apart.
    """
    return asyncio.run(_figures(folder, dtype, rounds))


async def _figures(folder: Path, dtype: Literal["float32", "bfloat16"], rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as linked, ExitStack() as stack:
        _link(folder, Path(linked))
        engines: list[EngineProcess] = []
        for ranks in (1, 2):
            config = EngineConfig(
                max_num_seqs=1,
                max_num_batched_tokens=_PREFILL,
                dtype=dtype,
                enable_prefix_caching=False,
                draft_length="fixed",
                tensor_parallel=ranks,
            )
            engines.append(stack.enter_context(EngineProcess(Load(linked, None, config))))
            most = engines[-1].wait_ready().context_length
            await engines[-1].start()
        prefill, decode = list[float](), list[float]()
        prompt = [1] * min(_PREFILL, most - _DECODE)
        for number in range(rounds + 1):  # the first round warms up
            one, two = [await _seconds(engine, number, prompt) for engine in engines]
            prefill.append(one[0] / two[0])
            decode.append(one[1] / two[1])
        for engine in engines:
            await engine.close()
    return {
        "prefill_two_ranks_over_one": statistics.median(prefill[1:]),
        "decode_two_ranks_over_one": statistics.median(decode[1:]),
    }


async def _seconds(engine: EngineProcess, number: int, prompt: list[int]) -> tuple[float, float]:
    """Return the seconds of a long prompt, and of an answer without its first token."""
    started = time.perf_counter()
    await _answer(engine, f"prompt-{number}", prompt, 1)
    prefill_s = time.perf_counter() - started
    first, last = await _answer(engine, f"answer-{number}", [1] * 8, _DECODE)
    return prefill_s, last - first


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
