"""The help of servers is short, `--help-all` shows everything, and a settings file takes what is hidden."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
import typer
from typer.testing import CliRunner
from updraft.cli.main import app
from updraft.router.config import RouterConfig

COMMANDS: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
HIDING = [name for name, command in COMMANDS.items() if any(getattr(each, "hidden", False) for each in command.params)]
OPTION = re.compile(r"^│[ *]+(--[a-z-]+)", re.MULTILINE)
PANEL = re.compile(r"^╭─ (\w+)", re.MULTILINE)
PANELS = ["Model", "Cloud", "Target", "Network", "Limits", "Advanced"]


def help_of(command: str, option: str) -> str:
    result = CliRunner().invoke(app, [command, option], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize(("command", "most"), [("serve", 10), ("node", 15), ("gateway", 12)])
def test_the_help_of_a_server_is_short(command: str, most: int) -> None:
    shown = OPTION.findall(help_of(command, "--help"))
    assert 5 < len(shown) <= most
    assert {"--help", "--help-all", "--config"} <= set(shown)


@pytest.mark.parametrize(
    ("command", "panels"),
    [
        ("calibrate", {"Model", "Cloud", "Target", "Limits", "Advanced"}),
        ("eval", {"Model", "Cloud", "Target", "Limits", "Advanced"}),
        ("plan", {"Cloud", "Target", "Limits", "Advanced"}),
        ("init", {"Model", "Cloud", "Advanced"}),
        ("doctor", {"Cloud", "Advanced"}),
        ("top", {"Network", "Advanced"}),
        ("keys create", {"Network", "Limits", "Advanced"}),
        ("cloud up", {"Cloud", "Advanced"}),
        ("pull", {"Model", "Advanced"}),
        ("service install", {"Model", "Network", "Advanced"}),
        ("demo", {"Target", "Advanced"}),
        ("log", {"Advanced"}),
        ("service logs", {"Advanced"}),
        ("bench engine", {"Model", "Target", "Limits", "Advanced"}),
    ],
)
def test_other_commands_have_panels(command: str, panels: set[str]) -> None:
    output = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"}).output
    assert set(PANEL.findall(output)) - {"Arguments"} == panels


@pytest.mark.parametrize("command", HIDING)
def test_examples_use_shown_options_only(command: str) -> None:
    shown = {*OPTION.findall(help_of(command, "--help")), "--help", "--json"}
    examples = COMMANDS[command].help.partition("\nExample")[2]
    assert set(re.findall(r"--[a-z][a-z-]+", examples)) <= shown


@pytest.mark.parametrize("command", HIDING)
def test_every_option_is_shown_with_help_all(command: str) -> None:
    names = {param.opts[0] for param in COMMANDS[command].params if param.opts[0].startswith("--")}
    whole = help_of(command, "--help-all")
    assert set(OPTION.findall(whole)) == {*names, "--help"}
    assert names > set(OPTION.findall(help_of(command, "--help"))) - {"--help"}, "hidden again"
    panels = PANEL.findall(whole)
    assert panels == [name for name in [*PANELS, "Arguments"] if name in panels] or panels[0] == "Arguments"


@pytest.mark.parametrize("command", sorted(set(HIDING) - {"serve", "node", "gateway"}))
def test_hidden_options_are_settings(command: str) -> None:
    """Servers have `--config`, which takes every option."""
    settings = {field.name for field in fields(RouterConfig)}
    hidden = {param.name for param in COMMANDS[command].params if getattr(param, "hidden", False)}
    assert {{"api_key_file": "cloud_api_key_file"}.get(name, name) for name in hidden} <= settings


def test_the_key_of_callers_has_its_own_option() -> None:
    """`--api-key-*` holds a key that the command sends, `--client-api-key-*` the key that its callers must send."""
    for name, command in COMMANDS.items():
        for option in command.params:
            if option.opts[0].endswith(("-key-env", "-key-file")):
                assert ("clients must send" in option.help) == option.opts[0].startswith("--client-"), name


def test_the_rights_of_a_key_are_limits() -> None:
    params = COMMANDS["keys"].commands["create"].params
    panels = {param.opts[0]: param.rich_help_panel for param in params if param.opts[0].startswith("--")}
    assert {panels[name] for name in ("--scope", "--model", "--expires-in-days", "--usd-per-day")} == {"Limits"}
