"""Loads a policy folder of either kind: of a pair with outcomes of its own runs, or of one known by graded prompts."""

from __future__ import annotations

from pathlib import Path

from .files import settled
from .graph_files import read_card
from .text_policy import KIND, TextPolicy
from .trace_policy import Policy

__all__ = ["load_policy"]


def load_policy(folder: Path) -> Policy | TextPolicy:
    """Raises ConfigurationError if it is missing, damaged, or made by another version."""
    return settled(folder, _load)


def _load(folder: Path) -> Policy | TextPolicy:
    return TextPolicy.load(folder) if read_card(folder).get("kind") == KIND else Policy.load(folder)
