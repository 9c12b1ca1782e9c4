"""Folders of the user's policies, and the experience file."""

from __future__ import annotations

import re
from pathlib import Path

from ...protocol import settings
from .graph_files import CARD_NAME

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def policy_folder_of(models: dict[str, str]) -> Path:
    """Return the folder for the pair's calibrated policy in the state folder, whether or not it exists.

    Pairs whose names differ only in characters that a path cannot contain share a folder; the card names the pair.
    """
    name = "--".join(_UNSAFE.sub("_", models[tier]).strip(".") or "_" for tier in ("local", "cloud"))
    return policies_folder() / name


def policies_folder() -> Path:
    return settings.state_folder() / "policies"


def named_folder(name: str) -> Path:
    """Return the folder of the policy that `updraft policy list` shows as `name`, else the folder at that path."""
    folder = policies_folder() / Path(name).name
    return folder if folder.name == name and (folder / CARD_NAME).is_file() else Path(name).expanduser()


def experience_file() -> Path:
    """Return the default path of the experience file."""
    return settings.state_folder() / "experience.sqlite3"
