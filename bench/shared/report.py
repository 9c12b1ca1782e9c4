"""The common format of benchmark results: commit, machine, versions and options, and numbers by name."""

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
    """Result of a benchmark, with the circumstances that explain it."""

    commit: str
    date: str
    # Machine, including GPU, CUDA version and driver if this process uses torch on a GPU.
    machine: dict[str, Any]
    versions: dict[str, str]
    config: dict[str, Any]
    # Metrics by dotted name.
    metrics: dict[str, float]

    @classmethod
    def of(cls, config: Mapping[str, Any], metrics: Mapping[str, Any]) -> Report:
        """Create a report on this machine and checkout; `metrics` are flattened, and non-numbers dropped."""
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        return cls(_commit(), date, _machine(), _versions(), dict(config), flatten(metrics))

    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("commit", "date", "machine", "versions", "config", "metrics")}

    def write(self, path: Path) -> None:
        write_json(path, self.fields())


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Flatten nested values: `{"a": {"b": 1}}` -> `{"a.b": 1}`. Keeps only numbers."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[prefix + name] = value
    return flat


def _commit() -> str:
    """Return the commit of the checkout, with a `+` if files differ. Without a Git history (an installed package or a
    copy) return `UPDRAFT_COMMIT`, or else `unknown`."""
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
    torch = sys.modules.get("torch")  # not imported here, because most benchmarks do without torch
    if torch is None or not torch.cuda.is_available():
        return {}
    driver = {"driver": _DRIVER.read_text().splitlines()[0]} if _DRIVER.exists() else {}
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, **driver}


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
