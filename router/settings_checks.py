"""Checks of the settings before anything is loaded, so that faulty settings fail at construction."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import get_args

from ..protocol.errors import ConfigurationError, InvalidRequestError, StorageError
from ..protocol.safety.database import SharedFile, tables
from ..protocol.safety.private_files import has_file
from .accounting.ledger import Ledger
from .config import RouterConfig
from .factory import check_startable, endpoint_of, has_model_file, model_file, options_of, tier_endpoint
from .privacy.rules import PrivacyRules
from .storage.file_store import DATABASE
from .tiers.connection import check_endpoint


def check_settings(config: RouterConfig) -> None:
    """Raise ConfigurationError for settings that cannot work, without loading a model or asking a server. A faulty
    model file, proxy or certificate of one tier is no error if the other tier can answer."""
    check_startable(config)
    PrivacyRules(config.privacy)
    _check_ledger(config.ledger)
    _check_database("store", config.store, "answers")
    _check_database("experience", config.experience, "observations")
    _check_database("files", config.files and config.files / DATABASE, "files")
    if config.cloud_url is not None and not config.offline:
        middle = [tier_endpoint(config, each) for each in config.middle_tiers]
        for endpoint in (endpoint_of(config, config.cloud_url), *middle):
            try:
                check_endpoint(endpoint)
            except ConfigurationError as error:
                if config.local is None or error.param:  # a faulty environment (no param) leaves the local model
                    raise
    if has_model_file(config):
        _check_options(config)


def _check_ledger(path: Path | None) -> None:
    """Raise ConfigurationError for a file that is not a ledger or has a newer version. Unreadable files are allowed."""
    if path is None:
        return
    with suppress(StorageError, OSError):
        if path.exists() and not path.is_file():
            raise ConfigurationError(f"ledger: {path} is a {'folder' if path.is_dir() else 'device'}.", param="ledger")
        if path.is_file():
            Ledger(path, read_only=True).close()


def _check_database(setting: str, path: Path | None, table: str) -> None:
    """Raise ConfigurationError for a path that is not a database with `table`. Unreadable databases are allowed."""
    if path is None:
        return
    problem = ""
    try:
        if setting == "files" and path.parent.is_file():
            problem = f"{path.parent} is a file, not a folder."
        elif path.exists() and not path.is_file():
            problem = f"{path} is a {'folder' if path.is_dir() else 'device'}, not a file."
        elif path.is_file():
            with closing(SharedFile(path, "", setting).open(tables, read_only=True)) as connection:
                names = tables(connection)
            problem = f"{path} is another database. Choose another file." if names and table not in names else ""
    except StorageError as error:
        if getattr(error.__cause__, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
            problem = f"{path} is not an SQLite database. Choose another file, or move it."
    except OSError:
        return
    if problem:
        raise ConfigurationError(f"{setting}: {problem}", param=setting)


def _check_options(config: RouterConfig) -> None:
    from ..text.tool_formats import FormatName

    try:
        options_of(config).check()
    except InvalidRequestError as error:
        raise ConfigurationError(f"local_options: {error.message}", param="local_options") from error
    names = (*get_args(FormatName), "auto")
    if config.tool_call_parser not in names:
        raise ConfigurationError(f"tool_call_parser must be one of {', '.join(names)}.", param="tool_call_parser")
    if config.cloud_url is not None and not config.offline:
        return
    adapters = ((each.path, "local_options.adapters") for each in options_of(config).adapters)
    templates = [(config.chat_template, "chat_template")] if config.chat_template not in (None, "chatml") else []
    for path, setting in ((model_file(config), "local"), *adapters, *templates):
        if not has_file(Path(path or "")):
            models = " `updraft models` lists pulled models." if setting == "local" else ""
            raise ConfigurationError(f"{setting}: there is no file {path}.{models}", param=setting)
