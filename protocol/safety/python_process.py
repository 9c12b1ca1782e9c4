"""The start of every Python process of ours, so that none of them runs code of the folder it is started in.

`python -m` puts the working folder first on the module path: a `json.py` in a downloaded model's folder would run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

# The folder that holds this package, as it was found: who can write there can change the package itself.
_HOME = os.path.abspath(Path(__file__).parents[3])  # noqa: PTH100 - links are kept: the package may be one


def python_command(*arguments: str) -> list[str]:
    """This interpreter with `arguments`, without the working folder on its module path."""
    return [sys.executable, "-P", *arguments]


def module_path() -> dict[str, str]:
    """The variables by which a child, and what it starts, finds the modules of this process and no others."""
    return {"PYTHONPATH": os.pathsep.join(_safe(sys.path)), "PYTHONSAFEPATH": "1"}


def child_environment(**variables: str) -> dict[str, str]:
    """This process's environment with `module_path` and `variables`."""
    return {**os.environ, **module_path(), **variables}


def _safe(path: Sequence[str]) -> list[str]:
    """`path` without the working folder, unless that holds the package."""
    found = [os.path.abspath(entry) for entry in path]  # noqa: PTH100 - as above
    return [entry for entry in found if entry == _HOME or not _is_here(entry)]


def _is_here(folder: str) -> bool:
    try:
        return Path(folder).samefile(Path.cwd())
    except OSError:  # one of them is gone: nothing can be imported from it
        return False
