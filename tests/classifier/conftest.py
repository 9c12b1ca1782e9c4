"""A synthetic population of graded runs whose laws are known, and a policy trained on it once per session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from updraft.classifier.features.blocks import graded_run
from updraft.classifier.features.gate_inputs import PromptView, RunView
from updraft.classifier.graded_row import GradedRow
from updraft.classifier.policy.policy import Source
from updraft.classifier.training.gates import FittedGates, TrainingData, fit_gates
from updraft.classifier.training.train import FitRecipe, training_data_of, write_policy

KINDS = 16
HIDDEN = 24
_OPENINGS = ("What is", "Work out", "Pray tell me")
_WORDS = [
    "apple",
    "river",
    "stone",
    "seven",
    "circle",
    "market",
    "window",
    "garden",
    "silver",
    "paper",
    "bridge",
    "candle",
]


def population(n: int, seed: int) -> list[GradedRow]:
    """`n` graded runs. In 12 kinds token confidence follows correctness; in 4 the small model is confidently wrong.

    In those, what gives it away is a surprising prompt (kinds 12, 13), a false statement in the working (14), or a
    direction of the hidden state (15).
    """
    world = np.random.default_rng(12345)
    directions = world.normal(size=(KINDS, HIDDEN))
    trouble = world.normal(size=HIDDEN)
    ability = world.uniform(0.35, 0.75, KINDS)
    rng = np.random.default_rng(seed)
    return [_row(rng, i % KINDS, directions, trouble, ability) for i in range(n)]


def _row(
    rng: np.random.Generator,
    kind: int,
    directions: np.ndarray,
    trouble: np.ndarray,
    ability: np.ndarray,
) -> GradedRow:
    family = int(rng.choice(3, p=(0.45, 0.4, 0.15)))
    difficulty = rng.uniform()
    confident = kind >= 12
    hardness = difficulty + (0.35 if family == 2 else 0.0)
    right = bool(rng.uniform() < 1 / (1 + np.exp(8 * (hardness - ability[kind]))))
    cloud_right = bool(rng.uniform() < 0.97 - 0.08 * difficulty)
    doubt = 0.15 if confident or right else 1.0
    n = int(rng.integers(6, 40))
    weak = rng.uniform(size=n) < (0.08 + 0.25 * doubt * rng.uniform())
    logprobs = -np.where(weak, rng.exponential(0.2 + 1.2 * doubt, n), rng.exponential(0.01, n))
    surprise = (1.5 if kind in (12, 13) and not right else 0.0) + (1.0 if family == 2 else 0.0)
    prompt_logprobs = -rng.exponential(0.8 + 0.6 * surprise, int(rng.integers(12, 30)))
    a, b = (int(x) for x in rng.integers(2, 10 ** (1 + int(4 * difficulty)) + 8, 2))
    words = " ".join(rng.choice(_WORDS, 4))
    prompt = f"{_OPENINGS[family]} {_WORDS[kind % len(_WORDS)]}{kind} of {a} and {b} near the {words}?"
    stated = a + b + (0 if right or (kind != 14 and rng.uniform() < 0.9) else int(rng.integers(1, 9)))
    hidden = directions[kind] + 0.5 * rng.normal(size=HIDDEN)
    hidden += (1 if not right else -1) * trouble * (0.25 if kind == 15 else 0.04)
    return graded_run(
        RunView(
            prompt=PromptView(prompt),
            answer=f"{a} + {b} = {stated}. Answer: {stated}",
            logprobs=logprobs.astype(np.float32),
            entropies=(-1.5 * logprobs + rng.exponential(0.02, n)).astype(np.float32),
            margins=np.maximum(0.0, 5 + 3 * logprobs + rng.normal(0, 0.5, n)).astype(np.float32),
            prompt_logprobs=prompt_logprobs.astype(np.float32),
            prompt_hidden=(directions[kind] + 0.5 * rng.normal(size=HIDDEN)).astype(np.float32),
            answer_hidden=hidden.astype(np.float32),
            finish_reason="stop",
        ),
        float(right),
        float(cloud_right),
        f"kind{kind:02d}",
        f"kind{kind:02d}/{family}",
    )


@dataclass(frozen=True, slots=True)
class Trained:
    """A policy of the population in a folder, and the Python models that it was exported from."""

    fitted: FittedGates
    material: TrainingData
    recipe: FitRecipe
    folder: Path


@pytest.fixture(scope="session")
def make_population() -> Callable[..., list[GradedRow]]:
    return population


@pytest.fixture(scope="session")
def calibration() -> list[GradedRow]:
    return population(1600, seed=1)


@pytest.fixture(scope="session")
def held_out() -> list[GradedRow]:
    return population(800, seed=2)


@pytest.fixture(scope="session")
def trained(calibration: list[GradedRow], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    material, folder = training_data_of(calibration), tmp_path_factory.mktemp("policy")
    data = [Source("population", "0" * 64, len(calibration))]
    recipe = FitRecipe({"local": "small", "cloud": "large"}, data, "the population's laws", "2026-01-31")
    fitted = fit_gates(material, recipe.seed)
    write_policy(fitted, material, recipe, folder)
    return Trained(fitted, material, recipe, folder)
