"""No process of Updraft imports modules that somebody planted in the working folder."""

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from homes import home_in
from tiny_model import write_model

ROOT = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]
PLANTED = "import pathlib; pathlib.Path({marker!r}).open('a').write(__name__ + '\\n')\nraise ImportError('planted')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Every module of the standard library and of what is installed here, in one folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    names = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions()} - {"updraft"}
    for name in (name for name in names if name.isidentifier()):
        (folder / f"{name}.py").write_text(PLANTED.format(marker=str(tmp_path / "marker")))
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UPDRAFT_", "PYTHON"))}
    return kept | {"UPDRAFT_HOME": str(home_in(tmp_path)), "PYTHONPATH": str(ROOT / ".typing")}


@pytest.fixture
def run(folder: Path, environment: dict[str, str]) -> Run:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )

    return run


def planted(folder: Path) -> list[str]:
    marker = folder.parent / "marker"
    return sorted(set(marker.read_text().split())) if marker.exists() else []


def test_the_planted_modules_would_run(folder: Path, run: Run) -> None:
    run("-m", "json.tool", "--help")
    assert planted(folder) == ["json"]


@pytest.mark.parametrize("start", ["-m updraft", "-mupdraft", "-X utf8 -m updraft.cli.main"])
def test_the_command_line_started_as_a_module(start: str, folder: Path, run: Run) -> None:
    done = run(*start.split(), "version")
    assert done.returncode == 0, done.stderr
    assert planted(folder) == []


def test_an_empty_entry_of_the_module_path_stays_out_of_children(environment: dict[str, str], tmp_path: Path) -> None:
    """`PYTHONPATH=$PYTHONPATH:/there` with nothing before it names the working folder."""
    code = "import updraft.protocol.safety.system as p; print(p.module_path()['PYTHONPATH'])"
    environment["PYTHONPATH"] += os.pathsep
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    entries = done.stdout.strip().split(os.pathsep)
    assert str(tmp_path) not in entries
    assert str(ROOT / ".typing") in entries


@pytest.mark.parametrize("usual", [True, False])
def test_no_program_of_the_folder_is_found(folder: Path, environment: dict[str, str], usual: bool) -> None:
    """An empty entry of PATH is the working folder, and `clang` may be installed nowhere else."""
    show = (
        "import atexit, os, sys; atexit.register(lambda: print(os.environ['PATH'])); sys.argv = ['updraft', 'version']"
    )
    code = f"{show}; from updraft.cli.main import main; main()"
    environment["PATH"] = os.pathsep.join(["", ".", "bin", *([environment["PATH"]] if usual else []), ""])
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    assert all(map(os.path.isabs, done.stdout.splitlines()[-1].split(os.pathsep)))


@pytest.mark.slow
def test_the_children_of_a_diagnosis(folder: Path, run: Run) -> None:
    """They import torch, and load and run a model in llama.cpp."""
    done = run("-m", "updraft", "doctor")
    assert re.search(r"llama|torch", done.stdout + done.stderr)
    assert planted(folder) == []


@pytest.mark.slow
def test_the_children_of_an_answer_by_both_tiers(folder: Path, run: Run) -> None:
    """A trial load, a probe and a template on the device; a gateway and a node with its core for the cloud."""
    done = run("-m", "updraft", "ask", "--local", "pocket", "--tier", "cloud", "What is 2 + 2?")
    assert done.returncode == 0, done.stderr
    assert planted(folder) == []


@pytest.mark.slow
def test_the_children_of_a_node_in_the_folder_of_its_model(folder: Path, environment: dict[str, str]) -> None:
    """The core, the renderer of chat templates, and the check of grammars."""
    write_model(folder, 0)
    command = [sys.executable, "-m", "updraft", "node", "--model", ".", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as node:
        try:
            assert node.stdout is not None
            url = node.stdout.readline().split()[1]
            body = {"prompt": "A", "max_tokens": 2, "structured_outputs": {"regex": "[ab]{2}"}}
            model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
            answer = httpx.post(f"{url}/v1/completions", json={**body, "model": model}, timeout=120)
            assert answer.status_code == 200, answer.text
        finally:
            node.terminate()
    assert planted(folder) == []


def test_python_is_started_by_one_function() -> None:
    """The scripts run before the package is installed: they say `-P` or `-I` themselves."""
    scripts = {"cli/bootstrap.py", "local_engine/llama/build.py"}
    packages = [path.parent.relative_to(ROOT).parts[0] for path in ROOT.glob("*/__init__.py")]
    sources = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    starts = {str(path.relative_to(ROOT)) for path in sources if re.search(r"\[\s*sys\.executable", path.read_text())}
    assert starts - scripts == {"protocol/safety/system.py"}
