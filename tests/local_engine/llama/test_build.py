"""Build options, the wheel cache and the installer, with a stand-in for pip that builds in no time."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from updraft.local_engine.llama import build as llama_build

SCRIPT = Path(llama_build.__file__).resolve()
KERNELS = f"-DCMAKE_PROJECT_ggml_INCLUDE={shlex.quote(str(llama_build.KERNELS))}" if sys.platform == "linux" else ""
OPTIONS = f"-DGGML_OPENMP=OFF {KERNELS}".strip()  # on x86-64

FAKE_PIP = """
import json, os, pathlib, sys
arguments = sys.argv[1:]
with open(os.environ["PIP_CALLS"], "a") as calls:
    seen = {name: os.environ.get(name) for name in ("CMAKE_ARGS", "CFLAGS", "CXXFLAGS")}
    calls.write(json.dumps([arguments, seen]) + "\\n")
if "wheel" in arguments:
    for step in range(1, 194):
        print(f"  [{step}/193] cc -c file{step}.c")
    if os.environ.get("FAKE_FAILURE"):
        print("file7.c: fatal error: no such luck")
        sys.exit(1)
    folder = pathlib.Path(arguments[arguments.index("-w") + 1])
    (folder / "llama_cpp_python-9.9.9-py3-none-any.whl").write_bytes(b"")
"""


@pytest.fixture
def world(tmp_path):
    """An environment with a fake pip, a cache of its own, and a way to run the script and to read pip's calls."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(FAKE_PIP)
    calls = tmp_path / "calls"
    environ = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "PIP_CALLS": str(calls),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    for name in ("CMAKE_ARGS", "CFLAGS", "CXXFLAGS"):
        environ.pop(name, None)

    def run(*arguments: str, **extra: str) -> tuple[subprocess.CompletedProcess[str], list]:
        calls.write_text("")
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *arguments],
            env={**environ, **extra},
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        return done, [json.loads(line) for line in calls.read_text().splitlines()]

    return run


@pytest.fixture
def constraints(tmp_path):
    path = tmp_path / "constraints.txt"
    path.write_text("torch==2.13.0\nllama_cpp.python == 9.9.9  # pinned\n")
    return str(path)


def test_options_by_processor():
    none = {"PATH": ""}  # without a compiler nothing is filtered
    x86 = llama_build.build_environment(none, "x86_64")
    assert x86["CMAKE_ARGS"] == OPTIONS
    assert x86["CFLAGS"] == x86["CXXFLAGS"] == "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    assert llama_build.build_environment(none, "aarch64") == {"CMAKE_ARGS": "-DGGML_OPENMP=OFF"}


def test_own_options_are_kept_and_come_last():
    own = {"PATH": "", "CMAKE_ARGS": "-DGGML_CUDA=ON", "CFLAGS": "-O2"}
    once = llama_build.build_environment(own, "x86_64")
    assert once["CMAKE_ARGS"] == f"{OPTIONS} -DGGML_CUDA=ON"
    assert once["CFLAGS"].endswith(" -O2")
    assert llama_build.build_environment({**own, **once}, "x86_64") == once


def test_a_compiler_too_old_for_the_flags(tmp_path):
    compiler = tmp_path / "oldcc"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    assert "CFLAGS" not in llama_build.build_environment({"PATH": str(tmp_path), "CC": "oldcc"}, "x86_64")


def test_env_is_for_eval(world):
    lines = world("--env")[0].stdout
    shown = subprocess.run(
        ["sh", "-c", f'{lines}\nprintf %s "$CMAKE_ARGS"'], capture_output=True, text=True, check=True
    )
    assert shown.stdout == llama_build.build_environment(os.environ)["CMAKE_ARGS"]


def test_the_cache_depends_on_what_matters(world, constraints, tmp_path):
    folder = world("--wheel-dir")[0].stdout.strip()
    assert Path(folder).parent == tmp_path / "cache" / "updraft" / "wheels"
    assert world("--wheel-dir")[0].stdout.strip() == folder
    assert world("--wheel-dir", CMAKE_ARGS="-DGGML_CUDA=ON")[0].stdout.strip() != folder
    assert world("--wheel-dir", "-c", constraints)[0].stdout.strip() != folder


@pytest.mark.skipif(not KERNELS, reason="kernels are for Linux")
def test_changed_kernels_are_built_anew_and_moved_ones_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(llama_build.platform, "machine", lambda: "x86_64")
    copy = shutil.copytree(llama_build.KERNELS.parent, tmp_path / "a clone" / "ggml")
    here = llama_build.wheel_folder("9.9.9", {"PATH": ""})
    monkeypatch.setattr(llama_build, "KERNELS", copy / "kernels.cmake")
    there = llama_build.wheel_folder("9.9.9", {"PATH": ""})
    assert there == here
    for changed in ("kernels.cmake", "weights.h", "wrapped.c"):
        with (copy / changed).open("a") as file:
            file.write("\n")
        before, there = there, llama_build.wheel_folder("9.9.9", {"PATH": ""})
        assert there != before


def test_a_folder_with_a_space_reaches_cmake_in_one_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(llama_build, "KERNELS", tmp_path / "my code" / "kernels.cmake")
    monkeypatch.setattr(llama_build.platform, "system", lambda: "Linux")
    arguments = shlex.split(llama_build.build_environment({"PATH": ""}, "x86_64")["CMAKE_ARGS"])
    assert arguments == ["-DGGML_OPENMP=OFF", f"-DCMAKE_PROJECT_ggml_INCLUDE={tmp_path}/my code/kernels.cmake"]


def test_builds_once_and_then_installs_from_the_cache(world, constraints):
    done, calls = world("--install", "-c", constraints)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "/193]" in line][-1].startswith("  [193/193]")
    assert done.stdout.count("/193]") == 11  # sparse: no terminal
    wheel, *installs = calls
    assert "llama-cpp-python==9.9.9" in wheel[0]
    assert {"--no-cache-dir", "--no-binary"} <= set(wheel[0])
    assert wheel[1]["CMAKE_ARGS"] == llama_build.build_environment({"PATH": ""})["CMAKE_ARGS"]
    assert "--force-reinstall" in installs[0][0]
    assert installs[1][0][-3:-1] == ["-c", constraints]
    _, again = world("--install", "-c", constraints)
    assert [call[0] for call in again] == [call[0] for call in installs]


def test_failure_shows_the_log_and_leaves_nothing(world, constraints, tmp_path):
    done, _ = world("--install", "-c", constraints, FAKE_FAILURE="1")
    assert done.returncode == 1
    assert "fatal error: no such luck" in done.stderr
    assert list((tmp_path / "cache" / "updraft" / "wheels").iterdir()) == []


def test_missing_compiler_is_said_first(world):
    done, calls = world("--install", PATH="/nowhere")
    assert done.returncode == 1
    assert "apt-get install build-essential" in done.stderr
    assert calls == []


def test_missing_constraints(world):
    done, _ = world("--install", "-c", "nowhere.txt")
    assert done.returncode == 1
    assert "nowhere.txt" in done.stderr


def test_an_installed_build_is_recognised_by_its_origin(monkeypatch, tmp_path):
    class Installed:
        def read_text(self, name: str) -> str:
            assert name == "direct_url.json"
            return json.dumps({"url": "file:///home/a%20b/wheels/0123abcd/llama.whl"})

    monkeypatch.setattr(llama_build.importlib.metadata, "distribution", lambda name: Installed())
    assert llama_build._installed_from(tmp_path / "0123abcd")
    assert not llama_build._installed_from(tmp_path / "ffff0000")


def test_needs_only_the_standard_library():
    code = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='x')"
    subprocess.run([sys.executable, "-S", "-I", "-c", code], check=True)
