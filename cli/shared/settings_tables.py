"""`--config`: a TOML table per server command, with a value for each option that is not on the command line."""

from __future__ import annotations

import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from ...protocol.errors import ConfigurationError
from .renamed_options import current_name


def _cloud_table(context: typer.Context, file: Path | None) -> None:
    """Read the options of a node or gateway from `file`. There is no default file."""
    from ...router.settings_sources import read_settings

    if file is not None:
        tables = read_settings(file)
        if unknown := sorted(tables.keys() - {"node", "gateway"}):
            raise ConfigurationError(f"Unknown key {unknown[0]} in {file}. Its tables are [node] and [gateway].")
        _use(context, tables, file)


def _router_table(context: typer.Context, file: Path | None) -> None:
    """Read the options of `updraft serve`. A given file replaces the user's settings file in the whole process."""
    from ...protocol.settings import config_file
    from ...router.config import RouterConfig
    from ...router.settings_sources import read_settings

    if file is not None:
        os.environ["UPDRAFT_CONFIG"] = str(file.absolute())
    _use(context, read_settings(config_file()), config_file())
    RouterConfig.check_renamed(context.default_map or {}, f" in [serve] of {config_file()}")


def _option(callback: Callable[..., None], text: str) -> Any:
    text += " Command-line options win."
    return typer.Option("--config", metavar="TOML", is_eager=True, exists=True, callback=callback, help=text)


NodeConfigFile = Annotated[Path | None, _option(_cloud_table, "File with options in a table [node].")]
GatewayConfigFile = Annotated[Path | None, _option(_cloud_table, "File with options in a table [gateway].")]
RouterConfigFile = Annotated[
    Path | None, _option(_router_table, "Settings file [config.toml]; a table [serve] takes options of this command.")
]


def _key(option: str) -> str:
    """Return an option's name in a table."""
    return option.removeprefix("--").replace("-", "_")


def _use(context: typer.Context, tables: dict[str, Any], file: Path) -> None:
    """Make the values of the command's table the defaults of its options. Raises ConfigurationError."""
    name = context.command.name or ""
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise ConfigurationError(f"{name} in {file} must be a table: [{name}].", param=name)
    options: dict[str, Any] = {param.opts[0]: param for param in context.command.params if not param.is_eager}
    values: dict[str, Any] = {}
    for key, value in table.items():
        option = f"--{key.replace('_', '-')}"
        if (param := options.get(option)) is None:
            names = [name for param in options.values() for name in (*param.opts, *param.secondary_opts)]
            if (current := current_name(option, names)) is not None:
                now = _key(current.removeprefix("--no-")) + ", with the opposite value" * current.startswith("--no-")
                raise ConfigurationError(f"{key} in [{name}] of {file} is now {now}.", param=key)
            near = get_close_matches(key, map(_key, options), 1)
            hint = f"Did you mean {near[0]}?" if near else "--help-all lists the options."
            raise ConfigurationError(f"Unknown option {key} in [{name}] of {file}. {hint}", param=key)
        kind = list if param.multiple else bool if param.is_flag else (str, int, float)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            needed = "a list" if param.multiple else "true or false" if param.is_flag else "a text or a number"
            raise ConfigurationError(f"{key} in [{name}] of {file} must be {needed}.", param=key)
        values[param.name] = value if param.is_flag else [*map(str, value)] if isinstance(value, list) else str(value)
    context.default_map = values
