"""Command line and environment for Python child processes that must not import modules from the working folder.

`python -m` puts the working folder first on the module path, so a `json.py` in a downloaded model's folder would run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Folder that contains this package. Even as working folder it is trusted, as its owner can change the package anyway.
_HOME = os.path.abspath(Path(__file__).parents[3])  # noqa: PTH100 - keep links: the package may be a link


def python_command(*arguments: str) -> list[str]:
    """Return a command that runs this interpreter without the working folder on the module path."""
    return [sys.executable, "-P", *arguments]


def module_path() -> dict[str, str]:
    """Return variables that give child processes this process's module path, without the working folder."""
    return {"PYTHONPATH": os.pathsep.join(_safe(sys.path)), "PYTHONSAFEPATH": "1"}


def child_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with `module_path` and `variables` added."""
    return {**os.environ, **module_path(), **variables}


def _safe(path: Sequence[str]) -> list[str]:
    """Return `path` without the working folder, unless that folder contains the package."""
    try:
        entries = [os.path.abspath(entry) for entry in path]  # noqa: PTH100 - as above
    except FileNotFoundError:  # the working folder was deleted, so nothing can be imported relative to it
        entries = list(filter(os.path.isabs, path))
    return [entry for entry in entries if entry == _HOME or not _is_working_folder(entry)]


def _is_working_folder(folder: str) -> bool:
    try:
        return Path(folder).samefile(Path.cwd())
    except OSError:  # a folder is missing, so nothing can be imported from it
        return False
