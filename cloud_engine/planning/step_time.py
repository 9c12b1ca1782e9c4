"""A model that estimates the time of an engine step from its content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...protocol.decoding import prepare_types
from ...protocol.errors import ConfigurationError
from ...protocol.validation_messages import plain_words
from ..engine.speculation.cost_table import fixed_rows

if TYPE_CHECKING:
    from ..engine.types.request_state import ScheduledRequest

_PREFIX, _ROWS = "step_time_", "rows_"
_MAX_BATCH = 2**16  # largest accepted batch, in requests
MAX_ROW_COSTS = 9  # number of costs in `rows`, for up to 512 tokens; in larger steps, reading weights no longer matters


class _Report(msgspec.Struct):
    metrics: dict[str, float]


prepare_types(_Report)


@dataclass(frozen=True, slots=True)
class StepContent:
    """The content of a step, in the quantities that determine its time."""

    # Always 1: the factor of the fixed cost of a step.
    steps: int
    # Requests in the step.
    sequences: int
    # Prompt tokens: all tokens of the step except one per request.
    prompt_tokens: int
    # Context tokens of the requests that compute a single token.
    context_tokens: int
    # Number of (query, key) pairs that the attention of prompt chunks computes.
    prompt_pairs: int
    chunks: int = 0

    @staticmethod
    def of(batch: Sequence[ScheduledRequest]) -> StepContent:
        tokens = sum(item.num_tokens for item in batch)
        context = sum(item.start for item in batch if item.num_tokens == 1)
        pairs = sum(item.num_tokens * (item.start + item.num_tokens // 2) for item in batch if item.num_tokens > 1)
        chunks = sum(item.num_tokens > 1 for item in batch)
        return StepContent(1, len(batch), tokens - len(batch), context, pairs, chunks)

    def rows(self) -> list[int]:
        """Return the step's tokens split into groups: the first two, the next two, the next four, and so on."""
        tokens = self.sequences + self.prompt_tokens
        starts = (0, *(2**power for power in range(1, MAX_ROW_COSTS)))
        return [min(tokens - start, start or 2) for start in starts if start < tokens]


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """A linear model of step times. Most fields hold seconds per unit of the `StepContent` field with that name."""

    # Seconds per step, whatever its content.
    steps: float
    # Seconds per request.
    sequences: float
    # Seconds per prompt token.
    prompt_tokens: float
    # Seconds per context token of a decode.
    context_tokens: float = 0.0
    # Seconds per pair of a query and a key token in a prompt chunk.
    prompt_pairs: float = 0.0
    # Seconds per prompt chunk.
    chunks: float = 0.0
    # Context tokens that fit into the processor's caches.
    cached_tokens: float = 0.0
    # Additional seconds per context token beyond `cached_tokens`.
    uncached_tokens: float = 0.0
    # Additional seconds per token of the step, for the first two tokens, the next two, four, eight and so on.
    rows: tuple[float, ...] = ()
    # Largest measured number of requests in a step.
    largest_batch: int = 256

    def __post_init__(self) -> None:
        costs = asdict(self)
        are_sizes = 0 <= costs.pop("cached_tokens") < float("inf") and 1 <= costs.pop("largest_batch") <= _MAX_BATCH
        seconds = (*costs.pop("rows"), *costs.values())
        if not are_sizes or not all(0 <= each < 3600 for each in seconds) or not self.steps + self.sequences:
            raise ConfigurationError("Step costs must be at least 0 seconds, and a step must take time.", param="costs")

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

    def fixed_rows(self) -> float:
        """Return the number of rows whose computation takes as long as the fixed part of a step."""
        drafts = 2 ** (MAX_ROW_COSTS - 1) - 1
        return fixed_rows({(1, tokens): self.seconds(StepContent(1, 1, tokens, 0, 0)) for tokens in (0, drafts)})

    def figures(self) -> dict[str, float]:
        """Return the costs under their names in `updraft bench engine`."""
        named = asdict(self)
        rows = {f"{_ROWS}{power}": cost for power, cost in enumerate(named.pop("rows"))}
        return {f"{_PREFIX}{name}": value for name, value in (named | rows).items()}


def read_costs(path: Path) -> StepTimeModel:
    """Read a file written by `updraft bench engine --only steps --json PATH`. Raises ConfigurationError."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=_Report)
        costs = {name.removeprefix(_PREFIX): cost for name, cost in report.metrics.items() if name.startswith(_PREFIX)}
        rows = tuple(costs.pop(f"{_ROWS}{power}") for power in range(MAX_ROW_COSTS) if f"{_ROWS}{power}" in costs)
        named = {field.name: costs[field.name] for field in fields(StepTimeModel) if field.name != "rows"}
        return StepTimeModel(**{**named, "largest_batch": int(named["largest_batch"])}, rows=rows)
    except (OSError, KeyError, msgspec.MsgspecError) as error:
        raise ConfigurationError(
            f"{path} has no step times ({plain_words(error)}). Create it: "
            f"`updraft bench engine --only steps --json {path}`.",
            param="costs",
        ) from error
