"""Child process of `renderer` for one template, in Jinja's sandbox and under limits of the operating system."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ...protocol.safety.system import limit_memory, limit_time
from .. import sandbox
from .renderer import RenderLimits, RenderResult, encoded

_MAX_OF_AN_ERROR = 2000  # maximum characters of an error message


def main() -> None:
    """Read the template and its limits, then render messages until the input ends."""
    sandbox.prepare()
    if not (first := sandbox.receive()):
        return
    setup: dict[str, Any] = json.loads(first)
    limits = RenderLimits(**setup["limits"])
    program = _Program(setup["source"], limits.output_characters)
    why = f"the template takes more memory than {limits.memory_bytes // 2**20} MB"
    no_memory = encoded(asdict(RenderResult(failure="stopped", why=why)))
    limit_memory(limits.memory_bytes)
    while message := sandbox.receive():
        limit_time(limits.cpu_seconds, limits.wall_seconds)
        reply = no_memory
        with suppress(MemoryError):
            reply = encoded(_tried(program, message))
        limit_time(0)
        sandbox.send(reply)


def _tried(program: _Program, message: bytes) -> list[dict[str, Any]] | dict[str, Any]:
    """Render each context; return the outcomes, or a single failure if the template is invalid. Raises MemoryError."""
    if failed := _outcome(lambda: program.compile(len(message))):
        return failed
    return [_outcome(lambda context=context: program.text(context)) or {} for context in json.loads(message)]


def _outcome(work: Callable[[], str | None]) -> dict[str, Any]:
    """Run `work` and return its `RenderResult` as a dictionary. An empty dictionary stands for an empty text."""
    try:
        text = work()
        return asdict(RenderResult(text)) if text else {}
    except MemoryError:
        raise
    except jinja2.TemplateError as error:
        return asdict(RenderResult(failure="refused", why=str(error)[:_MAX_OF_AN_ERROR]))
    except Exception as error:  # noqa: BLE001 - a template may raise any exception
        return asdict(RenderResult(failure="failed", why=repr(error)[:_MAX_OF_AN_ERROR]))


class _Program:
    """Template, compiled at the first message."""

    def __init__(self, source: str, output_characters: int) -> None:
        self._source = source
        self._output_characters = output_characters
        self._left = 0
        self._now = datetime.now()  # all contexts of a message get the same time, because their texts are compared

    def compile(self, input_size: int) -> None:
        """Compile the template and reset the output limit. Raises jinja2.TemplateError if the template is invalid."""
        self._left, self._now = self._output_characters + input_size, datetime.now()
        _ = self._template

    def text(self, context: dict[str, Any]) -> str:
        """Render the template with one context. Raises any error of the template's own."""
        return "".join(self._bounded(self._template.generate(context)))

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = _environment()
        environment.globals["strftime_now"] = self._strftime_now
        return environment.from_string(self._source)

    def _strftime_now(self, pattern: str) -> str:
        return self._now.strftime(pattern)

    def _bounded(self, pieces: Iterator[str]) -> Iterator[str]:
        for piece in pieces:
            self._left -= len(piece)
            if self._left < 0:
                most = f"{self._output_characters:,}"
                raise jinja2.TemplateError(f"the output exceeds the size of the input by more than {most} characters")
            yield piece


def _environment() -> jinja2.Environment:
    """Create a Jinja environment with the same whitespace rules, statements and helpers as transformers.

    Templates for llama.cpp expect filters to return lists, so `tojson` and `length` also accept iterators.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.filters["length"] = environment.filters["count"] = _length
    environment.globals["raise_exception"] = _raise_exception
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """Tag `{% generation %}...{% endgeneration %}`, which marks assistant text for training and is ignored here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it this way

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Return plain JSON; Jinja's filter escapes `<` and `&` for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **{"default": _as_list, **options})


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _length(value: Any) -> int:
    return len(value if hasattr(value, "__len__") else list(value))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
