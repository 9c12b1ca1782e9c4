"""Paths of settings and state files, and the known `UPDRAFT_*` environment variables."""

from __future__ import annotations

import functools
import logging
import os
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from .errors import ConfigurationError
from .unicode_forms import read_text

log = logging.getLogger("updraft")

ENV_PREFIX = "UPDRAFT_"
# Variables that are not router settings, with descriptions. The settings reader treats other unknown names as typos.
PROCESS_VARIABLES = {
    "UPDRAFT_HOME": "Folder for settings and state, instead of the user's configuration and state folders.",
    "UPDRAFT_CONFIG": "Path of the settings file.",
    "UPDRAFT_MODELS": "Folder of downloaded models.",
    "UPDRAFT_DEVICE": "Device that a node computes on: `cpu`, `cuda` or `cuda:NUMBER`.",
    "UPDRAFT_DEBUG": "`1` shows full tracebacks instead of one-line errors.",
    "UPDRAFT_LOG_FORMAT": "`json` writes server logs as one JSON object per line; `--log-format` takes precedence.",
    "UPDRAFT_NODE_API_KEY": "API key that the gateway sends to its nodes.",
    "UPDRAFT_GROUP_KEY": "Key of machines that share a model (`updraft node --nnodes`).",
    "UPDRAFT_NODE_ADMIN_KEY": "Key of a node's operator for `/sleep`, `/wake_up` and `/is_sleeping`.",
    "UPDRAFT_GATEWAY_LEDGER": "URL of the gateway's ledger, like `--ledger`; keeps the password off the command line.",
    "UPDRAFT_GATEWAY_LIMITS_URL": "URL of the server for limits shared by gateways, like `--limits-url`.",
    "UPDRAFT_COMMIT": "Commit that `updraft bench` reports if the source has no Git history.",
    "UPDRAFT_TEST_SMOLLM2": "Path of the SmolLM2 model file, for tests with a real model.",
    "UPDRAFT_LLAMA_KERNELS": "`off` uses llama.cpp's original kernels instead of Updraft's.",
}


def config_file() -> Path:
    """Return `UPDRAFT_CONFIG`, else `config.toml` in `UPDRAFT_HOME` or in the user's configuration folder."""
    explicit = os.environ.get("UPDRAFT_CONFIG")
    return Path(explicit).expanduser() if explicit else _folder("config") / "config.toml"


def state_folder() -> Path:
    """Return `UPDRAFT_HOME`, else the user's state folder. The folder may not exist yet."""
    return _folder("state")


def own_folders() -> tuple[Path, ...]:
    """Return the folders that hold only Updraft's settings and state."""
    return _folder("state"), _folder("config")


def _folder(kind: Literal["config", "state"]) -> Path:
    if home := os.environ.get("UPDRAFT_HOME"):
        return Path(home).expanduser()
    import platformdirs

    find = platformdirs.user_config_dir if kind == "config" else platformdirs.user_state_dir
    with suppress(RuntimeError):  # platformdirs finds no home folder; its older versions return "~" instead
        if (folder := Path(find("updraft", appauthor=False))).is_absolute():
            return folder
    return Path("/nonexistent/updraft")


def models_folder() -> Path:
    """Return `UPDRAFT_MODELS` (models may need a larger disk), else `models` in the state folder."""
    explicit = os.environ.get("UPDRAFT_MODELS")
    return Path(explicit).expanduser() if explicit else state_folder() / "models"


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; empty if the file is missing. Raises ConfigurationError if unreadable or malformed."""
    try:
        if path.is_fifo():
            raise ConfigurationError(f"{path} is a pipe: settings are read again, so they need a file.")
        return tomllib.loads(read_text(path, ConfigurationError))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise ConfigurationError(f"{path} is nested too deeply.") from error
    except OSError as error:
        if isinstance(error, PermissionError) and _is_hidden(path):
            _warn_hidden(path)
            return {}
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error


def _is_hidden(path: Path) -> bool:
    """Return whether the file is inaccessible and may be ignored. A file named by `UPDRAFT_CONFIG` must be readable."""
    try:
        path.stat()
    except PermissionError:
        return "UPDRAFT_CONFIG" not in os.environ
    return False


@functools.cache
def _warn_hidden(path: Path) -> None:
    """Log the warning only once per process, since settings are read repeatedly."""
    log.warning("Ignoring settings in %s: this user has no permission to open the folder.", path)


def environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings in `UPDRAFT_NAME=value` variables as `{"name": "value"}`, without `PROCESS_VARIABLES`."""
    variables = os.environ if environ is None else environ
    return {
        key.removeprefix(ENV_PREFIX).lower(): value
        for key, value in variables.items()
        if key.startswith(ENV_PREFIX) and key not in PROCESS_VARIABLES
    }
