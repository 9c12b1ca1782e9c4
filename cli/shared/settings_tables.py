"""`--config`: a TOML table per server command, with a value for each option that is not on the command line."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from ...protocol.errors import ConfigurationError
from .renamed_options import current_name


def _cloud_table(context: typer.Context, file: Path | None) -> None:
    """Read the options of a node or gateway, which has no settings file unless one is given."""
    from ...router.settings_sources import read_settings

    if file is not None:
        tables = read_settings(file)
        if unknown := sorted(tables.keys() - {"node", "gateway"}):
            raise ConfigurationError(f"Unknown key {unknown[0]} in {file}. Its tables are [node] and [gateway].")
        _use(context, tables, file)


def _router_table(context: typer.Context, file: Path | None) -> None:
    """Read the options of `updraft serve`. A given file replaces the user's settings file in the whole process."""
    from ...protocol.settings import config_file
    from ...router.settings_sources import read_settings

    if file is not None:
        os.environ["UPDRAFT_CONFIG"] = str(file.absolute())
    _use(context, read_settings(config_file()), config_file())


CloudConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="TOML",
        is_eager=True,
        exists=True,
        dir_okay=False,
        callback=_cloud_table,
        help="File with options in a table [node] or [gateway]: e.g. max_waiting = 512. Command-line options win.",
    ),
]
RouterConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="TOML",
        is_eager=True,
        exists=True,
        dir_okay=False,
        callback=_router_table,
        help="Settings file; a table [serve] takes options of this command. Command-line options win. [config.toml]",
    ),
]


def _use(context: typer.Context, tables: dict[str, Any], file: Path) -> None:
    """Make the values of the command's table the defaults of its options. Raises ConfigurationError."""
    name = context.command.name or ""
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise ConfigurationError(f"{name} in {file} must be a table: [{name}].", param=name)
    params = {_key(param.opts[0]): param for param in context.command.params if not param.is_eager}
    values: dict[str, Any] = {}
    for key, value in table.items():
        source = f"[{name}] of {file}"
        if (param := params.get(key)) is None:
            raise ConfigurationError(f"Unknown option {key} in {source}. {_suggestion(key, params)}", param=key)
        values[param.name or key] = _checked(param, value, f"{key} in {source}")
    context.default_map = values


def _key(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _suggestion(key: str, params: dict[str, Any]) -> str:
    options = {f"--{name.replace('_', '-')}": name for name in params}
    current = current_name(f"--{key.replace('_', '-')}", options)
    near = [options[current]] if current else get_close_matches(key, params, 1)
    return f"Did you mean {near[0]}?" if near else "--help-all lists the options."


def _checked(param: Any, value: Any, source: str) -> Any:
    """Return a value as typer expects it. Raises ConfigurationError if its TOML type does not fit the option."""
    if param.multiple and not isinstance(value, list):
        raise ConfigurationError(f'{source} must be a list: ["...", "..."].')
    if param.is_flag and not isinstance(value, bool):
        raise ConfigurationError(f"{source} must be true or false.")
    if not param.multiple and (isinstance(value, dict | list) or (isinstance(value, bool) and not param.is_flag)):
        raise ConfigurationError(f"{source} must be a text or a number.")
    return [str(each) for each in value] if isinstance(value, list) else value if param.is_flag else str(value)
