"""The requests of a plan: when each came, and how long prompt and answer were."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec

from ...protocol.errors import ConfigurationError
from ...protocol.unicode_forms import text_lines
from ..gateway.ledger.opening import is_url, open_reader

_AZURE_TOKENS = ("ContextTokens", "GeneratedTokens")
_HASHED_TOKENS = 512  # of Mooncake's blocks
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a trace."""

    # Seconds behind the first one.
    arrived_s: float
    # Tokens of the prompt.
    prompt: int
    # Tokens of the answer.
    output: int
    # Which blocks of 512 tokens the prompt is made of, where the trace says. Equal ones hold the same text.
    blocks: tuple[int, ...] = ()

    def prompt_ids(self, number: int) -> list[int]:
        """Token ids, equal to those of another request as far as the text is."""
        if not self.blocks:
            return [number] * self.prompt
        ids = [block * _HASHED_TOKENS + offset for block in self.blocks for offset in range(_HASHED_TOKENS)]
        return ids[: self.prompt]


class _MooncakeRow(msgspec.Struct):
    # Milliseconds.
    timestamp: float
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: tuple[int, ...] = ()


def read_trace(source: str, most: int) -> list[PlannedRequest]:
    """The first `most` requests of Azure's CSV, Mooncake's JSON Lines, or a gateway's ledger (a file or a URL).

    Requests without an answer are left out. Raises ConfigurationError.
    """
    suffix = "" if is_url(source) else Path(source).suffix
    rows = {".csv": _azure, ".jsonl": _mooncake}.get(suffix, _ledger)(source)
    try:
        found = list(islice((row for row in rows if row.prompt > 0 and row.output > 0), most))
    except (OSError, KeyError, TypeError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigurationError(
            f"{source} is no trace: {error}. It must be a CSV with TIMESTAMP, ContextTokens and GeneratedTokens, "
            "JSON Lines with timestamp, input_length and output_length, or a gateway's ledger.",
            param="trace",
        ) from error
    if not found:
        raise ConfigurationError(f"{source} holds no requests with an answer.", param="trace")
    found.sort(key=lambda row: row.arrived_s)
    return [replace(row, arrived_s=row.arrived_s - found[0].arrived_s) for row in found]


def faster(trace: list[PlannedRequest], factor: float) -> list[PlannedRequest]:
    """The same requests, `factor` times as many in the same time."""
    return [replace(row, arrived_s=row.arrived_s / factor) for row in trace]


def sample(trace: list[PlannedRequest], share: float, seed: int = 0) -> list[PlannedRequest]:
    """Each request with a probability of `share`: those that are left to the cloud."""
    random = Random(seed)
    return [row for row in trace if random.random() < share]


def _azure(source: str) -> Iterator[PlannedRequest]:
    path = Path(source)
    with path.open("rb") as file:
        for row in csv.DictReader(text_lines(file, path, ConfigurationError)):
            arrived = datetime.fromisoformat(row["TIMESTAMP"])
            arrived = arrived if arrived.tzinfo else arrived.replace(tzinfo=UTC)  # no hour of a clock is there twice
            prompt, output = (msgspec.convert(row[name], _Tokens, strict=False) for name in _AZURE_TOKENS)
            yield PlannedRequest(arrived.timestamp(), prompt, output)


def _mooncake(source: str) -> Iterator[PlannedRequest]:
    decode = msgspec.json.Decoder(_MooncakeRow).decode
    with Path(source).open("rb") as file:
        for row in map(decode, file):
            yield PlannedRequest(row.timestamp / 1e3, row.input_length, row.output_length, row.hash_ids)


def _ledger(source: str) -> Iterator[PlannedRequest]:
    with open_reader(source).rows() as rows:
        for row in rows:
            yield PlannedRequest(row["started_at"], row["prompt_tokens"], row["completion_tokens"])
