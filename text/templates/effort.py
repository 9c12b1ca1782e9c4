"""Reasoning efforts of requests, as variables of chat templates."""

from __future__ import annotations

import re
from typing import Any

_LEVELS = ("minimal", "low", "medium", "high", "xhigh", "max")
_SWITCHES = ("enable_thinking", "thinking")
_EFFORTS = ("reasoning_effort", "reasoning_strength")
_BUDGETS = ("thinking_budget", "reasoning_budget")
_TOKENS = {"minimal": 512, "low": 1024, "medium": 4096, "high": 16384}  # reasoning budgets in tokens


def effort_variables(source: str, effort: str | None) -> dict[str, Any]:
    """Return the chat template's variables that set a reasoning effort; empty if the template has no such variable.

    Efforts other than `none` and the usual levels are ignored, because a template would write them into the prompt.
    """
    if effort == "none":
        return dict.fromkeys(_read(source, _SWITCHES), False)
    if effort not in _LEVELS:
        return {}
    known = [level for level in _LEVELS if f"'{level}'" in source or f'"{level}"' in source]
    level = effort
    if effort not in known and len(known) > 1:  # the template accepts only these levels, so use the closest
        level = min(reversed(known), key=lambda name: abs(_LEVELS.index(name) - _LEVELS.index(effort)))
    variables = dict.fromkeys(_read(source, _SWITCHES), True) | dict.fromkeys(_read(source, _EFFORTS), level)
    return variables | (dict.fromkeys(_read(source, _BUDGETS), _TOKENS[effort]) if effort in _TOKENS else {})


def _read(source: str, names: tuple[str, ...]) -> list[str]:
    """Return those of `names` that the template reads as variables."""
    return [
        name for name in names if re.search(rf"\b(?:if|not|and|or)\s+{name}\b|(?<![.\w]){name}\s*(?:\||is\b)", source)
    ]
