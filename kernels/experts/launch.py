"""Launch parameters of products with experts: plain functions, without Triton or a device."""

from __future__ import annotations

from dataclasses import replace

from ..linear.launch import matmul_launch
from ..runtime.launch import Launch
from ..runtime.numeric import cdiv

_MASKED_STEP = 32  # inputs per step if no step divides the inputs


def expert_launch(pairs: int, experts: int, inputs: int, element_bytes: int) -> Launch:
    """Return the launch for `pairs` rows that are spread over `experts`, with tiles for an expert's mean share."""
    launch = matmul_launch(cdiv(pairs, experts))
    longest = 128 if launch.tiles["BLOCK_TOKENS"] <= 16 else 64
    if element_bytes == 4:  # without tensor cores, products need more registers
        launch, longest = Launch(num_stages=2, tiles={"BLOCK_FEATURES": 32, "BLOCK_TOKENS": 16}), 32
    step = next((step for step in (128, 64, 32, 16) if step <= longest and inputs % step == 0), _MASKED_STEP)
    return replace(launch, tiles={**launch.tiles, "BLOCK_INPUTS": step})


def num_tiles(pairs: int, experts: int, launch: Launch) -> int:
    """Return the maximum number of tiles of pairs: the last tile of each expert may be partly empty."""
    return min(pairs, experts) + pairs // launch.tiles["BLOCK_TOKENS"]
