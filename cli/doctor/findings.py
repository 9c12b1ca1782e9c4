"""The result of a check of `updraft doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """Result of one check. `fix` is the next step; empty if nothing has to be done."""

    name: str
    status: Literal["ok", "warn", "fail"]
    finding: str
    fix: str = ""
