"""Settings of the tasks of one pair of models."""

from __future__ import annotations

from dataclasses import dataclass

#: Quality that tasks keep if the settings state none.
TASK_QUALITY = 0.95
#: Smallest share of a licensed task's requests that is sampled, to notice that the licence no longer holds.
EXPLORATION = 0.05


@dataclass(frozen=True, slots=True)
class LearningRules:
    """How a router learns tasks."""

    # Name of the pair, whose evidence counts.
    pair: str
    quality: float = TASK_QUALITY
    # Smallest share of requests to sample.
    exploration: float = EXPLORATION
    # Whether a calibrated policy or threshold decides on tasks without a licence; else the cloud answers all of them.
    has_gates: bool = False
    # Whether to store the beginning of system prompts.
    keep_text: bool = False
