"""The result of a check of `updraft doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """One finding. `fix` is the next step, empty where there is nothing to do."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""
