"""Check of the installed llama.cpp in a subprocess, because a broken build crashes its process.

`updraft doctor` calls `probe`. `ensure_usable_build` runs before the first load and remembers a success.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import logging
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..protocol import settings
from ..protocol.errors import ConfigurationError, MissingDependencyError, UpdraftError
from ..protocol.requests import Message
from ..protocol.safety.private_files import private_file
from ..protocol.sampling import SamplingParams
from .llama.build import PACKAGE, REBUILD_COMMAND, build_key
from .llama.kernels import SWITCH, KernelsInUse
from .machine.child_process import ChildOutcome, expect_crashes, run_child

_log = logging.getLogger("updraft.local")
_first_use = logging.getLogger("updraft.local.first_use")
Status = Literal["ok", "not_installed", "import_failed", "crashed", "timeout", "failed"]


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Result of a test of llama.cpp. The last three fields are set only if the test generated tokens."""

    # "crashed": killed by a signal; "failed": an ordinary error, such as a damaged model file.
    status: Status
    detail: str
    # Suggested remedy; may be empty.
    advice: str = ""
    tokens_per_s: float | None = None
    # Build features, as llama.cpp prints them.
    system_info: str = ""
    # Updraft kernels that were in use.
    kernels: KernelsInUse = field(default_factory=KernelsInUse)


def probe(model_path: Path, *, timeout_s: float = 60.0) -> ProbeReport:
    """Generate a few tokens with `model_path` in a subprocess and report the result."""
    if importlib.util.find_spec("llama_cpp") is None:
        return ProbeReport(
            "not_installed", f"{PACKAGE} is not installed.", f"Build and install it with: {REBUILD_COMMAND}"
        )
    child = run_child(__name__, [str(model_path)], timeout_s=timeout_s)
    if child.status == "timeout":
        return ProbeReport(
            "timeout",
            f"Generating a few tokens took more than {timeout_s:.0f} s.",
            "If the machine is not overloaded, the build is at fault (OpenMP is slow on shared cores). "
            f"Rebuild with: {REBUILD_COMMAND}",
        )
    return _report(child)


def ensure_usable_build(model_path: Path) -> None:
    """Probe once per machine and build, and remember a success in the state folder.

    Raises MissingDependencyError if llama-cpp-python is not installed or cannot be imported, and ConfigurationError if
    it crashes, hangs or fails; each message names a remedy.
    """
    remembered = settings.state_folder() / "llama-build-ok"
    key = build_key()
    try:
        if key and remembered.read_text(encoding="ascii", errors="replace") == key:
            return
    except OSError as error:  # usually the file does not exist yet; on any error, probe again
        _log.debug("Could not read the last probe result: %s", error)
    _first_use.info("Testing llama.cpp in a separate process; this happens once per machine and build.")
    report = probe(model_path)
    if report.status in ("not_installed", "import_failed"):
        raise MissingDependencyError(f"{report.detail} {report.advice}")
    if report.status != "ok":
        raise ConfigurationError(f"The local engine does not work on this machine: {report.detail} {report.advice}")
    try:
        private_file(remembered).write_text(key, encoding="ascii")
    except OSError as error:  # on a read-only machine, every start probes again
        _log.info("Could not save the probe result, so the next start tests llama.cpp again: %s", error)


def _report(child: ChildOutcome) -> ProbeReport:
    rebuild = f"Rebuild it with options for this processor: {REBUILD_COMMAND}"
    if child.status == "crashed":
        return ProbeReport("crashed", f"llama.cpp crashed with {child.detail} while generating.", rebuild)
    if child.status == "failed":
        return ProbeReport("failed", f"The probe failed with {child.detail}: {child.complaints}", rebuild)
    result = child.result
    if "import_error" in result:
        return ProbeReport("import_failed", result["import_error"], rebuild)
    if "error" in result:
        return ProbeReport("failed", result["error"])
    if wrong := result["wrong_kernels"]:
        advice = f"Set {SWITCH}=off, to use llama.cpp's own code. {rebuild}"
        return ProbeReport("failed", f"Some kernels in {PACKAGE} give wrong results: {', '.join(wrong)}.", advice)
    features = result["system_info"]
    risky = [name for name in ("OPENMP", "AMX_INT8") if f"{name} = 1" in features]
    advice = f"The build uses {' and '.join(risky)}, which is known to hang or crash. {rebuild}" if risky else ""
    speed, kernels = result["tokens_per_s"], msgspec.convert(result["kernels"], KernelsInUse)
    detail = f"{PACKAGE} {result['version']} works, {speed:.0f} tokens/s."
    return ProbeReport("ok", detail, advice, speed, features, kernels)


def _run_child(model_path: Path) -> dict[str, Any]:
    """Return the probe's result, which the subprocess prints as one line of JSON."""
    from .engine import LocalEngine
    from .llama.library import llama
    from .llama.self_check import wrong_kernels

    expect_crashes()
    try:
        library = llama()
    except MissingDependencyError as error:
        return {"import_error": error.message}
    try:
        with LocalEngine.load(model_path) as engine:
            message = Message(role="user", content="Hello")
            run = engine.start([message], SamplingParams(max_tokens=16, temperature=1.0, seed=0))
            started = time.perf_counter()
            steps = sum(1 for _ in run)
            seconds = time.perf_counter() - started
    except UpdraftError as error:
        return {"error": error.message}
    return {
        "tokens_per_s": max(steps, 1) / seconds,
        "system_info": library.api.llama_print_system_info().decode().strip(),
        "version": importlib.metadata.version(PACKAGE),
        "kernels": asdict(library.kernels),
        "wrong_kernels": wrong_kernels(ctypes.CDLL(library.api._lib._name), library.kernels),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_run_child(Path(sys.argv[1]))) + "\n")
