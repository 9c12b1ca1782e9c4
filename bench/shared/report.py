"""The one form of a benchmark's result: what was measured, where, with what, and flat named numbers."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...local_engine.machine.machine import this_machine

PACKAGES = (
    *("updraft-llm", "torch", "triton", "transformers", "flashinfer-python"),
    *("llama-cpp-python", "onnxruntime", "openai", "numpy"),
)
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a benchmark, with the circumstances that explain it."""

    commit: str
    date: str
    # Also the GPU, its CUDA version and its driver, where torch has been asked for one in this process.
    machine: dict[str, Any]
    versions: dict[str, str]
    config: dict[str, Any]
    # By dotted name.
    metrics: dict[str, float]

    @classmethod
    def of(cls, config: Mapping[str, Any], metrics: Mapping[str, Any]) -> Report:
        """A report about this machine and this checkout; nested `metrics` are flattened, what is no number left out."""
        return cls(_commit(), _today(), _machine(), _versions(), dict(config), flatten(metrics))

    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("commit", "date", "machine", "versions", "config", "metrics")}

    def write(self, path: Path) -> None:
        write_json(path, self.fields())


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`: the numbers among `values`, by dotted name."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[prefix + name] = value
    return flat


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _commit() -> str:
    """The commit of the checkout, `+` behind it where files differ. Of an installed package, or a copy without its
    history, what `UPDRAFT_COMMIT` says, else `unknown`."""
    here = Path(__file__).parent
    try:
        commit = _git(here, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("UPDRAFT_COMMIT", "unknown")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _machine() -> dict[str, Any]:
    machine = this_machine()
    return {
        "cpu": machine.processor,
        "cores": machine.processors,
        "memory_gb": round(machine.memory / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        **_gpu(),
    }


def _gpu() -> dict[str, str]:
    torch = sys.modules.get("torch")  # not imported for this: most benches do without
    if torch is None or not torch.cuda.is_available():
        return {}
    driver = {"driver": _DRIVER.read_text().splitlines()[0]} if _DRIVER.exists() else {}
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, **driver}


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
