"""The pocket task suite: questions with checkable answers, graded difficulty and three disjoint splits.

The embedded models are trained and graded on questions whose answers a program can check. A hash of the prompt
determines a task's split (train, calibration or test), so no prompt is in two splits, whatever the seed. Prompts that
differ only in case and punctuation have the same hash.

Each kind has common and rare phrasing families. Rare families are less frequent in training than in evaluation,
because a deployed model meets requests that its training hardly covered. Both models train on the same stream.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .kinds import KINDS, Kind, Phrasings
from .phrasing import REPHRASED, rephrase

Split = Literal["train", "calibration", "test"]

# Percent of the hash space for test and calibration; the rest is for training.
_TEST, _CALIBRATION = 10, 25
# Weight of a rare phrasing family relative to a common one.
RARE_WEIGHT: dict[Split, float] = {"train": 0.2, "calibration": 0.3, "test": 0.3}


@dataclass(frozen=True, slots=True)
class Task:
    """A question. `answer` is the worked text that the models learn, `target` the final result that is graded."""

    id: str
    kind: str
    family: str
    difficulty: int
    prompt: str
    answer: str
    target: str


def split_of(prompt: str) -> Split:
    """Return the split of a prompt, by a hash of its words, numbers and operators."""
    essence = " ".join(re.findall(r"\d+|[^\W\d]+|[-+*/]", prompt.casefold()))
    bucket = int.from_bytes(hashlib.blake2b(essence.encode(), digest_size=4).digest()) % 100
    return "test" if bucket < _TEST else "calibration" if bucket < _TEST + _CALIBRATION else "train"


def stream(split: Split, seed: int) -> Iterator[Task]:
    """Return an endless, reproducible stream of tasks of one split; prompts may repeat."""
    rng = random.Random(f"{split}:{seed}")
    names = list(KINDS)
    weights = [KINDS[name].weight for name in names]
    while True:
        yield _draw(KINDS[rng.choices(names, weights)[0]], split, rng)


def make_tasks(split: Split, n: int, seed: int = 0) -> list[Task]:
    """Return `n` tasks with distinct prompts, spread evenly over the kinds, in shuffled order.

    Raises ValueError if the suite has too few distinct prompts.
    """
    rng = random.Random(f"{split}:{seed}:distinct")
    tasks: dict[str, Task] = {}
    open_kinds = list(KINDS.values())
    while len(tasks) < n and open_kinds:
        for kind in tuple(open_kinds):
            task = _draw_new(kind, split, rng, tasks)
            if task is None:
                open_kinds.remove(kind)
            elif len(tasks) < n:
                tasks[task.prompt] = task
    if len(tasks) < n:
        raise ValueError(f"the {split} split has only {len(tasks)} distinct tasks, but {n} were requested")
    shuffled = list(tasks.values())
    rng.shuffle(shuffled)
    return shuffled


def check(task: Task, text: str) -> bool:
    """Return whether the final result in `text` is the target. Working shown before the result is not graded."""
    grade = KINDS[task.kind].grade
    if grade == "json":
        return _json_equal(text, task.target)
    if grade == "final":
        _, marker, final = text.rpartition("Answer:")
        return bool(marker) and _normal(final) == _normal(task.target)
    return _normal(text) == _normal(task.target)


def _draw(kind: Kind, split: Split, rng: random.Random) -> Task:
    while True:
        draft = kind.make(rng, Phrasings(rng, RARE_WEIGHT[split], held_out=split != "train"))
        prompt = rephrase(draft.prompt, kind.name, rng) if rng.random() < REPHRASED else draft.prompt
        if split_of(prompt) == split:
            digest = hashlib.blake2b(prompt.encode(), digest_size=6).hexdigest()
            family = f"{kind.name}/{draft.family}"
            return Task(
                f"{kind.name}-{digest}", kind.name, family, draft.difficulty, prompt, draft.answer, draft.target
            )


def _draw_new(kind: Kind, split: Split, rng: random.Random, tasks_by_prompt: dict[str, Task]) -> Task | None:
    """Return a task of `kind` whose prompt is not in `tasks_by_prompt`; None after 200 repeated prompts."""
    for _ in range(200):
        task = _draw(kind, split, rng)
        if task.prompt not in tasks_by_prompt:
            return task
    return None


def _normal(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().rstrip(".! ").casefold()


def _json_equal(text: str, target: str) -> bool:
    try:
        return json.loads(text) == json.loads(target)
    except ValueError:
        return False
