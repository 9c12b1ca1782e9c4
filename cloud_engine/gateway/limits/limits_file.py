"""Limits of tenants and models, from a TOML file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from ....protocol.decoding import prepare_types
from ....protocol.errors import ConfigurationError
from ....protocol.http.app import TenantWeight
from ....protocol.unicode_forms import read_text
from ....protocol.validation_messages import plain_words
from ..access.principal import Limits, Name


class LimitsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of tenants and models. Unlisted names have no limits."""

    # Limits by tenant, across all keys of the tenant.
    tenants: dict[Name, Limits] = {}
    # Limits by model, across all callers.
    models: dict[str, Limits] = {}
    # Shares of tenants at nodes with `--scheduling-policy fair`, relative to other tenants, whose share is 1.
    weights: dict[Name, TenantWeight] = {}


prepare_types(LimitsFile)


def read_limits_file(path: Path) -> LimitsFile:
    """Read a limits file. Raises ConfigurationError if the file cannot be read or is invalid."""
    given: dict[str, Any] = {}
    try:
        given = tomllib.loads(read_text(path, ConfigurationError))
        return msgspec.convert(given, LimitsFile)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        words = plain_words(error, {"concurrent": "max_concurrency"}, value=given, kind=LimitsFile)
        raise ConfigurationError(f"The limits file {path} cannot be used: {words}.") from error
