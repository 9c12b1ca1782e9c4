"""Where chat templates run: programs of strangers, which get neither the machine's time nor its memory.

Jinja's own sandbox keeps them from the interpreter. This one also bounds what they compute: its clock is looked at in
every turn of a loop and every call of a macro, a method or a filter, and what is multiplied, added, joined, formatted
or filtered is measured before it is made (`template_bounds`). What many small steps may
still pile up shows when a model is loaded on trial, under limits of the operating system.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor
from jinja2.exceptions import SecurityError

from .template_bounds import MOST_CHARACTERS, check_filters, check_formatting, check_method, measure, settled, weigh

CPU_SECONDS = 5.0  # of one rendering; real templates take milliseconds
MOST_ITEMS = MOST_CHARACTERS
_MOST_BITS = 2**12
_OF_JINJA = ("_loop_vars", "_block_vars")  # it passes them with every call in a loop or block


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The whitespace rules and statements that chat templates are written for. One rendering per thread at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
            optimized=False,
            finalize=_as_it_is,
        )
        self.filters = check_filters(self.tick)
        self.globals.pop("lipsum")  # writes as many words as it is told to
        self._clock = threading.local()

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """`function` has to measure what it makes; the clock is looked at before it runs."""

        def ticking(*arguments: Any, **options: Any) -> Any:
            self.tick()
            return function(*arguments, **options)

        self.filters[name] = ticking

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Renderings in this thread end after `CPU_SECONDS` with a SecurityError."""
        self._clock.end = time.thread_time() + CPU_SECONDS
        yield

    def tick(self) -> str:
        """Called by every turn of a loop, every call and every filter."""
        if time.thread_time() > self._clock.end:
            raise SecurityError(f"it computes for more than {CPU_SECONDS:.0f} seconds")
        return ""

    def joined(self, parts: list[Any]) -> str:
        """The operator `~`."""
        weigh(parts)
        texts = [str(part) for part in parts]
        measure(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            measure(len(left) + len(right))
        elif operator == "*" and (hasattr(left, "__len__") or hasattr(right, "__len__")):
            items, times = (left, right) if hasattr(left, "__len__") else (right, left)
            measure(len(items) * times if isinstance(times, int) else 0)
        elif operator == "%":
            if isinstance(left, str):
                check_formatting(left, right)
        elif operator != "+" and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            if (bits * right if operator == "**" else bits + right.bit_length()) > _MOST_BITS:
                raise SecurityError("it computes with numbers of thousands of digits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, called: Any, /, *arguments: Any, **options: Any) -> Any:
        """Every call of a template that is no filter."""
        self.tick()
        arguments = tuple(map(settled, arguments))
        check_method(called, arguments, {name: options[name] for name in options if name not in _OF_JINJA})
        return super().call(context, called, *arguments, **options)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        return _Bounds(self).visit(super()._parse(source, name, filename))


@jinja2.pass_context
def _as_it_is(_: jinja2.runtime.Context, value: Any) -> Any:
    """What is written. Also for Jinja to leave even constants to the rendering: it would compute them while it
    compiles, unbounded."""
    if not isinstance(value, str):
        weigh(value)
    return value


class _Bounds(jinja2.visitor.NodeTransformer):
    """Puts calls of the sandbox's `tick` and `joined` into a template."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return self._call("joined", node, jinja2.nodes.List(node.nodes))

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        return self._ticking(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:
        return self._ticking(node)

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.Node:
        return self._ticking(node)

    def _ticking(self, node: Any) -> jinja2.nodes.Node:
        self.generic_visit(node)
        tick = jinja2.nodes.ExprStmt(self._call("tick", node), lineno=node.lineno)
        tick.set_environment(self._sandbox)
        node.body.insert(0, tick)
        return node

    def _call(self, name: str, node: jinja2.nodes.Node, *arguments: jinja2.nodes.Expr) -> jinja2.nodes.Call:
        call = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(name), list(arguments), [], None, None)
        call.set_lineno(node.lineno, override=False)
        call.set_environment(self._sandbox)
        return call


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; rendering ignores the marks."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
