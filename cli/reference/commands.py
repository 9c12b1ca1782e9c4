"""docs/reference/cli.md: every command with its help and options."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from ..main import app
from .markdown import code, page, table

#: Table row of an option: names, values, default and meaning.
Row = tuple[str, str, str, str]
_HEADER = ("option", "value", "default", "meaning")
_INTRODUCTION = (
    "Every command has `--help`. Options of the router override `UPDRAFT_*` variables, which override the "
    "[settings](settings.md) file.\n\n"
    "If `--help` shows only the usual options, `--help-all` shows all of them. The file of `--config` also takes "
    "them, in the table `[serve]`, `[node]` or `[gateway]`: `max_num_seqs = 16`, for example, and a list for an option "
    "that is repeatable. For other commands, the settings file takes the hidden options under the same names, and "
    "`--api-key-file` as `cloud_api_key_file`."
)
_EXIT_CODES = (
    ("0", "Success. A server that was stopped by a signal has ended its requests."),
    ("1", "Failure of a model, a cloud, a download or a check, or a question without an answer; see the message."),
    ("2", "Wrong usage or settings: an unknown option, an invalid value, no model named, a busy port."),
    ("130", "Interrupted by Ctrl-C."),
)
_JSON = (
    "With `--json`, standard output holds JSON and nothing else; notes, tables and errors go to standard error. "
    "Measuring commands also accept a path: `--json out.json` writes the figures to this file and shows the tables."
)
_COMPLETION = (
    "`updraft --install-completion` installs completion of commands and options for bash, zsh, fish or PowerShell. "
    "`updraft --show-completion` prints the script instead."
)


_SHARED = 3  # options that at least this many commands have are listed in the table of shared options


def cli_page() -> str:
    root: Any = typer.main.get_command(app)
    commands = list(_commands(root, "updraft"))
    rows = [row for _, command in commands for row in _options(command)]
    shared = [row for row in dict.fromkeys(rows) if rows.count(row) >= _SHARED]
    return page(
        "Commands",
        _INTRODUCTION,
        "## Exit codes",
        table(("code", "meaning"), [(code(number), text) for number, text in _EXIT_CODES]),
        "## JSON",
        _JSON,
        "## Completion",
        _COMPLETION,
        "## Shared options",
        "Options of several commands.",
        table(_HEADER, shared),
        *(part for path, command in commands for part in _section(path, command, shared)),
    )


def _commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        path = f"{prefix} {name}"
        yield path, command
        if hasattr(command, "commands"):
            yield from _commands(command, path)


def _section(path: str, command: Any, shared: list[Row]) -> Iterator[str]:
    yield f"## {path}"
    yield _help(command.help or "")
    arguments = [param for param in command.params if not _is_option(param)]
    if arguments:
        yield table(("argument", "meaning"), [(code(arg.name.upper()), _text(arg.help)) for arg in arguments])
    rows = _options(command)
    if own := [row for row in rows if row not in shared]:
        yield table(_HEADER, own)
    if also := [names for names, *rest in rows if (names, *rest) in shared]:
        yield f"Shared: {', '.join(also)}."


def _options(command: Any) -> list[Row]:
    taken = {} if command.callback is None else inspect.signature(command.callback, eval_str=True).parameters
    kinds = {name: _plain(parameter.annotation) for name, parameter in taken.items()}
    options = [param for param in command.params if _is_option(param) and param.name != "help"]
    return [(_names(opt), _values(opt, kinds.get(opt.name)), _default(opt), _text(opt.help)) for opt in options]


def _plain(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _is_option(param: Any) -> bool:
    return param.opts[0].startswith("-")


def _help(text: str) -> str:
    """Return a help text as Markdown, with each paragraph after a `\\b` as a code block."""
    parts: list[str] = []
    for block in inspect.cleandoc(text).split("\n\n"):
        if block.startswith("\b"):
            lines = block.removeprefix("\b").strip("\n").splitlines()
            if lines and not lines[0].startswith(" "):
                lines = lines[1:]
            parts.append("```sh\n" + inspect.cleandoc("\n" + "\n".join(lines)) + "\n```")
        else:
            parts.append(_text(" ".join(block.split())))
    return "\n\n".join(parts)


def _names(option: Any) -> str:
    return ", ".join(code(name) for name in (*option.opts, *option.secondary_opts))


def _values(option: Any, kind: Any) -> str:
    if option.is_flag or option.secondary_opts:
        return ""
    choices = _choices(kind)
    if choices:
        return ", ".join(code(str(choice)) for choice in choices)
    value = code(option.metavar or _kind(kind))
    return f"{value}, repeatable" if option.multiple else value


def _choices(kind: Any) -> list[Any]:
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [member.value for member in kind]
    return [choice for part in get_args(kind) for choice in _choices(part)]


def _kind(kind: Any) -> str:
    names = [cls.__name__ for cls in (get_args(kind) or (kind,)) if isinstance(cls, type) and cls is not type(None)]
    return {"int": "NUMBER", "float": "NUMBER", "Path": "PATH"}.get(names[0] if names else "", "TEXT")


def _default(option: Any) -> str:
    value = option.default
    if option.required:
        return "required"
    if isinstance(value, bool):
        return "on" if value else ""
    return "" if value is None or callable(value) or value == [] else code(str(getattr(value, "value", value)))


def _text(text: str | None) -> str:
    return (text or "").replace("\\[", "[")  # undo rich's escape
