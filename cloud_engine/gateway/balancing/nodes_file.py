"""The nodes file: TOML with the key, limit, timeouts and price of each node."""

from __future__ import annotations

import math
import os
import tomllib
from pathlib import Path
from types import MappingProxyType

import msgspec

from ....accounting.prices import Dollars, Price
from ....protocol.decoding import prepare_types
from ....protocol.errors import ConfigurationError
from ....protocol.unicode_forms import read_text
from ....protocol.validation_messages import plain_words
from .node import NodeAddress

#: Former names of settings, each with its current name.
_RENAMED = MappingProxyType(
    {
        "key_env": "api_key_env",
        "concurrency": "max_concurrency",
        "first_token_s": "first_token_timeout_s",
        "idle_s": "idle_timeout_s",
    }
)


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    # Environment variable that holds the API key, because keys do not belong in the file.
    api_key_env: str | None = None
    max_concurrency: int | None = None
    first_token_timeout_s: float | None = None
    idle_timeout_s: float | None = None
    # US dollars per million tokens, if this node has its own prices.
    input: Dollars | None = None
    output: Dollars | None = None
    cached_input: Dollars | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    nodes: list[_Entry]


prepare_types(_File)


def read_nodes(path: Path, concurrency: int | None) -> list[NodeAddress]:
    """Read the `[[nodes]]` entries of a file. `concurrency`: limit for nodes without one. Raises ConfigurationError."""
    try:
        file = msgspec.convert(tomllib.loads(read_text(path, ConfigurationError)), _File)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        words = plain_words(error, _RENAMED, kind=_File)
        raise ConfigurationError(f"--nodes-file {path}: {words}.", param="nodes_file") from error
    return [_address(path, entry, concurrency) for entry in file.nodes]


def _address(path: Path, entry: _Entry, concurrency: int | None) -> NodeAddress:
    for name in ("max_concurrency", "first_token_timeout_s", "idle_timeout_s"):
        if (value := getattr(entry, name)) is not None and not 0 < value < math.inf:
            message = f"--nodes-file {path}: {name} must be above 0 and finite, got {value}."
            raise ConfigurationError(message, param="nodes_file")
    key = None
    if entry.api_key_env is not None and not (key := os.environ.get(entry.api_key_env)):
        raise ConfigurationError(f"--nodes-file {path}: ${entry.api_key_env} is not set.", param="nodes_file")
    limit = concurrency if entry.max_concurrency is None else entry.max_concurrency
    timeouts = entry.first_token_timeout_s, entry.idle_timeout_s
    return NodeAddress(entry.url, key, limit, *timeouts, price=_price(path, entry))


def _price(path: Path, entry: _Entry) -> Price | None:
    if entry.input is None or entry.output is None:
        if (entry.input, entry.output, entry.cached_input) != (None, None, None):
            raise ConfigurationError(f"--nodes-file {path}: input and output must both be set.", param="nodes_file")
        return None
    return Price(entry.input, entry.output, entry.cached_input)
