"""Creates `.venv` and installs the dependencies of a make target; returns at once if they are installed already.

Uses the standard library only and runs on old versions of Python 3, so that it can report an unsupported version:
`python3 cli/bootstrap.py --extras edge,cloud`. `pyproject.toml` names the packages, `constraints.txt` their versions,
and `local_engine/llama/build.py` the build of llama.cpp. A stamp file in `.venv` holds a digest of these files and of
the kernels that are built into llama.cpp.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
LLAMA_BUILD = ROOT / "local_engine" / "llama" / "build.py"
OLDEST_PYTHON = (3, 11)
COVERS = {"all": {"edge", "calibrate", "cloud", "train", "scale", "dev", "all"}}


class SetupError(Exception):
    """Setup failure that the user has to fix. The message says how."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Create the virtual environment and install Updraft into it.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment (default: .venv)")
    parser.add_argument("--extras", default="all", help="extras of pyproject.toml, comma-separated (default: all)")
    options = parser.parse_args()
    extras = set(options.extras.split(","))
    venv = options.venv.absolute()
    try:
        _check_python()
        if not _is_current(venv, extras):
            _install(venv, extras)
    except SetupError as error:
        sys.stderr.write(f"updraft setup: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("updraft setup: interrupted; run it again to continue.\n")
        return 130
    return 0


def _check_python() -> None:
    if sys.version_info < OLDEST_PYTHON:
        raise SetupError(
            f"Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer is needed, but {sys.executable} is "
            f"{sys.version.split()[0]}. Name a newer Python: PYTHON=python3.12 make ..."
        )


def _install(venv: Path, extras: set[str]) -> None:
    started = time.monotonic()
    python = venv / "bin" / "python"
    if not _works(python):
        _create(venv)
    for stamp in venv.glob(".updraft-*"):
        stamp.unlink()
    if extras & {"edge", "bench", "all"}:
        _install_llama(python)
    if extras & {"cloud", "train", "all"} and sys.platform == "linux":
        _install_torch(python)
    names = ",".join(sorted(extras))
    _print(f"installing .[{names}] into {venv.name}")
    _pip(python, "-c", str(CONSTRAINTS), "-e", f"{ROOT}[{names}]")
    (venv / f".updraft-{'-'.join(sorted(extras))}").write_text(_digest())
    _print(f"ready after {time.monotonic() - started:.0f} s")


def _works(python: Path) -> bool:
    if not python.exists():
        return False
    test = f"import pip, sys; sys.exit(sys.version_info < {OLDEST_PYTHON})"
    return subprocess.run([str(python), "-I", "-c", test], check=False, stderr=subprocess.DEVNULL).returncode == 0


def _create(venv: Path) -> None:
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        raise SetupError("this python3 has no venv module. Install it: sudo apt-get install python3-venv")
    if venv.exists() and not (venv / "pyvenv.cfg").exists() and any(venv.iterdir()):
        raise SetupError(f"{venv} exists but is not a virtual environment: move it, or use VENV=another/path.")
    _print(f"creating {venv.name} with Python {sys.version.split()[0]}")
    _run([sys.executable, "-P", "-m", "venv", "--clear", str(venv)])


def _install_llama(python: Path) -> None:
    """Compile and install llama.cpp on this machine, with the flags from `local_engine/llama/build.py`."""
    _print("installing llama.cpp, built for this machine (about 8 minutes on 2 cores the first time)")
    done = subprocess.run([str(python), str(LLAMA_BUILD), "--install", "-c", str(CONSTRAINTS)], check=False, cwd=ROOT)
    if done.returncode:
        raise SetupError("llama.cpp could not be built; see the output above.")


def _install_torch(python: Path) -> None:
    """Install the CPU build of torch if pip can find one (PIP_EXTRA_INDEX_URL may name PyTorch's CPU index).

    The default build for Linux includes gigabytes of CUDA libraries.
    """
    version = _pinned("torch")
    probe = f"import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '{version}')"
    if subprocess.run([str(python), "-P", "-c", probe], check=False, stderr=subprocess.DEVNULL).returncode == 0:
        return
    _print(f"installing torch {version}, CPU build (about 190 MB)")
    try:
        _pip(python, "--no-deps", f"torch=={version}+cpu")
    except SetupError:
        _print("pip finds no CPU build of torch: installing the default build (several GB with CUDA)")
        _pip(python, f"torch=={version}")


def _pinned(package: str) -> str:
    match = re.search(rf"^{package}==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)
    if not match:
        raise SetupError(f"constraints.txt does not pin {package}.")
    return match.group(1)


def _pip(python: Path, *arguments: str) -> None:
    _run([str(python), "-P", "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *arguments])


def _run(command: list[str]) -> None:
    """Run a command and show its elapsed time and latest line. Raises SetupError with the end of its output."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            code = _watch(process, log.fileno())
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if code:
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()[-30:]
            raise SetupError("\n".join([f"`{' '.join(command)}` failed:", *lines]))


def _watch(process: subprocess.Popen[bytes], log: int) -> int:
    started = reported = time.monotonic()
    live = sys.stderr.isatty()
    while True:
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        finally:
            if live:
                sys.stderr.write("\r\033[K")
        if live or now - reported > 30:
            reported = now
            line = f"  {now - started:4.0f} s  {_last_line(log)}"
            sys.stderr.write(line[: shutil.get_terminal_size().columns - 1] + ("" if live else "\n"))
            sys.stderr.flush()


def _last_line(log: int) -> str:
    size = os.fstat(log).st_size
    tail = os.pread(log, 4096, max(0, size - 4096)).decode(errors="replace")
    return (tail.split("\n")[-2:-1] or [""])[0].strip()


def _is_current(venv: Path, extras: set[str]) -> bool:
    digest = _digest()
    stamps = venv.glob(".updraft-*") if venv.exists() else ()
    return any(stamp.read_text() == digest and extras <= _covered(stamp) for stamp in stamps)


def _covered(stamp: Path) -> set[str]:
    names = set(stamp.name.removeprefix(".updraft-").split("-"))
    return names.union(*(COVERS.get(name, set()) for name in names))


def _digest() -> str:
    kernels = LLAMA_BUILD.parent / "native" / "ggml"
    sources = [ROOT / "pyproject.toml", CONSTRAINTS, LLAMA_BUILD, *sorted(kernels.glob("*"))]
    parts = [path.read_bytes() for path in sources if path.exists()]
    return hashlib.sha256(b"\0".join([str(ROOT).encode(), *parts])).hexdigest()


def _print(line: str) -> None:
    sys.stderr.write(f"updraft setup: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
