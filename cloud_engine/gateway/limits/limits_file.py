"""Limits of tenants and models, from a TOML file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from ....protocol.decoding import prepare_types
from ....protocol.errors import ConfigurationError
from ....protocol.unicode_forms import read_text
from ....protocol.validation_messages import plain_words
from ..access.principal import Limits


class LimitsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of tenants and models. Unlisted names have no limits."""

    # Limits by tenant, across all keys of the tenant.
    tenants: dict[str, Limits] = {}
    # Limits by model, across all callers.
    models: dict[str, Limits] = {}


prepare_types(LimitsFile)


def read_limits_file(path: Path) -> LimitsFile:
    """Read a limits file. Raises ConfigurationError if the file cannot be read or is invalid."""
    try:
        return msgspec.convert(tomllib.loads(read_text(path, ConfigurationError)), LimitsFile)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        words = plain_words(error, {"concurrent": "max_concurrency"})
        raise ConfigurationError(f"The limits file {path} cannot be used: {words}.") from error
