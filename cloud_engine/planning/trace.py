"""Traces of requests for a plan: arrival times, and the lengths of prompts and answers."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec

from ...protocol.errors import ConfigurationError
from ...protocol.unicode_forms import text_lines
from ...protocol.validation_messages import plain_words
from ..gateway.ledger.opening import is_url, open_reader

_AZURE_TOKENS = ("ContextTokens", "GeneratedTokens")
_HASHED_TOKENS = 512  # tokens per block in Mooncake's traces
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request of a trace."""

    # Arrival time, in seconds since the first request.
    arrived_s: float
    # Prompt tokens.
    prompt: int
    # Answer tokens.
    output: int
    # Ids of the prompt's blocks of 512 tokens, if the trace contains them. Blocks with equal ids have equal text.
    blocks: tuple[int, ...] = ()

    def prompt_ids(self, number: int) -> list[int]:
        """Return made-up token ids for the prompt. Prompts whose first blocks are equal begin with equal ids."""
        if not self.blocks:
            return [number] * self.prompt
        ids = [block * _HASHED_TOKENS + offset for block in self.blocks for offset in range(_HASHED_TOKENS)]
        return ids[: self.prompt]


class _MooncakeRow(msgspec.Struct):
    # Arrival time, in milliseconds.
    timestamp: float
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: tuple[int, ...] = ()


def read_trace(source: str, most: int) -> list[PlannedRequest]:
    """Read the first `most` requests of Azure's CSV, Mooncake's JSON Lines, or a gateway's ledger (a file or a URL).

    Requests without an answer are skipped. Raises ConfigurationError.
    """
    suffix = "" if is_url(source, "trace") else Path(source).suffix
    rows = {".csv": _azure, ".jsonl": _mooncake}.get(suffix, _ledger)(source)
    try:
        requests = list(islice((row for row in rows if row.prompt > 0 and row.output > 0), most))
    except (OSError, KeyError, TypeError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigurationError(
            f"{source} is not a trace: {plain_words(error)}. Use a CSV with TIMESTAMP, ContextTokens and "
            "GeneratedTokens, JSON Lines with timestamp, input_length and output_length, or a gateway's ledger.",
            param="trace",
        ) from error
    if not requests:
        raise ConfigurationError(f"{source} has no requests with an answer.", param="trace")
    requests.sort(key=lambda row: row.arrived_s)
    return [replace(row, arrived_s=row.arrived_s - requests[0].arrived_s) for row in requests]


def faster(trace: Sequence[PlannedRequest], factor: float) -> list[PlannedRequest]:
    """Return the same requests, arriving at `factor` times the rate."""
    return [replace(row, arrived_s=row.arrived_s / factor) for row in trace]


def sample(trace: Sequence[PlannedRequest], share: float) -> list[PlannedRequest]:
    """Keep each request with probability `share`, to simulate the part of the trace that the cloud answers."""
    random = Random(0)
    return [row for row in trace if random.random() < share]


def _azure(source: str) -> Iterator[PlannedRequest]:
    path = Path(source)
    with path.open("rb") as file:
        for row in csv.DictReader(text_lines(file, path, ConfigurationError)):
            arrived = datetime.fromisoformat(row["TIMESTAMP"])
            arrived = arrived if arrived.tzinfo else arrived.replace(tzinfo=UTC)  # UTC, since local time repeats hours
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
