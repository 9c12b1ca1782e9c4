"""`make gpu`: the tests that need a CUDA device, then every measurement that needs one, in parts.

The most important parts come first, and all parts together take at most ten minutes. Each part has its own time limit
and runs even if others fail. Figures are printed as soon as they are known, and written to `<gpu>-<date>-<part>.json`.
A summary table comes last.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...protocol.safety.system import child_environment, python_command

#: Packages that the parts import, except torch, which is checked first.
NEEDED = (
    *("hypothesis", "jinja2", "llguidance", "msgspec", "numpy", "platformdirs", "psutil", "pytest", "pytest_timeout"),
    *("rich", "safetensors", "tokenizers", "transformers", "triton", "typer"),
)
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
_TOTAL_S = 570
_GRACE_S = 5  # seconds between SIGTERM and SIGKILL


@dataclass(frozen=True, slots=True)
class Part:
    """A command `python -m WORDS`, limited to `seconds`. `{json}` in `words` is replaced by the path of the output."""

    name: str
    seconds: int
    words: tuple[str, ...]


def _engine(*words: str) -> tuple[str, ...]:
    return ("updraft", "bench", "engine", "--device", "cuda", *words, "--json", "{json}")


def _groups(*names: str) -> tuple[str, ...]:
    return tuple(word for name in names for word in ("--only", name))


PARTS = (
    Part("tests", 120, ("updraft.bench.gpu.device_tests", "tests/kernels/gpu", "tests/cloud_engine/gpu")),
    Part(
        "llama-3.1-8b",
        170,
        _engine("--shape", "llama-3.1-8b", "--peers", "continuous")
        + _groups("decode", "batches", "overlap", "escalation", "roofline", "prefill"),
    ),
    Part(
        "qwen3-0.6b",
        90,
        _engine("--shape", "qwen3-0.6b", "--max-num-seqs", "256", "--peers", "continuous")
        + _groups("decode", "batches", "gaps"),
    ),
    Part("drafts", 70, _engine("--shape", "llama-3.1-8b", "--draft-shape", "qwen3-0.6b") + _groups("oracle")),
    Part("kernels", 120, ("updraft", "bench", "kernels", "--short", "--json", "{json}")),
)


def main(arguments: Sequence[str]) -> int:
    """Run the parts. Return 0 if all succeed and no limit is missed, 2 without a device or required packages."""
    parser = argparse.ArgumentParser(
        prog="make gpu ARGS=...", description="GPU tests and measurements, in ten minutes."
    )
    parser.add_argument("--only", action="append", choices=[part.name for part in PARTS], help="repeatable")
    chosen = parser.parse_args(arguments).only
    gpu = _gpu_name()
    if gpu is None:
        sys.stderr.write("make gpu needs a CUDA device, but torch finds none on this machine.\n")
        return 2
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        sys.stderr.write(f"make gpu needs packages that are not installed: pip install {' '.join(missing)}\n")
        return 2
    from .summary import show_summary

    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    stem = f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}-{date}"
    codes = run_parts([part for part in PARTS if chosen is None or part.name in chosen], RESULTS, stem)
    holds = show_summary(RESULTS, stem, codes)
    return int(any(codes.values()) or not holds)


def run_parts(parts: Sequence[Part], results: Path, stem: str) -> dict[str, int]:
    """Run the parts, and return exit statuses by name; 124 if a part was stopped or had no time left. Figures go to
    `results/<stem>-<part>.json`, which replaces the file of an earlier run that day."""
    results.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + _TOTAL_S
    codes: dict[str, int] = {}
    for part in parts:
        started = time.monotonic()
        json_path = results / f"{stem}-{part.name}.json"
        json_path.unlink(missing_ok=True)
        seconds = min(part.seconds, max(0.0, ends - started))
        codes[part.name] = run(tuple(word.format(json=json_path) for word in part.words), seconds)
        sys.stderr.write(f"{part.name}: exit status {codes[part.name]} after {time.monotonic() - started:.0f} s\n")
    return codes


def run(words: Sequence[str], seconds: float) -> int:
    """Run `python -m` with `words` in the root of the checkout, and return the exit status; 124 after `seconds`.

    `.typing` makes the checkout importable as `updraft`. All child processes are stopped when the command ends.
    """
    paths = filter(None, [str(ROOT / ".typing"), os.environ.get("PYTHONPATH")])
    environment = child_environment(PYTHONPATH=os.pathsep.join(paths))
    process = subprocess.Popen(python_command("-m", *words), cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"{words[0]} stopped after {seconds:.0f} s\n")
        return 124
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the process with all its children, which would otherwise keep the device."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def _gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
