"""How a kernel is launched: tile sizes, warps and stages, from measurements of this GPU or from a heuristic.

Measured choices are kept in `kernels/tuned/<GPU name>.json`: {kernel: {key: {"num_warps": ..., "tiles": {...}}}}. What
a key means is the kernel's own business; it is made by a plain function beside the kernel.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TUNED = Path(__file__).parent / "tuned"


@dataclass(frozen=True, slots=True)
class Launch:
    """`tiles` are the kernel's constexpr arguments that are a matter of speed alone, by name."""

    num_warps: int = 4
    num_stages: int = 2
    tiles: Mapping[str, int] = field(default_factory=dict[str, int])


@functools.cache
def tuned(kernel: str, gpu_name: str) -> Mapping[str, Launch]:
    """The launches measured for `kernel` on a GPU (`torch.cuda.get_device_name()`), by key; empty if there are none."""
    path = _TUNED / f"{file_name(gpu_name)}.json"
    if not path.is_file():
        return {}
    entries: Mapping[str, Mapping[str, Any]] = json.loads(path.read_text()).get(kernel, {})
    return {key: Launch(**entry) for key, entry in entries.items()}


def file_name(gpu_name: str) -> str:
    """`NVIDIA H200` to `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", gpu_name.lower()).strip("-")
