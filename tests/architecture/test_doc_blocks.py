"""Code blocks of the docs use existing make targets, commands, options, settings and Python names.

`tests/sdk/test_readme.py` and `tests/cli/test_quickstart.py` also run what README and quick start show.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from updraft.accounting.prices import load_prices
from updraft.cli.main import app
from updraft.cloud_engine.gateway.balancing.nodes_file import read_nodes
from updraft.cloud_engine.gateway.limits.limits_file import read_limits_file
from updraft.router.settings_sources import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs/quickstart.md",
    *(ROOT / "docs/guides").glob("*.md"),
]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
COMMANDS: Any = typer.main.get_command(app)


def blocks(language: str) -> list[tuple[str, str]]:
    """Return (page and number, text) of every code block in `language`; for sh, the example scripts too."""
    listed: list[tuple[str, str]] = []
    for path in PAGES:
        texts = re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        listed += [(f"{path.name}-{number}", text) for number, text in enumerate(texts)]
    if language == "sh":
        listed += [(path.name, path.read_text(encoding="utf-8")) for path in sorted((ROOT / "examples").glob("*.sh"))]
    return listed


def commands(script: str) -> list[list[str]]:
    """Split a shell script into simple commands, and each command into words."""
    joined = script.replace("\\\n", " ")
    split: list[list[str]] = []
    for line in joined.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("&;|"):
                split += [command] if command else []
                command = []
            else:
                command.append(word)
    return split


def error_in(command: list[str]) -> str:
    """Return the error in a make, updraft or pip command; "" for a correct command and for other programs."""
    while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
        command = command[1:]
    match command:
        case ["make", *targets]:
            unknown = [word for word in targets if "=" not in word and word not in TARGETS]
            return f"no such target: {unknown}" if unknown else ""
        case ["updraft", *words]:
            return call_error(words)
        case ["pip", "install", *wanted]:
            own = [word for word in wanted if not word.startswith("-")]
            return "" if all(re.fullmatch(r"\.(\[[a-z,]+\])?", word) for word in own) else f"not from a clone: {own}"
    return ""


def call_error(words: list[str]) -> str:
    command = COMMANDS
    while words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            return f"no such command: {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    unknown = [word for word in words if word.startswith("-") and len(word) > 1 and word.partition("=")[0] not in known]
    return f"no such option: {unknown}" if unknown else ""


@pytest.mark.parametrize(("where", "script"), blocks("sh"))
def test_shell_blocks_use_existing_names(where: str, script: str) -> None:
    assert [error for command in commands(script) if (error := error_in(command))] == []


def test_inline_commands_use_existing_names() -> None:
    for path in PAGES:
        inline = re.findall(r"`((?:make|updraft|pip install) [^`]+)`", path.read_text(encoding="utf-8"))
        for text in inline:
            assert [error for command in commands(text) if (error := error_in(command))] == [], (path.name, text)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("make nothing-here", "no such target"),
        ("updraft nothing", "no such command"),
        ("updraft ask hi --tier local && updraft serve --colour red", "no such option"),
        ("X=1 updraft bench nothing", "no such command"),
        ("pip install updraft", "not from a clone"),
    ],
)
def test_unknown_names_are_found(script: str, expected: str) -> None:
    (error,) = [error for command in commands(script) if (error := error_in(command))]
    assert expected in error


@pytest.mark.parametrize(("where", "text"), blocks("toml"))
def test_settings_are_accepted(where: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block whose first line names one of the gateway's files is read as that file."""
    file = tmp_path / "config.toml"
    file.write_text(text)
    if text.startswith("# prices.toml"):
        load_prices(str(file))
    elif text.startswith("# limits.toml"):
        read_limits_file(file)
    elif text.startswith("# nodes.toml"):
        monkeypatch.setenv("GPU_KEY", "a-key")
        assert read_nodes(file, None)
    else:
        load_config(file=file, environ={})


@pytest.mark.parametrize(("where", "code"), blocks("python"))
def test_python_blocks_import_existing_names(where: str, code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("updraft"):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names)
