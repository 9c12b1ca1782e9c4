"""The same requests for every engine: lengths from real conversations, random tokens."""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from pathlib import Path

from ...protocol.errors import ConfigurationError
from ...protocol.unicode_forms import text_lines

#: Numbers of (prompt, output) tokens to use without a trace file; their quartiles are those of public conversations.
_BUILT_IN = ((374, 44), (396, 109), (91, 16), (1036, 241), (23, 309), (928, 172), (257, 94), (1131, 8), (612, 212))


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request: prompt token ids, and the exact number of tokens to generate."""

    prompt: list[int]
    output: int


@dataclass(frozen=True, slots=True)
class Workload:
    """`count` sampled requests with capped lengths, from `trace` (CSV with ContextTokens and GeneratedTokens)."""

    count: int = 256
    max_prompt: int = 512
    max_output: int = 128
    seed: int = 0
    trace: Path | None = None


def draw(workload: Workload, vocab_size: int) -> list[WorkloadRequest]:
    """Draw the requests of a workload. Raises ConfigurationError if the trace cannot be used."""
    rng = random.Random(workload.seed)
    lengths = _lengths(workload.trace) if workload.trace else list(_BUILT_IN)
    return [
        WorkloadRequest(
            [rng.randrange(vocab_size) for _ in range(max(1, min(prompt, workload.max_prompt)))],
            max(1, min(output, workload.max_output)),
        )
        for prompt, output in (rng.choice(lengths) for _ in range(workload.count))
    ]


def _lengths(trace: Path) -> list[tuple[int, int]]:
    try:
        with trace.open("rb") as file:
            table = csv.DictReader(text_lines(file, trace, ConfigurationError))
            rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in table]
    except (OSError, KeyError, ValueError) as error:
        raise ConfigurationError(f"{trace} is not a trace with ContextTokens and GeneratedTokens: {error}") from error
    if not rows:
        raise ConfigurationError(f"{trace} holds no requests: choose another trace.")
    return rows
