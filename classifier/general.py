"""Trains the general policy: for pairs of a small and a large model that have no policy of their own.

Each published prompt is graded with a small and a large model drawn for it, so that P(gain) is that of such a pair as
people run them. Only a ridge on topics and measures is fitted, for it is small. How little it says of prompts unlike
all it was trained on stands on the card: in `held_out.*` each source is scored by a router trained on the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..protocol.errors import UpdraftError
from . import curve
from .folders import GENERAL_POLICY
from .graded import Columns, GradedRow, read_graded, scores
from .graph_files import sha256
from .metrics import auroc
from .text_fit import Recipe, fit_text_policy
from .text_policy import GENERAL, Source
from .text_router import Labels, fit_router
from .text_rows import featurise

__all__ = ["SOURCES", "Pairs", "drawn", "train"]

_CANDIDATES = {"ridge": ("ridge",)}


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
    one: list[int] = rng.integers(0, len(small), len(small[0])).tolist()
    other: list[int] = rng.integers(0, len(large), len(small[0])).tolist()
    return [
        GradedRow(row.prompt, small[a][i].weak, large[b][i].strong, pairs.file)
        for i, (row, a, b) in enumerate(zip(small[0], one, other, strict=True))
    ]


def train(folder: Path, out: Path, date: str, seed: int = 0) -> dict[str, float]:
    """Write the policy folder `out` from the sources in `folder`; returns the figures of its card."""
    by_source = {pairs.file: drawn(folder, pairs, seed) for pairs in SOURCES}
    rows = [row for found in by_source.values() for row in found]
    recipe = Recipe(
        models={"local": GENERAL, "cloud": GENERAL},
        data=[Source(name, sha256((folder / name).read_bytes()), len(found)) for name, found in by_source.items()],
        grading="published scores of a small and a large model drawn for each prompt",
        date=date,
        seed=seed,
        candidates=_CANDIDATES,
        metrics=_held_out(rows, seed),
    )
    return fit_text_policy(rows, recipe, out).card.metrics


def _held_out(rows: Sequence[GradedRow], seed: int) -> dict[str, float]:
    """Each source by a router that saw none of its prompts, wherever else they stand."""
    features, labels = featurise(rows, "prompt"), Labels(*scores(rows), same=np.array([row.prompt for row in rows]))
    sources, prompts = np.array([row.domain for row in rows]), np.array([row.prompt for row in rows])
    found: dict[str, float] = {}
    for source in dict.fromkeys(sources.tolist()):
        test = np.flatnonzero(sources == source)
        kept = np.flatnonzero(~np.isin(prompts, np.unique(prompts[test])))
        router = fit_router(features.take(kept), labels.take(kept), seed=seed, candidates=_CANDIDATES)
        p_gain, graded = router.probability(features.take(test)), labels.take(test)
        found[f"held_out.{source}.apgr"] = curve.cost_quality(p_gain, graded.weak, graded.strong).apgr
        found[f"held_out.{source}.auroc"] = auroc(p_gain, graded.better)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m updraft.classifier.general", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the published tables")
    parser.add_argument("--out", type=Path, default=GENERAL_POLICY, help="policy folder to write")
    parser.add_argument("--date", default="", help="date to record in the card")
    given = parser.parse_args(arguments)
    try:
        for name, value in train(given.data, given.out, given.date).items():
            print(f"{name:44} {value:.3f}")  # noqa: T201
    except UpdraftError as error:
        parser.exit(2, f"error: {error.message}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
