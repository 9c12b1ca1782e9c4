"""`make chat`, `updraft init` and the calibration that it advises, with no more packages than `make chat` installs."""

from __future__ import annotations

import json
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from updraft.classifier.target import DEFAULT_QUALITY
from updraft.classifier.training.gates import prompts_to_promise

ROOT = Path(__file__).resolve().parents[2]
HIDE = """
import sys
from importlib.machinery import PathFinder
class Visible(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden!r} else super().find_spec(name, path, target)
sys.meta_path[:] = [Visible if finder is PathFinder else finder for finder in sys.meta_path]
"""


def extras_of(target: str) -> set[str]:
    recipe = re.search(
        rf"^{target}:.*\n\t.*--extras (\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert recipe is not None
    return set(recipe[1].split(","))


def modules_outside(extras: set[str]) -> set[str]:
    """The top-level modules of installed packages that the core and these extras do not bring."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    open_ends = [Requirement(each) for each in (*project["dependencies"], *(r for e in extras for r in optional[e]))]
    wanted: set[str] = set()
    while open_ends:
        requirement = open_ends.pop()
        name = canonicalize_name(requirement.name)
        if name in wanted:
            continue
        wanted.add(name)
        for text in metadata.requires(requirement.name) or ():
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in ("", *requirement.extras)):
                open_ends.append(inner)
    distributions = metadata.packages_distributions()
    return {
        module
        for module, packages in distributions.items()
        if module not in ("updraft", "pip", "setuptools") and wanted.isdisjoint(map(canonicalize_name, packages))
    }


@pytest.fixture
def only_what_chat_installs(environment: dict[str, str], tmp_path: Path) -> set[str]:
    """As every command of the test finds it; the modules that are hidden."""
    hidden = modules_outside(extras_of("chat"))
    folder = tmp_path / "hidden"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    environment["PYTHONPATH"] = f"{folder}:{environment['PYTHONPATH']}"
    return hidden


@pytest.mark.slow
def test_the_advised_commands_run_one_after_the_other(
    updraft, fake_cloud, tmp_path: Path, only_what_chat_installs: set[str]
) -> None:
    pytest.importorskip("llama_cpp")
    assert {"torch", "gguf", "transformers", "matplotlib"} <= only_what_chat_installs
    chat = updraft("chat", "--local", "pocket", input="2 + 2\n/quit\n")
    assert chat.returncode == 0, chat.stderr
    # The device knows short sums, and neither knows the other questions: what is kept is learnt from the wording.
    sums = [f"{a} + {b}" for a in range(2, 18) for b in range(2, 15)][:200]
    others = [f"Who wrote the book number {number} on the shelf of poems?" for number in range(200)]
    answers = {**{each: str(eval(each)) for each in sums}, **{each: f"Author {each[-20:]}" for each in others}}
    with fake_cloud(answers=answers) as url:
        call = [
            "init",
            "--yes",
            "--local",
            "pocket",
            "--cloud-url",
            url,
            "--cloud-model",
            "big",
            "--api-key-env",
            "KEY",
        ]
        done = updraft(*call, env={"KEY": "secret-key"})
        assert done.returncode == 0, done.stderr
        advised = re.search(r"^  updraft (calibrate --live (\d+) --prompts) FILE$", done.stderr, re.MULTILINE)
        assert advised is not None and int(advised[2]) == 390 == prompts_to_promise(DEFAULT_QUALITY, errs=True)
        mixed = [prompt for both in zip(sums, others, strict=True) for prompt in both]
        (tmp_path / "mine.txt").write_text("\n".join(mixed[: int(advised[2])]))
        done = updraft(*advised[1].split(), "mine.txt", "--json", "out.json")
        assert done.returncode == 0, done.stderr
        assert "graded prompts" not in done.stderr
        asked = updraft("ask", "3 + 4", "--json", "--quality", str(DEFAULT_QUALITY))
        assert asked.returncode == 0, asked.stderr
        assert json.loads(asked.stdout)["updraft"]["reason"].startswith("P(gain)")


def graded(tmp_path: Path, count: int) -> Path:
    """A pair of which the device is as good as the cloud on half of the prompts, as their wording tells."""
    kinds = (("What is {0} + {0}?", 1.0), ("Write a poem about the river number {0} of the land.", 0.0))
    rows = [
        {"prompt": text.format(number), "weak": weak, "strong": 1.0 if number % 10 else weak}
        for number in range(count // 2)
        for text, weak in kinds
    ]
    path = tmp_path / f"{count}.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_the_advised_number_of_prompts_is_enough_and_fewer_are_not(updraft, tmp_path: Path) -> None:
    pair = ["--local", "pocket", "--cloud-model", "big", "--out", "policy", "--json", "out.json"]
    enough = updraft(
        "calibrate", "--data", str(graded(tmp_path, prompts_to_promise(DEFAULT_QUALITY, errs=True))), *pair
    )
    assert enough.returncode == 0, enough.stderr
    assert json.loads((tmp_path / "out.json").read_text())["metrics"]["cloud_share"] < 0.9
    fewer = updraft("calibrate", "--data", str(graded(tmp_path, 160)), *pair)
    assert fewer.returncode == 0, fewer.stderr
    assert json.loads((tmp_path / "out.json").read_text())["metrics"]["cloud_share"] == 1
    assert re.search(r"about \d+ more graded prompts", fewer.stdout)


def test_the_guide_states_the_numbers_of_the_code() -> None:
    guide = (ROOT / "docs" / "guides" / "calibrate.md").read_text(encoding="utf-8")
    stated = re.search(
        r"target of ([\d.]+) needs at least (\d+) prompts, and a target of ([\d.]+) needs at least\s+(\d+)", guide
    )
    assert stated is not None
    for quality, prompts in (stated.groups()[:2], stated.groups()[2:]):
        assert prompts_to_promise(float(quality)) == int(prompts)
    assert "0.95 needs at least 130, the default of 0.98 at least 300, and a third more if the cloud errs." in " ".join(
        (ROOT / "cli" / "calibrate" / "command.py").read_text(encoding="utf-8").split()
    )
