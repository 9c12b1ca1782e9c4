"""Model cards of the two demo models (pocket pair). All figures come from graded tests and training reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..classifier.evaluation.metrics import auroc
from ..classifier.evaluation.single_signals import MEAN_LOGPROB, SINGLE_SIGNALS
from ..classifier.features.blocks import view_of
from ..classifier.graded_row import GradedRow
from . import pocket
from .kinds import KINDS
from .kinds.outside import OUTSIDE
from .phrasing import REPHRASED
from .tasks import RARE_WEIGHT

_DATA = f"""\
Trained on the stream of `updraft.embedded.tasks`: generated questions of {len(KINDS)} kinds, without text from other
sources. Facts of the world atlas are common knowledge. Tasks are split into train, calibration and test by a hash of
the prompt's words and signs. A rare phrasing family has weight {RARE_WEIGHT["train"]} in training and
{RARE_WEIGHT["test"]} in calibration and test, relative to a common family. {100 * REPHRASED:.0f} % of all questions are
rephrased, with other words, cases and spaces (`updraft.embedded.phrasing`).

Kind `outside` holds everyday questions about all other subjects. Their only answer is the sentence
"{OUTSIDE}"
In calibration and test, these questions use wordings that no model was trained on.

Both models saw the same tasks in the same order; in the runs after the first, pocket-small saw more of them than
pocket-large. Some choices were made by looking at calibration scores: kinds that models of this size hardly learned in
the given time (stock-keeping, points, variables, number sequences) were left out of the suite, and the size of
pocket-small was chosen from several, because it is right on about half to three quarters of the tasks. Kind `outside`
and the phrasing were extended after a look at the models' mistakes in the second run, which included held-out
questions."""

_LIMITS = """\
Made to demonstrate and test a cascade on any machine in a minute. The model knows nothing outside its task kinds, and
is trained to say so: do not use it for anything else. Greedy decoding, 512 tokens of context, ChatML, English only."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """Model that a card describes: its name, its role, and a function that returns its score in a graded row."""

    name: str
    role: str
    score: Callable[[GradedRow], float]


_SUBJECTS = (
    _Subject(
        pocket.SMALL,
        "The on-device model (GGUF Q8_0) and, as safetensors, the cloud's draft model",
        lambda outcome: outcome.weak,
    ),
    _Subject(pocket.LARGE, "The cloud model", lambda outcome: outcome.strong),
)


def write_cards(weights: Path, test: Sequence[GradedRow], date: str) -> None:
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

{_recipe(subject, training)}

## Held-out scores per kind

AUROC: how well the small model's mean log-probability separates its right answers from its wrong ones.

{table}

## Limits

{_LIMITS}

Licence: Apache-2.0, as the project.
"""


def _recipe(subject: _Subject, training: dict[str, Any]) -> str:
    """Return Markdown about the model's training runs, the last run first."""
    runs: list[str] = []
    while (start := training.get("started_from")) is not None:
        recipe, weights = training["recipe"], start["weights_sha256"][:16]
        origin = f"This run started from weights with SHA-256 {weights}, at commit {start['commit']}."
        runs.append(f"{_command(subject, recipe)} --start-from FOLDER\n\n{_schedule(recipe)}\n{origin}")
        training = start
    runs.append(f"{_command(subject, training['recipe'])}\n\n{_schedule(training['recipe'])} From random weights.")
    return "\n\nBefore that:\n\n".join(runs)


def _command(subject: _Subject, recipe: dict[str, Any]) -> str:
    return (
        f"    python -m updraft.embedded.train --model {subject.name.removeprefix('pocket-')} --steps {recipe['steps']}"
    )


def _schedule(recipe: dict[str, Any]) -> str:
    return f"""\
{recipe["steps"]:,} steps of {recipe["tokens"]:,} tokens, seed {recipe["seed"]}; Muon on the matrices (learning rate
{recipe["learning_rate"]}), AdamW on the rest, warm-up {recipe["warmup"]} steps, linear decay over the last
{100 * recipe["decay"]:.0f} %."""


def _table(test: Sequence[GradedRow]) -> str:
    rows = ["| kind | n | small right | large right | AUROC of small's mean log-probability |", "|---|---|---|---|---|"]
    kinds = sorted({o.domain for o in test})
    for kind in [*kinds, "all"]:
        rows.append(_row(kind, [o for o in test if kind in (o.domain, "all")]))
    return "\n".join(rows)


def _row(kind: str, group: Sequence[GradedRow]) -> str:
    small = np.array([o.weak for o in group])
    large = np.array([o.strong for o in group])
    confidence = np.array([-SINGLE_SIGNALS[MEAN_LOGPROB](view_of(o)) for o in group])
    area = f"{auroc(confidence, small > 0.5):.3f}" if 0 < small.mean() < 1 else "-"
    return f"| {kind} | {len(group)} | {100 * small.mean():.1f} % | {100 * large.mean():.1f} % | {area} |"
