"""Build of llama-cpp-python with the options that Updraft needs; uses only the standard library.

Default builds have segfaulted on the first token on x86 machines with AMX, and slowed down to a few tokens per second
under OpenMP on shared cores. Run this command before anything else is installed:

    python local_engine/llama/build.py --install -c constraints.txt

It builds a wheel with the right options (about 8 minutes on 2 cores), installs it into this interpreter's environment,
and caches it in ${XDG_CACHE_HOME:-~/.cache}/updraft/wheels, so that the next environment installs it in seconds. pip's
wheel cache is not used, because it may hold a wheel with other options. To build by hand with the same options:

    eval "$(python local_engine/llama/build.py --env)" && pip install --no-cache-dir '.[edge]'

One of the options links Updraft's AVX-512 kernels into llama.cpp (`native/ggml/kernels.cmake`, decision 056).
"""

# ruff: noqa: T201 - the script prints for a person

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

PACKAGE = "llama-cpp-python"
CMAKE_ARGS: tuple[str, ...] = ("-DGGML_OPENMP=OFF",)
KERNELS = Path(__file__).resolve().parent / "native" / "ggml" / "kernels.cmake"
X86_COMPILER_FLAGS = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")
REBUILD_COMMAND = "python -m updraft.local_engine.llama.build --install"
_NINJA_STEP = re.compile(r"^\s*\[(\d+)/(\d+)\]")


class BuildError(Exception):
    """Build or installation failed; the message says what to do."""


def build_environment(environ: Mapping[str, str], machine: str | None = None) -> dict[str, str]:
    """Return the build's environment variables. The user's values are kept and come last, so that they win."""
    options = {"CMAKE_ARGS": list(CMAKE_ARGS)}
    if (machine or platform.machine()).lower() in ("x86_64", "amd64"):
        flags = [flag for flag in X86_COMPILER_FLAGS if _compiler_supports(flag, environ)]
        options |= {"CFLAGS": flags, "CXXFLAGS": flags}
        if platform.system() == "Linux":
            options["CMAKE_ARGS"].append(f"-DCMAKE_PROJECT_ggml_INCLUDE={KERNELS}")
    return {name: _joined(values, environ.get(name, "")) for name, values in options.items() if values}


def wheel_folder(version: str | None, environ: Mapping[str, str]) -> Path:
    """Return the cache folder of the wheel for these options, kernels, version, Python and processor."""
    options = {name: shlex.split(value) for name, value in build_environment(environ).items()}
    parts = [
        *(f"{name}={options[name]}".replace(str(KERNELS), _kernels_digest()) for name in sorted(options)),
        version or "newest",
        f"python{sys.version_info.major}.{sys.version_info.minor}",
        platform.system(),
        processor(),  # the build is tuned to the processor
    ]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "updraft" / "wheels" / digest


def pinned_version(constraints: Path) -> str | None:
    """Return the version of `PACKAGE` in a constraints file; None if absent. Raises BuildError if unreadable."""
    try:
        lines = constraints.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BuildError(f"Cannot read {constraints}: {error.strerror}.") from error
    for line in lines:
        name, separator, version = line.partition("#")[0].partition("==")
        if separator and re.sub(r"[-_.]+", "-", name.strip()).lower() == PACKAGE:
            return version.strip()
    return None


def install(version: str | None, constraints: Path | None, environ: Mapping[str, str]) -> None:
    """Install the build with Updraft's options for this interpreter, unless already installed. Raises BuildError."""
    folder = wheel_folder(version, environ)
    if _installed_from(folder):
        print(f"{PACKAGE} {importlib.metadata.version(PACKAGE)} is installed with the right options.")
        return
    wheel = next(folder.glob("*.whl"), None) or build(version, folder, environ)
    print(f"Installing {wheel.name}")
    limits = ["-c", str(constraints)] if constraints else []
    _pip(["install", "-q", "--force-reinstall", "--no-deps", str(wheel)], environ)  # also replaces the same version
    _pip(["install", "-q", *limits, str(wheel)], environ)  # installs missing dependencies


def build(version: str | None, folder: Path, environ: Mapping[str, str]) -> Path:
    """Build the wheel into `folder` and return its path. Raises BuildError with the end of the build log."""
    options = build_environment(environ)
    _require_compiler(environ)
    print(f"Building {PACKAGE} {version or ''} for this processor; this takes about 8 minutes on 2 cores.")
    for name, value in options.items():
        print(f"  {name}={value}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        requirement = f"{PACKAGE}=={version}" if version else PACKAGE
        command = [*_PIP, "wheel", "--no-deps", "--no-cache-dir", "--no-binary", PACKAGE, "-v"]
        _run_showing_progress([*command, "-w", temporary, requirement], {**environ, **options})
        built = next(Path(temporary).glob("*.whl"))
        folder.mkdir(exist_ok=True)
        return built.replace(folder / built.name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="llama_build", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--env", action="store_true", help="print the build options as shell `export` lines")
    action.add_argument("--install", action="store_true", help="install llama-cpp-python, built if needed")
    action.add_argument("--wheel-dir", action="store_true", help="print the folder of the built llama-cpp-python wheel")
    parser.add_argument("-c", "--constraints", type=Path, help="build the version that this constraints file pins")
    options = parser.parse_args(arguments)
    try:
        version = pinned_version(options.constraints) if options.constraints else None
        if options.env:
            for name, value in build_environment(os.environ).items():
                print(f"export {name}={shlex.quote(value)}")
        elif options.wheel_dir:
            print(wheel_folder(version, os.environ))
        else:
            install(version, options.constraints, os.environ)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


_PIP = (sys.executable, "-P", "-m", "pip", "--disable-pip-version-check")


def _pip(arguments: list[str], environ: Mapping[str, str]) -> None:
    if subprocess.run([*_PIP, *arguments], env=dict(environ), check=False).returncode:
        raise BuildError(f"This command failed: pip {shlex.join(arguments)}")


def _installed_from(folder: Path) -> bool:
    """Return whether pip installed the wheel in `folder`, according to pip's record of the wheel's origin (PEP 610)."""
    try:
        origin = importlib.metadata.distribution(PACKAGE).read_text("direct_url.json") or ""
    except importlib.metadata.PackageNotFoundError:
        return False
    return f"/{folder.name}/" in unquote(origin)


def _run_showing_progress(command: list[str], environ: Mapping[str, str]) -> None:
    tail: deque[str] = deque(maxlen=40)
    progress = _Progress()
    with subprocess.Popen(
        command, env=dict(environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                tail.append(line[:300].rstrip("\n"))
                progress.show(line)
        except BaseException:
            process.terminate()
            raise
    progress.end()
    if process.returncode:
        raise BuildError("\n".join(tail) + f"\n\nBuilding {PACKAGE} failed; the end of the build log is above.")


class _Progress:
    """Shows ninja's progress (`[12/193]`): one updating line on a terminal, else one line per tenth of the build."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._live = sys.stdout.isatty()
        self._shown = -1

    def show(self, line: str) -> None:
        match = _NINJA_STEP.match(line)
        if not match:
            return
        done, total = int(match[1]), int(match[2])
        text = f"  [{done}/{total}] {time.monotonic() - self._started:.0f} s"
        if self._live:
            print(f"\r{text}", end="", flush=True)
        elif done * 10 // total > self._shown:
            self._shown = done * 10 // total
            print(text, flush=True)

    def end(self) -> None:
        if self._live:
            print()


def _require_compiler(environ: Mapping[str, str]) -> None:
    compilers = [environ["CXX"]] if "CXX" in environ else ["c++", "g++", "clang++"]
    if not any(shutil.which(shlex.split(name)[0], path=environ.get("PATH")) for name in compilers):
        raise BuildError(
            f"Building {PACKAGE} needs a C++ compiler; not found: {', '.join(compilers)}. "
            "On Debian or Ubuntu: apt-get install build-essential. On macOS: xcode-select --install."
        )


def _compiler_supports(flag: str, environ: Mapping[str, str]) -> bool:
    """Return whether the C compiler accepts `flag`, which turns AMX off. Compilers that reject `flag` never use AMX."""
    compiler = shlex.split(environ.get("CC", "cc"))
    if not shutil.which(compiler[0], path=environ.get("PATH")):
        return True  # no compiler yet: assume that a recent one will be installed
    command = [*compiler, flag, "-Werror", "-E", "-x", "c", os.devnull]
    return subprocess.run(command, capture_output=True, env=dict(environ), check=False).returncode == 0


def _kernels_digest() -> str:
    """Return a digest of the names and contents of all kernel sources."""
    files = sorted(KERNELS.parent.iterdir())
    contents = b"\0".join(part for file in files for part in (file.name.encode(), file.read_bytes()))
    return hashlib.sha256(contents).hexdigest()


def _joined(options: Sequence[str], flags: str) -> str:
    """Join Updraft's options and the user's, without repeating options that an earlier `--env` already added."""
    words = shlex.split(flags)
    return " ".join([*(shlex.quote(value) for value in options if value not in words), *([flags] if flags else [])])


def processor() -> str:
    """Return the processor traits that `-march=native` depends on."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        facts = [line for line in lines if line.partition(":")[0].strip() in ("model name", "flags", "Features")]
        return f"{platform.machine()} {' '.join(sorted(set(facts)))}"
    return f"{platform.machine()} {platform.processor()}"


def build_key() -> str:
    """Return a digest that identifies the installed libraries and the processor; empty without llama-cpp-python."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        return ""
    libraries = sorted((Path(spec.submodule_search_locations[0]) / "lib").glob("*"))
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in libraries]
    return hashlib.sha256(repr((files, processor())).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
