"""Sources of the router's settings: a TOML file, `UPDRAFT_*` variables, overrides. Later sources win."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_type_hints

import msgspec

from ..accounting.prices import Price
from ..classifier.policy.folders import experience_file
from ..protocol import settings
from ..protocol.errors import ConfigurationError
from ..protocol.http.lenient_json import object_of, rows, table
from ..protocol.safety.private_files import has_file, restrict_to_owner
from ..protocol.safety.system import is_changeable_by_others
from ..protocol.validation_messages import plain_words
from .config import OF_CLOUD_URL, TARGETS, CloudTierConfig, RouterConfig

_KNOWN = tuple(item.name for item in fields(RouterConfig))
_HINTS: dict[str, Any] = get_type_hints(RouterConfig)
# Settings that are tables. In reverse order, `budget_per_key` precedes its prefix `budget`.
# In the environment, `UPDRAFT_PRICES_CLOUD_INPUT` sets `cloud_input` of `prices`.
_TABLES: dict[str, type[Any]] = {
    name: kind for name, kind in sorted(_HINTS.items(), reverse=True) if isinstance(kind, type) and is_dataclass(kind)
}
_PAIRS = ("cloud_headers", "cloud_query")
_OPTIONAL = frozenset(name for name, kind in _HINTS.items() if NoneType in get_args(kind))
_SWITCHES: dict[Any, bool] = {True: True, "true": True, False: False, "false": False}


def load_config(
    overrides: Mapping[str, Any] | None = None, *, environ: Mapping[str, str] | None = None, file: Path | None = None
) -> RouterConfig:
    """Return the user's settings: TOML file, then `UPDRAFT_*`, then `overrides` (as `RouterConfig` fields; tables
    such as `prices` may be mappings). A cloud key counts only if it is set by the source that sets the cloud's URL, or
    by a later source. By default the state folder holds the ledger, the files and, while exploring, the experience.
    Raises ConfigurationError."""
    path = settings.config_file() if file is None else file
    given = read_settings(path)
    given.pop("serve", None)  # options of `updraft serve`, which reads them itself
    state = settings.state_folder()
    values: dict[str, Any] = {"ledger": state / "ledger.sqlite3", "files": state / "files"}
    _merge(values, given, str(path))
    _merge(values, _listed(_nested(settings.environment(environ))), "the environment (UPDRAFT_*)")
    _merge(values, dict(overrides or {}), "the options")
    experience = values.get("experience")
    if (keeps := _SWITCHES.get("true" if experience == "features" else experience)) is not None:
        values["experience"] = experience_file() if keeps else None
    if (keeps := _SWITCHES.get(values.get("store"))) is not None:
        values["store"] = state / "answers.sqlite3" if keeps else None
    if (keeps := _SWITCHES.get(values.get("learn"))) is not None:
        values["learn"] = state / "tasks.sqlite3" if keeps else None
    # Set these settings without msgspec, whose errors would not list the allowed values.
    words = {name: values.pop(name) for name in ("promise", "fallback", "confidence_signal") if name in values}
    try:
        config = replace(msgspec.convert(values, RouterConfig, strict=False, dec_hook=_decode), **words)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"Invalid setting: {plain_words(error, value=values, kind=RouterConfig)}.") from error
    learns = config.exploration or config.shadow or config.experience_text
    return replace(config, experience=experience_file()) if learns and "experience" not in values else config


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in a file; empty if it is missing. A file in one of Updraft's own folders is made private.
    Raises ConfigurationError for a faulty file, and if the file that `UPDRAFT_CONFIG` names is missing, since the
    user's privacy rules and budgets would not apply."""
    if has_file(path):
        if is_changeable_by_others(path):
            raise ConfigurationError(
                f"{path} belongs to another user, and anyone can change where prompts and keys are sent. Revoke "
                f"that right (chmod o-w {path}), or name another file with UPDRAFT_CONFIG."
            )
        restrict_to_owner(path)
    given = settings.read_toml(path)
    if not has_file(path) and os.environ.get("UPDRAFT_CONFIG") and path == settings.config_file():
        raise ConfigurationError(
            f"{path} does not exist, but UPDRAFT_CONFIG names it: create it, or unset UPDRAFT_CONFIG."
        )
    return given


def _merge(into: dict[str, Any], update: dict[str, Any], source: str) -> None:
    RouterConfig.check_renamed(update, f" in {source}")
    _refuse_unknown(update, _KNOWN, source)
    if any(update.get(name) is not None for name in TARGETS):  # a target replaces the target of an earlier source
        into.update(dict.fromkeys(TARGETS))
    if update.get("cloud_url") not in (None, into.get("cloud_url")):  # a key belongs to the URL it was set with
        into.update(OF_CLOUD_URL)
    for name, value in update.items():
        if name == "middle_tiers":
            into[name] = _middle_tiers(value, source)
        elif name in _TABLES:
            given = _table(value, _TABLES[name], f"{name} in {source}")
            into[name] = {**into.get(name, {}), **given}
        else:
            into[name] = None if name in _OPTIONAL and value in ("", "none") else value
    for model, price in object_of(into.get("prices", {}).get("models")).items():
        _table(price, Price, f"prices.models.{model} in {source}")


def _middle_tiers(value: Any, source: str) -> list[dict[str, Any]]:
    given = rows(list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value)
    if given is None:
        raise ConfigurationError(f"middle_tiers in {source} must be a list of tables ([[middle_tiers]]).")
    return [_table(each, CloudTierConfig, f"middle_tiers in {source}") for each in given]


def _table(value: Any, kind: type[Any], source: str) -> dict[str, Any]:
    known = tuple(item.name for item in fields(kind))
    if isinstance(value, kind):
        return {name: getattr(value, name) for name in known}
    given = table(value)
    if given is None:
        raise ConfigurationError(f"{source} must be a table of {', '.join(known)}.")
    RouterConfig.check_renamed(given, f" in {source}")
    _refuse_unknown(given, known, source)
    return given


def _refuse_unknown(given: Iterable[str], known: tuple[str, ...], source: str) -> None:
    if unknown := sorted(set(given) - set(known)):
        close = [match for name in unknown for match in get_close_matches(name, known, 3, 0.0)]
        raise ConfigurationError(
            f"Unknown setting {', '.join(unknown)} in {source}. Closest: {', '.join(close[:3])}. All settings: "
            "docs/reference/settings.md."
        )


def _nested(flat: dict[str, str]) -> dict[str, Any]:
    """Nest variables as tables: `{"prices_cloud_input": "1"}` -> `{"prices": {"cloud_input": "1"}}`."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        prefix = next((table_name for table_name in _TABLES if name.startswith(f"{table_name}_")), None)
        if prefix is None or name in _KNOWN:
            nested[name] = value
        else:
            nested.setdefault(prefix, {})[name.removeprefix(f"{prefix}_")] = value
    return nested


def _listed(given: dict[str, Any]) -> dict[str, Any]:
    """Split comma-separated variables into lists: `UPDRAFT_PRIVACY_BUILTIN=email,iban`."""
    listed: dict[str, Any] = {
        name: _names(given[name]) for name in ("allowed_hosts", "allowed_origins") if name in given
    }
    listed |= {name: _pairs(name, given[name]) for name in _PAIRS if name in given}
    for name, lists in (("local_options", ("adapters",)), ("privacy", ("builtin", "presidio"))):
        if (nested := table(given.get(name))) is not None:
            listed[name] = nested | {each: _names(nested[each]) for each in lists if each in nested}
    return {**given, **listed}


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _pairs(setting: str, text: str) -> dict[str, str]:
    """Parse comma-separated pairs: `UPDRAFT_CLOUD_QUERY=api-version=2024-10-21`. Raises ConfigurationError."""
    pairs = [item.partition("=") for item in _names(text)]
    if not all(equals for _, equals, _ in pairs):
        raise ConfigurationError(f"{setting} in the environment must be name=value, comma-separated.", param=setting)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _decode(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, (str, Path)):
        try:
            return Path(value).expanduser()
        except RuntimeError as error:  # no home folder
            raise ValueError(f"{value}: {error}") from error
    raise ValueError(f"expected {kind.__name__}, got {value!r}")
