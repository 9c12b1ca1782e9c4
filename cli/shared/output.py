"""The one way from a command to the terminal: text of models, servers and files cannot command it."""

from __future__ import annotations

import json
import re
from typing import Any

import typer

from ...protocol.safety.terminal_text import printable

_UNSAFE_IN_JSON = re.compile(r"[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    typer.echo(printable(str(text)), err=err, nl=nl)


def secho(text: str, *, err: bool = False, nl: bool = True, **style: Any) -> None:
    typer.secho(printable(text), err=err, nl=nl, **style)


def note(line: str) -> None:
    """A line beside the result: dim, on standard error."""
    secho(line, dim=True, err=True)


def as_json(value: Any) -> str:
    """JSON in which every character that a terminal would obey is an escape of JSON's own, so that nothing is lost."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return _UNSAFE_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
