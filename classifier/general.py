"""Trains the general policy: for pairs of a small and a large model that have no policy of their own.

Each published prompt is graded with a small and a large model drawn for it, so that P(gain) is that of such a pair as
people run them. Only a ridge on topics and measures is fitted: it is small, and what it learns carries over to sources
that it has not seen at least as well as a forest does (`held_out.*` on the card: each source scored by a router trained
on the others).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..protocol.errors import InvalidRequestError, UpdraftError
from . import curve
from .graded import Columns, GradedRow, gains, read_graded, scores
from .graph_files import sha256
from .metrics import auroc
from .text_fit import Recipe, fit_text_policy
from .text_policy import GENERAL, Source
from .text_router import Labels, fit_router
from .text_rows import featurise

__all__ = ["SOURCES", "Pairs", "drawn"]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A file's columns of small and of large models."""

    file: str
    small: tuple[str, ...]
    large: tuple[str, ...]


_ZEROEVAL_SMALL = ("Meta-Llama-3-8B-Instruct", "Meta-Llama-3.1-8B-Instruct", "Qwen2-7B-Instruct", "Yi-1.5-9B-Chat")
_ZEROEVAL_LARGE = ("Meta-Llama-3-70B-Instruct", "Meta-Llama-3.1-70B-Instruct", "Qwen2-72B-Instruct", "Mistral-Large-2")
_GEMMA = ("gemma-2-9b-it", "gemma-2-2b-it", "Phi-3.5-mini-instruct")
_QWEN25 = ("Qwen2.5-7B-Instruct", "Qwen2.5-3B-Instruct")
SOURCES = (
    Pairs("routellm_mmlu.csv.gz", ("weak",), ("strong",)),
    Pairs("routellm_gsm8k.csv.gz", ("weak",), ("strong",)),
    Pairs(
        "mmlu_pro.csv.gz",
        (
            "Meta-Llama-3_1-8B-Instruct",
            "Mistral-7B-Instruct-v0.2",
            "Phi-3-mini-4k-instruct",
            "gemma-7b",
            "mathstral-7B",
        ),
        ("Meta-Llama-3_1-70B-Instruct", "Meta-Llama-3-70B", "Qwen1.5-110B", "jamba-1.5-large"),
    ),
    Pairs("zeroeval_gsm.csv.gz", (*_ZEROEVAL_SMALL, *_GEMMA), (*_ZEROEVAL_LARGE, "gpt-4o-2024-08-06")),
    Pairs("zeroeval_math-l5.csv.gz", (*_ZEROEVAL_SMALL, *_GEMMA, *_QWEN25), (*_ZEROEVAL_LARGE, "Qwen2.5-72B-Instruct")),
    Pairs("zeroeval_crux.csv.gz", (*_ZEROEVAL_SMALL, *_GEMMA, *_QWEN25), (*_ZEROEVAL_LARGE, "Qwen2.5-72B-Instruct")),
    Pairs(
        "llmrouter_ulab_9model.csv.gz",
        ("qwen2.5-7b-instruct", "mistral-7b-instruct-v0.3", "gemma-2-9b-it", "llama-3.1-8b-instruct", "codegemma-7b"),
        ("llama-3.1-nemotron-51b-instruct", "llama-3.3-nemotron-super-49b-v1"),
    ),
)


def drawn(folder: Path, pairs: Pairs, seed: int) -> list[GradedRow]:
    """Each prompt of a file once, scored by a small and a large model drawn for it. Raises InvalidRequestError."""
    path = folder / pairs.file
    small = [read_graded(path, Columns(name, name)) for name in pairs.small]
    large = [read_graded(path, Columns(name, name)) for name in pairs.large]
    rng = np.random.default_rng(seed)
    one, other = rng.integers(0, len(small), len(small[0])), rng.integers(0, len(large), len(small[0]))
    return [
        GradedRow(row.prompt, small[a][i].weak, large[b][i].strong, pairs.file)
        for i, (row, a, b) in enumerate(zip(small[0], one, other, strict=True))
    ]
