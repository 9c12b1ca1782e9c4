"""Option groups: a command parameter whose type is a dataclass becomes one option per field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from .help_panels import HelpAll, shown_options


class OmittedFields:
    """Parameter metadata that names the fields of an option group to leave out of the command."""

    def __init__(self, *names: str) -> None:
        self.names = names


def expanded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return `command` with one parameter per field of its option groups, and `--help-all` if it hides options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[Any, list[str]]] = {}
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        kind, left_out = _group(hints[parameter.name])
        if not is_dataclass(kind):
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        own = get_type_hints(kind, include_extras=True)
        taken = [item for item in fields(kind) if item.name not in left_out]
        groups[parameter.name] = kind, [item.name for item in taken]
        parameters += [
            Parameter(item.name, parameter.kind, default=item.default, annotation=own[item.name]) for item in taken
        ]
    if shown_options(command) is not None:
        parameters.append(Parameter("help_all", Parameter.KEYWORD_ONLY, default=False, annotation=HelpAll))
    elif not groups:
        return command

    @wraps(command)
    def called(**values: Any) -> Any:
        values.pop("help_all", None)
        for name, (kind, names) in groups.items():
            values[name] = kind(**{key: values.pop(key) for key in names if key in values})
        return command(**values)

    vars(called)["__signature__"] = Signature(parameters)
    return called


def _group(hint: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the parameter's type and the names of the fields to leave out."""
    if get_origin(hint) is not Annotated:
        return hint, ()
    kind, *metadata = get_args(hint)
    return kind, next((mark.names for mark in metadata if isinstance(mark, OmittedFields)), ())
