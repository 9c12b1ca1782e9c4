"""Peers that a Python user would otherwise run: transformers with static batches and with continuous batching."""

# transformers is only partly typed
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..shared.workload import WorkloadRequest

_BLOCK, _SPARE_BLOCKS = 256, 16  # tokens per block of transformers' cache
_BATCH_TOKENS = 8192


def load(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """Load the model that every peer runs."""
    import transformers

    transformers.logging.set_verbosity_error()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval().to(device)


def random(shape: Mapping[str, Any], dtype: torch.dtype, device: str) -> Any:
    """Create a model with random weights on `device`, without a file. `shape` is a Hugging Face configuration."""
    import transformers

    transformers.logging.set_verbosity_error()
    kind = transformers.AutoConfig.for_model(**shape)
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(kind, dtype=dtype)
    return model.eval()


def static_batches(model: Any, requests: Sequence[WorkloadRequest], batch_size: int) -> float:
    """Return the seconds for all requests in static batches, filled in order of arrival."""
    import transformers

    started = time.perf_counter()
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        width = max(len(request.prompt) for request in batch)
        ids = torch.tensor([[0] * (width - len(request.prompt)) + request.prompt for request in batch]).to(model.device)
        mask = torch.tensor([[0] * (width - len(request.prompt)) + [1] * len(request.prompt) for request in batch])
        longest = max(request.output for request in batch)
        config = transformers.GenerationConfig(
            max_new_tokens=longest, min_new_tokens=longest, do_sample=False, pad_token_id=0
        )
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask.to(model.device), generation_config=config)
    return time.perf_counter() - started


def continuous_batching(
    model: Any, requests: Sequence[WorkloadRequest], num_blocks: int, max_batch_tokens: int
) -> float:
    """Return the seconds for all requests with transformers' continuous batching, after a warm-up."""
    import transformers
    from transformers import ContinuousBatchingConfig

    config = ContinuousBatchingConfig(num_blocks=num_blocks, max_batch_tokens=max_batch_tokens)
    generation = transformers.GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, block=True, timeout=60
    ) as manager:
        _run(manager, requests[:4])
        started = time.perf_counter()
        _run(manager, requests)
        return time.perf_counter() - started


def continuous_batch(model: Any, requests: Sequence[WorkloadRequest]) -> float:
    """Return the seconds of continuous batching if all requests fit in the cache and run at once."""
    blocks = sum(-(-(len(request.prompt) + request.output) // _BLOCK) for request in requests)
    return continuous_batching(model, requests, blocks + _SPARE_BLOCKS, _BATCH_TOKENS)


def _run(manager: Any, requests: Sequence[WorkloadRequest]) -> None:
    for request in requests:
        manager.add_request(request.prompt, max_new_tokens=request.output, eos_token_id=-1)
    finished = 0
    while finished < len(requests):
        result = manager.get_result(timeout=60)
        if result is None:
            raise RuntimeError("transformers' continuous batching stopped answering")
        if result.error is not None:
            raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
        finished += bool(result.is_finished())
