"""Running the command as a person does: `python -m updraft` in a process, with a home of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Updraft = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """No settings and no state but the test's own, and this tree as `updraft`."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("UPDRAFT_")}
    path = os.pathsep.join(filter(None, [str(ROOT / ".typing"), os.environ.get("PYTHONPATH")]))
    return {**ours, "PYTHONPATH": path, "UPDRAFT_HOME": str(tmp_path / "home"), "COLUMNS": "120", "NO_COLOR": "1"}


@pytest.fixture
def updraft(environment: dict[str, str], tmp_path: Path) -> Updraft:
    """Run `updraft ARGUMENTS`; `env` adds to the environment, `input` is what it reads."""

    def run(*arguments: str, env: dict[str, str] | None = None, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # type: ignore[call-overload, no-any-return]
            [sys.executable, "-m", "updraft", *arguments],
            env={**environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            cwd=tmp_path,
            **options,
        )

    return run
