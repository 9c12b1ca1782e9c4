"""Folders of the user's policies on a machine, and of what use teaches."""

from __future__ import annotations

import re
from pathlib import Path

from ...protocol import settings
from .graph_files import CARD_NAME

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def policy_folder_of(models: dict[str, str]) -> Path:
    """The folder of the pair's calibrated policy in the state folder, whether it is there or not.

    Names that differ only in what a path cannot hold share a folder; the card inside says whose it is.
    """
    name = "--".join(_UNSAFE.sub("_", models[tier]).strip(".") or "_" for tier in ("local", "cloud"))
    return policies_folder() / name


def policies_folder() -> Path:
    """The folder with the policies of all pairs."""
    return settings.state_folder() / "policies"


def named_folder(name: str) -> Path:
    """The folder of the policy that `updraft policy list` shows under this name, else the folder at this path."""
    known = policies_folder() / Path(name).name
    return known if known.name == name and (known / CARD_NAME).is_file() else Path(name).expanduser()


def experience_file() -> Path:
    """The file in which routers keep what use teaches, unless they are told otherwise."""
    return settings.state_folder() / "experience.sqlite3"
