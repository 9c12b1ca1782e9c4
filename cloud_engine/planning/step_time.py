"""The time of an engine's step, by its content: measured, or given."""

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
_CONTEXT = 3  # the column of `context_tokens`
_SMALLEST_CACHE = 9  # as a power of two tokens
_HELD_UP = 8.0  # times what a step should take
_ROUNDS = 5


class _Report(msgspec.Struct):
    # By name.
    metrics: dict[str, float]


prepare_types(_Report)


@dataclass(frozen=True, slots=True)
class StepContent:
    """The content of a step."""

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
    # Tokens looked back on that the processor's caches hold.
    cached_tokens: float = 0.0
    # More for each beyond those.
    uncached_tokens: float = 0.0

    def __post_init__(self) -> None:
        costs = asdict(self)
        is_size = 0 <= costs.pop("cached_tokens") < float("inf")
        if not is_size or not all(0 <= each < 3600 for each in costs.values()) or not self.steps + self.sequences:
            raise ConfigurationError("A step must take time: its costs are seconds of at least 0.", param="costs")

    def seconds(self, content: StepContent) -> float:
        return (
            self.steps
            + self.sequences * content.sequences
            + self.prompt_tokens * content.prompt_tokens
            + self.context_tokens * content.context_tokens
            + self.prompt_pairs * content.prompt_pairs
            + self.uncached_tokens * max(0.0, content.context_tokens - self.cached_tokens)
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
    near = seconds <= _HELD_UP * (contents @ _non_negative(contents, seconds, seconds))
    contents, seconds = contents[near], seconds[near]
    looked_back = contents[:, _CONTEXT]
    sizes = [0.0, *(2.0**power for power in range(_SMALLEST_CACHE, int(looked_back.max()).bit_length()))]
    return min((_fit(contents, seconds, size) for size in sizes), key=lambda found: found[0])[1]


def _fit(contents: np.ndarray, seconds: np.ndarray, cached: float) -> tuple[float, StepTimeModel]:
    """With so many tokens in the caches: the squared error, and the costs."""
    beyond = np.maximum(0.0, contents[:, _CONTEXT] - cached) * (cached > 0)
    columns, scale = np.column_stack([contents, beyond]), seconds
    costs = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        costs = _non_negative(columns, seconds, scale)
        scale = columns @ costs
    found = StepTimeModel(*map(float, costs[:-1]), cached_tokens=cached, uncached_tokens=float(costs[-1]))
    return float(np.square(seconds / scale - 1).sum()), found


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
