"""Terminal output of commands. Removes control characters from texts of models, servers and files."""

from __future__ import annotations

import json
import re
from typing import Any

import typer

from ...protocol.safety.redaction import printable

_UNSAFE_IN_JSON = re.compile(r"[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    typer.echo(printable(str(text)), err=err, nl=nl)


def secho(text: str, *, err: bool = False, nl: bool = True, **style: Any) -> None:
    typer.secho(printable(text), err=err, nl=nl, **style)


def note(line: str) -> None:
    """Print a dim line on standard error."""
    secho(line, dim=True, err=True)


def as_json(value: Any) -> str:
    """Return `value` as JSON, with terminal control characters and lone surrogates as JSON escapes."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return _UNSAFE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
