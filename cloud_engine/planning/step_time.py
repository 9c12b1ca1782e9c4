"""How long a step of an engine takes, by what is in it: measured, or given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

import msgspec
import numpy as np

from ...protocol.decoding import prepare_types
from ...protocol.errors import ConfigurationError
from ..engine.types.request_state import ScheduledRequest

_PREFIX = "step_time_"
_HELD_UP = 8.0  # times what a step should take
_ROUNDS = 4


class _Report(msgspec.Struct):
    # By name.
    metrics: dict[str, float]


prepare_types(_Report)


@dataclass(frozen=True, slots=True)
class StepContent:
    """What a step computes."""

    # One for each step.
    steps: int
    # Requests in it.
    sequences: int
    # Tokens beyond one for each request.
    prompt_tokens: int
    # Tokens that the requests with a single token look back on.
    context_tokens: int
    # Pairs of tokens in the attention of the others.
    prompt_pairs: int

    @staticmethod
    def of(batch: Sequence[ScheduledRequest]) -> StepContent:
        tokens = sum(item.num_tokens for item in batch)
        context = sum(item.start for item in batch if item.num_tokens == 1)
        pairs = sum(item.num_tokens * (item.start + item.num_tokens // 2) for item in batch if item.num_tokens > 1)
        return StepContent(1, len(batch), tokens - len(batch), context, pairs)


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Seconds of a step: a sum over what is in it. The fields are those of `StepContent`."""

    # Seconds for a step, whatever is in it.
    steps: float
    # For a request.
    sequences: float
    # For a token of a prompt.
    prompt_tokens: float
    # For a token that a decode looks back on.
    context_tokens: float = 0.0
    # For a pair of tokens in a prompt.
    prompt_pairs: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= each < 3600 for each in astuple(self)) or not self.steps + self.sequences:
            raise ConfigurationError("A step must take time: its costs are seconds of at least 0.", param="costs")

    def seconds(self, content: StepContent) -> float:
        return (
            self.steps
            + self.sequences * content.sequences
            + self.prompt_tokens * content.prompt_tokens
            + self.context_tokens * content.context_tokens
            + self.prompt_pairs * content.prompt_pairs
        )

    def figures(self) -> dict[str, float]:
        """By the names of `updraft bench engine`."""
        return {f"{_PREFIX}{name}": value for name, value in asdict(self).items()}


def read_costs(path: Path) -> StepTimeModel:
    """From the file that `updraft bench engine --only steps --json PATH` writes. Raises ConfigurationError."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=_Report)
        return StepTimeModel(*(report.metrics[f"{_PREFIX}{field.name}"] for field in fields(StepTimeModel)))
    except (OSError, KeyError, msgspec.MsgspecError) as error:
        raise ConfigurationError(
            f"{path} holds no times of steps ({error}): `updraft bench engine --only steps --json {path}` writes them.",
            param="costs",
        ) from error


def fit(steps: Sequence[tuple[StepContent, float]]) -> StepTimeModel:
    """Least squares of relative errors, none of the costs negative, without the steps that something held up.

    Errors are relative to the estimate: relative to what was measured, short steps would count for more than long ones.
    """
    contents = np.array([astuple(content) for content, _ in steps], float)
    seconds = np.array([taken for _, taken in steps])
    costs = _non_negative(contents, seconds, seconds)
    near = seconds <= _HELD_UP * (contents @ costs)
    contents, seconds = contents[near], seconds[near]
    for _ in range(_ROUNDS):
        costs = _non_negative(contents, seconds, contents @ costs)
    return StepTimeModel(*map(float, costs))


def _non_negative(contents: np.ndarray, seconds: np.ndarray, scale: np.ndarray) -> np.ndarray:
    kept = [column for column in range(contents.shape[1]) if contents[:, column].any()]
    costs = np.zeros(contents.shape[1])
    while kept:
        solved, *_ = np.linalg.lstsq(contents[:, kept] / scale[:, None], seconds / scale, rcond=None)
        if (solved >= 0).all():
            costs[kept] = solved
            break
        kept.pop(int(solved.argmin()))
    return costs
