"""The time of an engine's step, by its content: measured, or given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...protocol.decoding import prepare_types
from ...protocol.errors import ConfigurationError

if TYPE_CHECKING:
    from ..engine.types.request_state import ScheduledRequest

_PREFIX, _ROWS = "step_time_", "rows_"
_MAX_BATCH = 2**16  # requests
MAX_ROW_COSTS = 9  # up to 512 tokens in a step: beyond, arithmetic takes longer than the weights


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
    # How many these are.
    chunks: int = 0

    @staticmethod
    def of(batch: Sequence[ScheduledRequest]) -> StepContent:
        tokens = sum(item.num_tokens for item in batch)
        context = sum(item.start for item in batch if item.num_tokens == 1)
        pairs = sum(item.num_tokens * (item.start + item.num_tokens // 2) for item in batch if item.num_tokens > 1)
        chunks = sum(item.num_tokens > 1 for item in batch)
        return StepContent(1, len(batch), tokens - len(batch), context, pairs, chunks)

    def rows(self) -> list[int]:
        """Tokens of the step: of the first two, of the next two, of the next four, and so on."""
        tokens = self.sequences + self.prompt_tokens
        starts = (0, *(2**power for power in range(1, MAX_ROW_COSTS)))
        return [min(tokens - start, start or 2) for start in starts if start < tokens]


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
    # For a prompt of which a chunk is read.
    chunks: float = 0.0
    # Tokens looked back on that the processor's caches hold.
    cached_tokens: float = 0.0
    # More for each beyond those.
    uncached_tokens: float = 0.0
    # More for each token of the step, whose rows share the weights: of the first two, of the next two, four, eight, ...
    rows: tuple[float, ...] = ()
    # Requests in a step, as far as was measured.
    largest_batch: int = 256

    def __post_init__(self) -> None:
        costs = asdict(self)
        are_sizes = 0 <= costs.pop("cached_tokens") < float("inf") and 1 <= costs.pop("largest_batch") <= _MAX_BATCH
        seconds = (*costs.pop("rows"), *costs.values())
        if not are_sizes or not all(0 <= each < 3600 for each in seconds) or not self.steps + self.sequences:
            raise ConfigurationError("A step must take time: its costs are seconds of at least 0.", param="costs")

    def seconds(self, content: StepContent) -> float:
        return (
            self.steps
            + self.sequences * content.sequences
            + self.prompt_tokens * content.prompt_tokens
            + self.context_tokens * content.context_tokens
            + self.prompt_pairs * content.prompt_pairs
            + self.chunks * content.chunks
            + self.uncached_tokens * max(0.0, content.context_tokens - self.cached_tokens)
            + sum(map(mul, self.rows, content.rows()))
        )

    def figures(self) -> dict[str, float]:
        """By the names of `updraft bench engine`."""
        named = asdict(self)
        rows = {f"{_ROWS}{power}": cost for power, cost in enumerate(named.pop("rows"))}
        return {f"{_PREFIX}{name}": value for name, value in (named | rows).items()}


def read_costs(path: Path) -> StepTimeModel:
    """From the file that `updraft bench engine --only steps --json PATH` writes. Raises ConfigurationError."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=_Report)
        costs = {name.removeprefix(_PREFIX): cost for name, cost in report.metrics.items() if name.startswith(_PREFIX)}
        rows = tuple(costs.pop(f"{_ROWS}{power}") for power in range(MAX_ROW_COSTS) if f"{_ROWS}{power}" in costs)
        named = {field.name: costs[field.name] for field in fields(StepTimeModel) if field.name != "rows"}
        return StepTimeModel(**{**named, "largest_batch": int(named["largest_batch"])}, rows=rows)
    except (OSError, KeyError, msgspec.MsgspecError) as error:
        raise ConfigurationError(
            f"{path} holds no times of steps ({error}): `updraft bench engine --only steps --json {path}` writes them.",
            param="costs",
        ) from error
