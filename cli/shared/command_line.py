"""Base classes of all commands. They escape brackets in help texts and accept `--json` without a path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from types import MappingProxyType
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from ...protocol.errors import ConfigurationError
from ...protocol.safety.redaction import printable
from .help_panels import ADVANCED, arrange, shown_options
from .option_groups import expanded
from .renamed_options import check_renamed

STDOUT = "-"  # a path that means standard output
_PLAIN = MappingProxyType({  # the order matters
    "Input should be": "must be", "a valid integer": "an integer", "a valid": "a", "less than or equal to": "at most",
    "greater than or equal to": "at least", "less than": "below", "greater than": "above",
})  # fmt: skip


class Command(TyperCommand):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _escape_help(self)
        arrange(self.params, shown_options(self.callback))

    def get_help_option(self, ctx: Any) -> Any:
        if (option := super().get_help_option(ctx)) is not None:
            option.rich_help_panel = ADVANCED
        return option

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse former names of options, and infinity and NaN as values. A bare `--json` means standard output if
        `--json` takes a path."""
        check_renamed(args, {name for param in self.params for name in (*param.opts, *param.secondary_opts)})
        takes_path = any(param.name == "json_path" for param in self.params)
        rest = super().parse_args(ctx, _with_path(args) if takes_path else args)
        for name, value in ctx.params.items():
            if isinstance(value, float) and not isfinite(value):
                raise ConfigurationError(f"{name} must be a finite number, got {value}.", param=name)
        return rest


def _plain(message: str) -> str:
    """Return a message of pydantic, which checks values for typer, in plain words; other messages are unchanged."""
    if message.startswith("Input should be "):
        message = message.partition(", unable to ")[0]
        for theirs, ours in _PLAIN.items():
            message = message.replace(theirs, ours)
    return message.removeprefix("Value error, ")


@contextmanager
def _printable_errors() -> Iterator[None]:
    """Make typer's error messages plain and printable. Raise KeyboardInterrupt for Ctrl-C at a prompt."""
    try:
        yield
    except typer.Abort as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # typer also raises Abort at end of input
            raise KeyboardInterrupt from error
        raise
    except Exception as error:
        if hasattr(error, "format_message") and isinstance(message := getattr(error, "message", None), str):
            vars(error)["message"] = printable(_plain(message))
        raise


class Group(TyperGroup):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _escape_help(self)

    make_context = _printable_errors()(TyperGroup.make_context)
    invoke = _printable_errors()(TyperGroup.invoke)


class CommandLine(typer.Typer):
    """A `typer.Typer` whose commands are `Command`s and whose groups are `Group`s."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            cls=Group,
            no_args_is_help=True,
            pretty_exceptions_enable=False,
            rich_markup_mode="rich",
            context_settings={"help_option_names": ["-h", "--help"]},
            **options,
        )

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        register = super().command(name, **{"cls": Command, **options})
        return lambda command: register(expanded(command))


def _escape_help(command: Any) -> None:
    """Escape `[words]` in help texts, because rich reads them as style tags and drops unknown tags."""
    for item in (command, *command.params):
        if getattr(item, "help", None):
            item.help = escape(item.help)


def _with_path(args: Sequence[str]) -> list[str]:
    words: list[str] = []
    for word, after in zip(args, [*args, "--"][1:], strict=True):
        words += [word, STDOUT] if word == "--json" and after.startswith("--") else [word]
    return words
