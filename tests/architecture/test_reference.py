"""docs/reference equals the output of `make reference`: each option, setting, route, metric and column is described."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path

import pytest
from updraft.cli.reference.__main__ import pages
from updraft.cli.reference.fields import entries
from updraft.cli.reference.routes import GIVEN_CODES
from updraft.protocol import errors
from updraft.protocol.settings import PROCESS_VARIABLES
from updraft.router.config import RouterConfig

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"
PAGES = pages()
# The packages that send error codes on the wire.
SOURCES = ["cloud_engine/node", "cloud_engine/engine", "text", "protocol"]


def test_the_folder_has_the_generated_pages_only() -> None:
    assert {path.name for path in FOLDER.glob("*.md")} == set(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_up_to_date(name: str) -> None:
    written = (FOLDER / name).read_text(encoding="utf-8")
    assert written == PAGES[name], f"docs/reference/{name} is out of date: run `make reference`"


def test_every_error_code_is_described() -> None:
    files = [file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")]
    assert {code for file in files for code in _codes_in(file)} <= set(GIVEN_CODES)


def test_errors_with_a_retry_after_header() -> None:
    codes = {code: error for code, (error, _) in GIVEN_CODES.items()}
    codes |= {"overloaded": errors.OverloadedError, "engine_down": errors.EngineDownError}
    after = {code for code, error in codes.items() if "retry-after" in error("x").headers()}
    assert after == {"overloaded", "draining", "sleeping", "engine_down", "engine_restarting"}


def test_every_environment_variable_is_described() -> None:
    """PROCESS_VARIABLES lists every variable that is no setting; unlisted variables are refused as unknown settings."""
    own = {"UPDRAFT_CHILD"}  # set by Updraft for its child processes
    former = {"UPDRAFT_GATEWAY_DB"}  # refused; the message names the current variable
    settings = {f"UPDRAFT_{field.name.upper()}" for field in dataclass_fields(RouterConfig)}
    others = {"tests", "out", ".venv", ".typing"}
    files = [path for path in ROOT.rglob("*.py") if not others & set(path.relative_to(ROOT).parts)]
    sources = [source for path in files if "UPDRAFT_" in (source := path.read_text(encoding="utf-8"))]
    trees = map(ast.parse, sources)
    texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    read = {text for text in texts if isinstance(text, str) and re.fullmatch(r"UPDRAFT_[A-Z0-9_]*[A-Z0-9]", text)}
    assert read - settings - own - former == set(PROCESS_VARIABLES)


def test_a_field_without_a_comment_is_an_error() -> None:
    @dataclass
    class Settings:
        # How many.
        count: int = 3
        size: int = 4

    with pytest.raises(ValueError, match=r"Settings.size has no comment"):
        entries(Settings)


def test_a_two_line_comment_is_one_text() -> None:
    @dataclass
    class Settings:
        # How many,
        # and no more.
        count: int = 3

    assert [(each.name, each.kind, each.default, each.text) for each in entries(Settings)] == [
        ("count", "int", "3", "How many, and no more.")
    ]


def _codes_in(file: Path) -> set[str]:
    """Return the literal error codes in `file`."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    given = [each.value for call in calls for each in call.keywords if each.arg == "code"]
    return {value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)}
