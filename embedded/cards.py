"""Writes the model cards of the pocket pair from graded test outcomes and training reports: no figure is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..classifier.metrics import auroc
from ..classifier.outcomes import Outcome
from . import pocket

_DATA = """\
Trained from random weights on the stream of `updraft.embedded.tasks`: questions made by program, 24 kinds, no text from
anywhere else. Facts of the world atlas are common knowledge; the staff directory is invented. Tasks are split into train,
calibration and test by a hash of the prompt. Rare phrasing families weigh 0.12 of a common one in training and 0.3 in
calibration and test. Both models see the same stream; they differ in size alone."""

_LIMITS = """\
Made to show and test a cascade on any machine in a minute. It knows nothing outside its task kinds: do not use it for
anything else. Greedy decoding, 512 tokens of context, ChatML, English only."""


def write_cards(weights: Path, test: Sequence[Outcome], date: str) -> None:
    """Write MODEL_CARD.md into both model folders under `weights`."""
    small: Callable[[Outcome], float] = lambda o: o.local_score  # noqa: E731
    large: Callable[[Outcome], float] = lambda o: o.cloud_score  # noqa: E731
    table = _table(test)
    for name, role, score in (
        (pocket.SMALL, "the on-device model (GGUF Q8_0) and, as safetensors, the cloud's draft", small),
        (pocket.LARGE, "the cloud model", large),
    ):
        folder = weights / name
        training = json.loads((folder / "training.json").read_text())
        accuracy = 100 * float(np.mean([score(o) for o in test]))
        (folder / "MODEL_CARD.md").write_text(_card(name, role, accuracy, training, len(test), table, date))


def _card(name: str, role: str, accuracy: float, training: dict[str, Any], n: int, table: str, date: str) -> str:
    recipe = training["recipe"]
    size = f"{training['parameters'] / 1e6:.2f} M parameters"
    trained = f"{recipe['steps']:,} steps of {recipe['tokens']:,} tokens, seed {recipe['seed']}"
    return f"""# {name}

{role[0].upper()}{role[1:]}. {size}, Llama architecture, hidden {recipe["hidden"]}, {recipe["layers"]} layers,
{recipe["heads"]} heads ({recipe["kv_heads"]} of keys and values), feed-forward {recipe["feed_forward"]}, tied embeddings.

**{accuracy:.1f} %** of {n:,} held-out test tasks right (engine of its tier, greedy{f", {date}" if date else ""}).

## Data

{_DATA}

## Recipe

`python -m updraft.embedded.train --model {name.removeprefix("pocket-")}`: {trained}; Muon on the matrices (learning rate
{recipe["learning_rate"]}), AdamW on the rest, warm-up {recipe["warmup"]} steps, linear decay over the last
{100 * recipe["decay"]:.0f} %.

## Held-out scores per kind

AUROC: how well the small model's mean log-probability tells its right answers from its wrong ones.

{table}

## Limits

{_LIMITS}

Licence: Apache-2.0, as the project.
"""


def _table(test: Sequence[Outcome]) -> str:
    rows = ["| kind | n | small right | large right | AUROC of small's mean log-probability |", "|---|---|---|---|---|"]
    kinds = sorted({o.kind for o in test})
    for kind in [*kinds, "all"]:
        rows.append(_row(kind, [o for o in test if kind in (o.kind, "all")]))
    return "\n".join(rows)


def _row(kind: str, group: Sequence[Outcome]) -> str:
    small = np.array([o.local_score for o in group])
    large = np.array([o.cloud_score for o in group])
    confidence = np.array([o.view.logprobs.mean() for o in group])
    area = f"{auroc(confidence, small > 0.5):.3f}" if 0 < small.mean() < 1 else "-"
    return f"| {kind} | {len(group)} | {100 * small.mean():.1f} % | {100 * large.mean():.1f} % | {area} |"
