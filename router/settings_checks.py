"""Checks of settings before anything is loaded: what cannot work is an error at construction, not of each request."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import get_args

from ..protocol.errors import ConfigurationError, InvalidRequestError, StorageError
from ..protocol.safety.private_files import has_file
from ..protocol.safety.shared_file import SharedFile
from ..protocol.wal import tables
from .accounting.ledger import Ledger
from .config import RouterConfig
from .factory import (
    check_startable,
    endpoint_of,
    has_model_file,
    middle_endpoint,
    model_file,
    options_of,
)
from .privacy.rules import PrivacyRules
from .storage.file_store import DATABASE
from .tiers.connection import check_endpoint


def check_settings(config: RouterConfig) -> None:
    """Raise ConfigurationError for settings that cannot work. No model is loaded, and no server is asked.

    A local model that cannot be loaded is no reason where there is a cloud, which answers alone.
    """
    check_startable(config)
    PrivacyRules(config.privacy)
    _check_ledger(config.ledger)
    _check_database("store", config.store, "answers")
    _check_database("experience", config.experience, "observations")
    _check_database("files", config.files and config.files / DATABASE, "files")
    if config.cloud_url is not None and not config.offline:
        for endpoint in (endpoint_of(config, config.cloud_url), *(middle_endpoint(config, m) for m in config.middle)):
            check_endpoint(endpoint)
    if has_model_file(config):
        _check_options(config)


def _check_ledger(path: Path | None) -> None:
    """A file that is no ledger, or one of a newer version. The router does without a ledger that cannot be opened."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise ConfigurationError(f"ledger: {path} is a folder: name a file.", param="ledger")
        if path.is_file():
            Ledger(path, read_only=True).close()
    except (StorageError, OSError):
        return


def _check_database(setting: str, path: Path | None, table: str) -> None:
    """Raise ConfigurationError for a path that holds something else. A database that cannot be read is no reason."""
    if path is None:
        return
    problem = ""
    try:
        if setting == "files" and path.parent.is_file():
            problem = f"{path.parent} is a file: name a folder."
        elif path.is_dir():
            problem = f"{path} is a folder: name a file."
        elif path.is_file():
            with closing(SharedFile(path, "", setting).open(tables, read_only=True)) as connection:
                found = tables(connection)
            problem = f"{path} holds something else: name another file." if found and table not in found else ""
    except StorageError as error:
        if getattr(error.__cause__, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
            problem = f"{path} is no SQLite database: name another file, or move it away."
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
    if config.tool_parser not in names:
        raise ConfigurationError(f"tool_parser must be one of {', '.join(names)}.", param="tool_parser")
    if config.cloud_url is not None and not config.offline:
        return
    adapters = ((each.path, "local_options.adapters") for each in options_of(config).adapters)
    templates = [(config.chat_template, "chat_template")] if config.chat_template not in (None, "chatml") else []
    for path, setting in ((model_file(config), "local"), *adapters, *templates):
        if not has_file(Path(path or "")):
            models = " `updraft models` lists the models that were pulled." if setting == "local" else ""
            raise ConfigurationError(f"{setting}: there is no file {path}.{models}", param=setting)
