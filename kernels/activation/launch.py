"""How the Triton kernel of gated activations is launched: a plain function, without Triton or a device."""

from __future__ import annotations

from ..runtime.launch import Launch, launch_for


def gated_activation_launch(size: int, gpu_name: str) -> Launch:
    """BLOCK elements of one row in a program: two accesses of 16 bytes a thread in each half, of two-byte elements."""
    heuristic = Launch(num_warps=4, tiles={"BLOCK": 2048 if size >= 2048 else 1024})
    return launch_for("gated", str(size), gpu_name, heuristic)
