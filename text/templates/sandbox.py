"""Where chat templates run: programs of strangers, which get neither the machine's time nor its memory.

Jinja's own sandbox keeps them from the interpreter. This one also bounds what they compute: its clock is looked at in
every turn of a loop and every call of a macro, a method or a filter, and what is compared, multiplied, added, joined,
formatted or filtered is measured before (`template_bounds`). What many small steps may
still pile up shows when a model is loaded on trial, under limits of the operating system.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
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

from .bounds import (
    FLAT,
    MOST_CHARACTERS,
    check_call,
    check_filters,
    check_formatting,
    check_tests,
    measure,
    settled,
    weigh,
)

CPU_SECONDS = 5.0  # of one rendering; real templates take milliseconds
MOST_ITEMS = MOST_CHARACTERS
_MOST_BITS = 2**12
_OF_JINJA = ("_loop_vars", "_block_vars")  # it passes them with every call in a loop or block
_OF_MAPPINGS = frozenset(dir(dict))
# Filters of the sandbox, which Jinja calls with less ado than methods; templates cannot write such names.
_TICK, _JOINED, _WEIGHED = " tick", " joined", " weighed"


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The whitespace rules and statements that chat templates are written for. One rendering per thread at a time."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
            optimized=False,
            finalize=_as_it_is,
        )
        self.filters = {**check_filters(self.tick), _TICK: self.tick, _JOINED: self.joined, _WEIGHED: self.weighed}
        self.tests = check_tests(self.tick)
        self.concat = self.concatenated
        self.globals.pop("lipsum")  # writes as many words as it is told to
        self._clock = threading.local()

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """`function` has to measure what it makes; the clock is looked at before it runs."""

        def ticking(*arguments: Any, **options: Any) -> Any:
            self.tick()
            return function(*(settled(argument, self.tick) for argument in arguments), **options)

        self.filters[name] = ticking

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Renderings in this thread end after `CPU_SECONDS` with a SecurityError."""
        self._clock.end = time.thread_time() + CPU_SECONDS
        yield

    def tick(self, _: object = None) -> bool:
        """Called by every turn of a loop, every call and every filter. True, for conditions to go on with."""
        if time.thread_time() > self._clock.end:
            raise SecurityError(f"it computes for more than {CPU_SECONDS:.0f} seconds")
        return True

    def joined(self, parts: list[Any]) -> str:
        """The operator `~`."""
        weigh(parts)
        return self.concatenated([str(part) for part in parts])

    def concatenated(self, parts: Iterable[str]) -> str:
        """What a macro, a block or a `set` without value wrote."""
        texts = list(parts)
        measure(sum(map(len, texts)))
        return "".join(texts)

    def weighed(self, value: Any) -> Any:
        """An operand of a comparison, or a key: Python walks all that is inside without a look at anything else."""
        if isinstance(value, FLAT):
            return value
        self.tick()
        value = settled(value, self.tick)
        weigh(value)
        return value

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As Jinja's, but for fields of mappings without the error that it looks for first."""
        if type(obj) is dict and attribute not in _OF_MAPPINGS:
            return super().getitem(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, argument if isinstance(argument, str) else self.weighed(argument))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if hasattr(left, "__len__") and hasattr(right, "__len__"):
                measure(len(left) + len(right))
            return left + right
        if operator == "*" and (hasattr(left, "__len__") or hasattr(right, "__len__")):
            items, times = (left, right) if hasattr(left, "__len__") else (right, left)
            measure(len(items) * times if isinstance(times, int) else 0)
        elif operator == "-":  # of the keys of two mappings, too
            left, right = self.weighed(left), self.weighed(right)
        elif operator == "%":
            if isinstance(left, str):
                check_formatting(left, right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            if (bits * right if operator == "**" else bits + right.bit_length()) > _MOST_BITS:
                raise SecurityError("it computes with numbers of thousands of digits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, called: Any, /, *arguments: Any, **options: Any) -> Any:
        """Every call of a template that is no filter."""
        self.tick()
        arguments = tuple(settled(argument, self.tick) for argument in arguments)
        check_call(called, arguments, {name: options[name] for name in options if name not in _OF_JINJA})
        return super().call(context, called, *arguments, **options)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        return _Bounds(self).visit(super()._parse(source, name, filename))


@jinja2.pass_context
def _as_it_is(_: jinja2.runtime.Context, value: Any) -> Any:
    """What is written. Also for Jinja to leave even constants to the rendering: it would compute them while it
    compiles, unbounded."""
    if not isinstance(value, FLAT):
        weigh(value)
    return value


class _Bounds(jinja2.visitor.NodeTransformer):
    """Puts the sandbox's filters into a template."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return self._filter(_JOINED, jinja2.nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:
        """With constants it takes a moment, whatever the other operand is."""
        self.generic_visit(node)
        operands = [node, *node.ops]
        if sum(not _is_constant(operand.expr) for operand in operands) > 1:
            for operand in operands:
                operand.expr = self._weighed(operand.expr)
        return node

    def visit_Pair(self, node: jinja2.nodes.Pair) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.key = self._weighed(node.key)
        return node

    def visit_Slice(self, node: jinja2.nodes.Slice) -> jinja2.nodes.Node:
        """Jinja does not leave it to `getitem`, and of a mapping it is a key."""
        self.generic_visit(node)
        node.start, node.stop, node.step = (part and self._weighed(part) for part in (node.start, node.stop, node.step))
        return node

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        """A turn that its condition leaves out is one, too."""
        self._ticking(node)
        if node.test is not None:
            node.test = jinja2.nodes.And(self._tick(node), node.test, lineno=node.lineno, environment=self._sandbox)
        return node

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:
        return self._ticking(node)

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.Node:
        return self._ticking(node)

    def _ticking(self, node: Any) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(self._tick(node), lineno=node.lineno, environment=self._sandbox))
        return node

    def _tick(self, node: jinja2.nodes.Node) -> jinja2.nodes.Expr:
        return self._filter(_TICK, jinja2.nodes.Const(None, lineno=node.lineno))

    def _weighed(self, node: jinja2.nodes.Expr) -> jinja2.nodes.Expr:
        return node if _is_constant(node) else self._filter(_WEIGHED, node)

    def _filter(self, name: str, node: jinja2.nodes.Expr) -> jinja2.nodes.Filter:
        found = jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        found.set_environment(self._sandbox)
        return found


def _is_constant(node: jinja2.nodes.Expr) -> bool:
    if isinstance(node, jinja2.nodes.List | jinja2.nodes.Tuple):
        return all(map(_is_constant, node.items))
    return isinstance(node, jinja2.nodes.Const)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; rendering ignores the marks."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
