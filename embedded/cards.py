"""Writes the model cards of the pocket pair from graded test outcomes and training reports: no figure is typed in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..classifier.metrics import auroc
from ..classifier.outcomes import Outcome
from . import pocket
from .kinds import KINDS
from .tasks import RARE_WEIGHT

_DATA = f"""\
Trained from random weights on the stream of `updraft.embedded.tasks`: questions made by program, {len(KINDS)} kinds, no
text from anywhere else. Facts of the world atlas are common knowledge. Tasks are split into train, calibration and test
by a hash of the prompt. A rare phrasing family weighs {RARE_WEIGHT["train"]} of a common one in training,
{RARE_WEIGHT["test"]} in calibration and test.

pocket-large had a first stage on a wider suite and was then right on 80 % of 720 calibration tasks; three kinds it
had hardly learned (stock, points, variables: 13 to 30 %) and number sequences (73 %) were then dropped, and its second
stage and all of pocket-small's training are on the {len(KINDS)} kinds above. pocket-small saw fewer tokens.
Its size is a choice too: one of 0.72 M parameters was right on 75 % of that wider suite, so a smaller one ships, and
the gap below is in part a selected one."""

_LIMITS = """\
Made to show and test a cascade on any machine in a minute. It knows nothing outside its task kinds: do not use it for
anything else. Greedy decoding, 512 tokens of context, ChatML, English only."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """What a card is about: the model, what it is for, and how a graded outcome scores it."""

    name: str
    role: str
    score: Callable[[Outcome], float]


_SUBJECTS = (
    _Subject(
        pocket.SMALL,
        "The on-device model (GGUF Q8_0) and, as safetensors, the cloud's draft",
        lambda outcome: outcome.local_score,
    ),
    _Subject(pocket.LARGE, "The cloud model", lambda outcome: outcome.cloud_score),
)


def write_cards(weights: Path, test: Sequence[Outcome], date: str) -> None:
    """Write MODEL_CARD.md into both model folders under `weights`."""
    table = _table(test)
    for subject in _SUBJECTS:
        folder = weights / subject.name
        training = json.loads((folder / "training.json").read_text())
        accuracy = 100 * float(np.mean([subject.score(outcome) for outcome in test]))
        measured = f"**{accuracy:.1f} %** of {len(test):,} held-out test tasks right, greedy, in the engine of its tier"
        text = _card(subject, training, f"{measured} ({date})." if date else f"{measured}.", table)
        (folder / "MODEL_CARD.md").write_text(text)


def _card(subject: _Subject, training: dict[str, Any], measured: str, table: str) -> str:
    recipe = training["recipe"]
    size = f"{training['parameters'] / 1e6:.2f} M parameters"
    return f"""# {subject.name}

{subject.role}. {size}, Llama architecture, hidden {recipe["hidden"]}, {recipe["layers"]} layers,
{recipe["heads"]} heads ({recipe["kv_heads"]} of keys and values), feed-forward {recipe["feed_forward"]}, tied
embeddings.

{measured}

## Data

{_DATA}

## Recipe

{_stages(training)}

## Held-out scores per kind

AUROC: how well the small model's mean log-probability tells its right answers from its wrong ones.

{table}

## Limits

{_LIMITS}

Licence: Apache-2.0, as the project.
"""


def _stages(training: dict[str, Any]) -> str:
    """What was run, the earlier stage first where there was one."""
    recipes = [training["after"], training["recipe"]] if "after" in training else [training["recipe"]]
    return "\n\n".join(
        f"{f'Stage {number}: ' if len(recipes) > 1 else ''}{recipe['steps']:,} steps of {recipe['tokens']:,} tokens, "
        f"seed {recipe['seed']};\nMuon on the matrices (learning rate {recipe['learning_rate']}), AdamW on the rest, "
        f"warm-up {recipe['warmup']} steps,\nlinear decay over the last {100 * recipe['decay']:.0f} %."
        for number, recipe in enumerate(recipes, 1)
    )


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
