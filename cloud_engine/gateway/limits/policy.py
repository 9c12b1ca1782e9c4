"""Limits that are not a key's own: those of tenants and of models, from a TOML file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from ....protocol.decoding import prepare_types
from ....protocol.errors import ConfigurationError
from ....protocol.unicode_forms import read_text
from ..access.principal import Limits


class LimitPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of tenants and models. Those not named have none."""

    # Of tenants by name, all their keys together.
    tenants: dict[str, Limits] = {}
    # Of models by name, all callers together.
    models: dict[str, Limits] = {}


prepare_types(LimitPolicy)


def load_policy(path: Path) -> LimitPolicy:
    """Raises ConfigurationError."""
    try:
        return msgspec.convert(tomllib.loads(read_text(path, ConfigurationError)), LimitPolicy)
    except OSError as error:
        raise ConfigurationError(f"Cannot read the limits {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigurationError(f"The limits {path} are unusable: {error}.") from error
