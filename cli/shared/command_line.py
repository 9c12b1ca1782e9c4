"""Base classes of all commands. They escape brackets in help texts and accept `--json` without a path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from ...protocol.safety.terminal_text import printable
from .help_panels import ADVANCED, arrange, shown_options
from .option_groups import expanded
from .renamed_options import check_renamed

STDOUT = "-"  # a path that means standard output


class Command(TyperCommand):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _escape_help(self)
        arrange(self.params, shown_options(self.callback))

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.rich_help_panel = ADVANCED
        return option

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse former names of options. A bare `--json` means standard output if `--json` takes a path."""
        check_renamed(args, {name for param in self.params for name in (*param.opts, *param.secondary_opts)})
        if any(param.name == "json_path" for param in self.params):
            args = _with_path(args)
        return super().parse_args(ctx, args)


class Group(TyperGroup):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _escape_help(self)

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _printable_errors():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with _printable_errors():
            return super().invoke(ctx)


@contextmanager
def _printable_errors() -> Iterator[None]:
    """Remove control characters from typer's error messages. Raise KeyboardInterrupt for Ctrl-C at a prompt."""
    try:
        yield
    except typer.Abort as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # typer also raises Abort at end of input
            raise KeyboardInterrupt from error
        raise
    except Exception as error:
        if hasattr(error, "format_message") and isinstance(message := getattr(error, "message", None), str):
            vars(error)["message"] = printable(message)
        raise


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
    command.help = command.help and escape(command.help)
    for param in command.params:
        if getattr(param, "help", None):
            param.help = escape(param.help)


def _with_path(args: Sequence[str]) -> list[str]:
    words: list[str] = []
    for number, word in enumerate(args):
        words.append(word)
        if word == "--json" and (number + 1 == len(args) or args[number + 1].startswith("--")):
            words.append(STDOUT)
    return words
