"""Places of settings and state on a machine, and the `UPDRAFT_*` variables that exist."""

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
# Variables that are no settings of the router, and what they do. A settings reader tells them from a typo.
PROCESS_VARIABLES = {
    "UPDRAFT_HOME": "One folder for settings and state, instead of the user's folders.",
    "UPDRAFT_CONFIG": "The settings file.",
    "UPDRAFT_MODELS": "The folder of pulled models.",
    "UPDRAFT_DEVICE": "Where a node computes: `cpu`, `cuda` or `cuda:NUMBER`.",
    "UPDRAFT_DEBUG": "`1` shows tracebacks instead of one line.",
    "UPDRAFT_LOG_FORMAT": "`json` writes the logs of servers as an object a line; `--log-format` goes first.",
    "UPDRAFT_NODE_API_KEY": "The key that the gateway sends to its nodes.",
    "UPDRAFT_GATEWAY_DB": "The gateway's ledger, as `--db`: its URL holds a password.",
    "UPDRAFT_GATEWAY_LIMITS_URL": "The server of the gateways' limits, as `--limits-url`.",
    "UPDRAFT_COMMIT": "The commit that `updraft bench` reports, in a copy without its history.",
    "UPDRAFT_TEST_SMOLLM2": "The file of smollm2, for tests that want a real model.",
    "UPDRAFT_LLAMA_KERNELS": "`off` leaves llama.cpp's own kernels in place of ours.",
}


def config_file() -> Path:
    """`UPDRAFT_CONFIG`, else `config.toml` in `UPDRAFT_HOME` or in the user's configuration folder."""
    if explicit := os.environ.get("UPDRAFT_CONFIG"):
        return Path(explicit).expanduser()
    if home := os.environ.get("UPDRAFT_HOME"):
        return Path(home).expanduser() / "config.toml"
    return _user_folder("config") / "config.toml"


def state_folder() -> Path:
    """`UPDRAFT_HOME`, else the user's state folder. Not created here."""
    if home := os.environ.get("UPDRAFT_HOME"):
        return Path(home).expanduser()
    return _user_folder("state")


def own_folders() -> tuple[Path, ...]:
    """The folders that hold nothing but Updraft's settings and state."""
    if home := os.environ.get("UPDRAFT_HOME"):
        return (Path(home).expanduser(),)
    return _user_folder("state"), _user_folder("config")


def _user_folder(kind: Literal["config", "state"]) -> Path:
    import platformdirs

    find = platformdirs.user_config_dir if kind == "config" else platformdirs.user_state_dir
    with suppress(RuntimeError):  # newer versions raise it without HOME and an entry in passwd, older ones return "~"
        if (folder := Path(find("updraft", appauthor=False))).is_absolute():
            return folder
    return Path("/nonexistent/updraft")


def models_folder() -> Path:
    """`UPDRAFT_MODELS` (models are large: they may belong on another disk), else `models` in the state folder."""
    if explicit := os.environ.get("UPDRAFT_MODELS"):
        return Path(explicit).expanduser()
    return state_folder() / "models"


def read_toml(path: Path) -> dict[str, Any]:
    """The file's table; empty if there is no file. Raises ConfigurationError on an unreadable or malformed one."""
    try:
        return tomllib.loads(read_text(path, ConfigurationError))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except PermissionError as error:
        if not _is_hidden(path):
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
        _say_hidden(path)
        return {}
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error


def _is_hidden(path: Path) -> bool:
    """Whether a folder of another user hides the file. `UPDRAFT_CONFIG` names a file that has to be readable."""
    try:
        path.stat()
    except PermissionError:
        return "UPDRAFT_CONFIG" not in os.environ
    return False


@functools.cache
def _say_hidden(path: Path) -> None:
    """Once in a process: settings are read again and again."""
    log.warning("Settings in %s are ignored: this user may not search its folder.", path)


def environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The settings given as `UPDRAFT_NAME=value`, as `{"name": "value"}`, without the process variables."""
    found = os.environ if environ is None else environ
    return {
        key.removeprefix(ENV_PREFIX).lower(): value
        for key, value in found.items()
        if key.startswith(ENV_PREFIX) and key not in PROCESS_VARIABLES
    }
