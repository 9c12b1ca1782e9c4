"""The pocket task suite: questions with checkable answers, graded difficulty and three disjoint splits.

Quality in Updraft is graded, never guessed, so the embedded models are trained and judged on questions whose answer a
program can check. A task belongs to a split by a hash of its prompt, so no prompt is in two splits whatever the seeds,
nor is one that differs in case and punctuation alone.

Each kind offers common phrasing families and rare ones. Training sees the rare ones seldom, evaluation sees them more
often, the way a deployed model meets requests its training hardly saw. Both models train on the same stream.
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

# Share of the hash space of each split, in percent: test, then calibration, the rest trains.
_TEST, _CALIBRATION = 10, 25
# Weight of a rare phrasing family beside a common one.
RARE_WEIGHT: dict[Split, float] = {"train": 0.2, "calibration": 0.3, "test": 0.3}


@dataclass(frozen=True, slots=True)
class Task:
    """One question. `answer` is the worked text the models learn, `target` the final result that is graded."""

    id: str
    kind: str
    family: str
    difficulty: int
    prompt: str
    answer: str
    target: str


def split_of(prompt: str) -> Split:
    """The split a prompt belongs to, by a hash of its words and signs alone."""
    essence = " ".join(re.findall(r"\d+|[^\W\d]+|[-+*/]", prompt.casefold()))
    bucket = int.from_bytes(hashlib.blake2b(essence.encode(), digest_size=4).digest()) % 100
    return "test" if bucket < _TEST else "calibration" if bucket < _TEST + _CALIBRATION else "train"


def stream(split: Split, seed: int) -> Iterator[Task]:
    """An endless, reproducible stream of tasks of one split; prompts may repeat."""
    rng = random.Random(f"{split}:{seed}")
    names = list(KINDS)
    weights = [KINDS[name].weight for name in names]
    while True:
        yield _draw(KINDS[rng.choices(names, weights)[0]], split, rng)


def make_tasks(split: Split, n: int, seed: int = 0) -> list[Task]:
    """`n` tasks with distinct prompts, spread evenly over the kinds, in shuffled order.

    Raises ValueError if the suite cannot give that many distinct prompts.
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
        raise ValueError(f"the {split} split holds only {len(tasks)} distinct tasks, {n} were asked for")
    found = list(tasks.values())
    rng.shuffle(found)
    return found


def check(task: Task, text: str) -> bool:
    """Whether `text` answers `task`: its final result is the target. Working shown before it is not graded."""
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
    """A task of `kind` whose prompt is not in `tasks_by_prompt`; None when the kind seems exhausted."""
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
