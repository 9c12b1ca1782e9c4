"""Which filters, tests and methods chat templates may use, and how much those may take and make.

They run as one step of C or of Jinja's, in which no clock is looked at. So what they get is measured before: long lists
where they walk lists, all that is inside where they compare or write it, and what becomes of it where that can be more.
What no chat template of a real model uses is left out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.runtime import LoopContext
from jinja2.tests import TESTS
from jinja2.utils import Namespace

MOST_CHARACTERS = 2**25  # of a text; items of a list that one operator makes
MOST_WALKED = 2**17  # items that a filter walks, or that are inside of what it compares or writes
_DEEPEST = 100  # lists in lists: Python hashes tuples without a look at its stack
_MOST_SPLIT = 2**22  # characters: of one that is split, every second may become a text
_MOST_STRIPPED = 2**10  # characters to strip, each of which is compared with each that is there
_MOST_DIGITS = 2**12  # of a text that is read as a number

#: Nothing is inside of these, and to compare them takes a moment.
FLAT = (str, int, float, type(None))
_MAPPINGS = (dict, MappingProxyType)
_VIEWS = tuple(type(view) for view in ({}.items(), {}.keys(), {}.values()))
_LISTS = (str, list, tuple)
_NO_ITERATORS = (*FLAT, list, dict, LoopContext)

_PLAIN = "abs count d default first float items last length reverse"
_READING = "int"
_WALKING = "list map reject rejectattr select selectattr"
_DEEP = "dictsort join max min sort string unique"
_WRITING = "capitalize center e escape format indent lower replace safe title trim upper"
_PLAIN_TESTS = "boolean defined false float integer iterable mapping none number sameas sequence string true undefined"
_COMPARING = "!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper"
_DIVIDING = "divisibleby even odd"
_TEXT_METHODS = (
    "capitalize casefold center count endswith find format index isalnum isalpha isascii isdecimal isdigit islower "
    "isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind "
    "rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill"
)
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_TEXT_METHODS.split()),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    int: frozenset(),
    float: frozenset(("is_integer",)),
}

#: Looks at what a filter, a test or a method gets: its name, the value it is of and what stands in brackets.
_Check = Callable[[str, Sequence[Any], Mapping[str, Any]], None]


def measure(items: int) -> None:
    """Raises SecurityError for more characters or items than anything may have."""
    if items > MOST_CHARACTERS:
        raise SecurityError(f"it makes something of {items:,} characters or items")


def weigh(value: Any, per_item: int = 0) -> int:
    """The characters in `value`, however deep, and at least one for each thing in it; `per_item`: for each item of a
    container and each level above it. Raises SecurityError for more than may be."""
    if isinstance(value, str):  # nearly always
        measure(len(value))
        return len(value)
    weight, walked, level, found = 0, 1, 0, [value]
    while found:
        inside: list[Any] = []
        for each in found:
            if isinstance(each, str):
                weight += len(each)
                continue
            if isinstance(each, Namespace):
                raise SecurityError("it compares or writes a namespace as a whole")
            weight += 1
            items = _inside(each)
            walked += len(items)
            if walked > MOST_WALKED:
                raise SecurityError(f"it compares or writes more than {MOST_WALKED:,} values at once")
            inside += items
        weight += per_item * level * len(found)
        measure(weight)
        found, level = inside, level + 1
        if level > _DEEPEST:
            raise SecurityError(f"it compares or writes lists that are more than {_DEEPEST} deep")
    return weight


def check_filters(tick: Callable[[], object]) -> dict[str, Callable[..., Any]]:
    """Jinja's own filters that are allowed, by name, each with its checks; they call `tick` first."""
    kinds = ((_PLAIN, _plain), (_READING, _reading), (_WALKING, _walking), (_DEEP, _deep), (_WRITING, _writing))
    return {name: _checked(FILTERS[name], name, check, tick) for names, check in kinds for name in names.split()}


def check_tests(tick: Callable[[], object]) -> dict[str, Callable[..., Any]]:
    """Jinja's own tests that are allowed, by name; those that take more than a moment as `check_filters` does it."""
    kinds = ((_COMPARING, _comparing), (_DIVIDING, _dividing))
    found = {name: _checked(TESTS[name], name, check, tick) for names, check in kinds for name in names.split()}
    return {name: TESTS[name] for name in _PLAIN_TESTS.split()} | found


def check_call(called: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raises SecurityError for what a template may not call of texts, lists, mappings and numbers, or not so."""
    if called in (dict, Namespace) and not all(isinstance(argument, _MAPPINGS) for argument in arguments):
        raise SecurityError("it makes a mapping of a list")
    method = getattr(called, "__wrapped__", called)  # as the sandbox wraps `str.format`
    owner = getattr(method, "__self__", None)
    if owner is None:
        return
    kind = next((kind for kind in _METHODS if isinstance(owner, kind)), type(owner))
    if isinstance(owner, type) or method.__name__ not in _METHODS.get(kind, (method.__name__,)):
        raise SecurityError(f"it uses {kind.__name__}.{method.__name__}, which chat templates have no use for")
    if kind is str:
        _writing(method.__name__, [owner, *arguments], options)
    elif kind is dict:
        _comparing("", arguments, options)
    else:
        _comparing("", [owner, *arguments], options)


def check_formatting(pattern: str, values: Any) -> None:
    """Of `%` and `format`: each place may take all that is there, as wide as any number in the pattern."""
    if re.search(r"\*|[:!][^{}]*\{", pattern):
        raise SecurityError("it formats with a width that is computed")
    width = sum(map(int, re.findall(r"\d+", pattern)))
    places = pattern.count("%") + pattern.count("{")
    measure(len(pattern) + places * (width + weigh(values)))


def settled(value: Any, tick: Callable[[], object]) -> Any:
    """An iterator as the list of what it gives, which is measured on the way."""
    if isinstance(value, _NO_ITERATORS) or not isinstance(value, Iterator):
        return value
    items: list[Any] = []
    made = 0
    for item in cast(Iterator[Any], value):
        tick()
        items.append(item)
        made += len(item) if isinstance(item, str) else 1
        measure(made)
    return items


def _checked(original: Callable[..., Any], name: str, check: _Check, tick: Callable[[], object]) -> Callable[..., Any]:
    """The filter or test of Jinja's, with a check of what it gets."""
    at = 1 if hasattr(original, "jinja_pass_arg") else 0  # first comes what Jinja itself passes

    @functools.wraps(original)
    def checked(*arguments: Any, **options: Any) -> Any:
        tick()
        values = [settled(argument, tick) for argument in arguments[at:]]
        check(name, values, options)
        return original(*arguments[:at], *values, **options)

    return checked


def _plain(_: str, __: Sequence[Any], ___: Mapping[str, Any]) -> None:
    """They take a moment, whatever they get."""


def _reading(name: str, values: Sequence[Any], _: Mapping[str, Any]) -> None:
    if isinstance(values[0], str) and len(values[0]) > _MOST_DIGITS:
        raise SecurityError(f"it makes an {name} of a text of {len(values[0]):,} characters")


def _walking(_: str, values: Sequence[Any], options: Mapping[str, Any]) -> None:
    _walk(values[0])
    _comparing("", values[1:], options)


def _comparing(_: str, values: Sequence[Any], options: Mapping[str, Any]) -> None:
    weigh([value for value in (*values, *options.values()) if not isinstance(value, FLAT)])


def _dividing(name: str, values: Sequence[Any], _: Mapping[str, Any]) -> None:
    if isinstance(values[0], str):
        raise SecurityError(f"it asks of a text whether it is {name}, which formats it")


def _deep(name: str, values: Sequence[Any], options: Mapping[str, Any]) -> None:
    items, arguments = values[0], [*values[1:], *options.values()]
    inside = weigh(items) + weigh(arguments)
    if name != "string":
        _walk(items)
    if name == "join":
        measure(inside + sum(len(str(each)) for each in arguments) * len(_inside(items)))


def _writing(name: str, values: Sequence[Any], options: Mapping[str, Any]) -> None:
    """`values`: the text, and what the filter or method `name` takes beside it."""
    weigh(values[0])
    if len(values) > 1 or options:
        weigh([*values[1:], *options.values()])
    makes = _MAKING.get(name)
    if makes is not None:
        makes(str(values[0]), values[1:], options)


def _formatting(text: str, values: Sequence[Any], options: Mapping[str, Any]) -> None:
    check_formatting(text, [*values, *options.values()])


def _replacing(text: str, values: Sequence[Any], options: Mapping[str, Any]) -> None:
    named = {**dict(zip(("old", "new"), values, strict=False)), **options}
    measure(len(text) + text.count(str(named.get("old", ""))) * len(str(named.get("new", ""))))


def _joining(text: str, values: Sequence[Any], _: Mapping[str, Any]) -> None:
    measure(weigh(values) + len(text) * sum(len(_inside(value)) for value in values))


def _indenting(text: str, values: Sequence[Any], options: Mapping[str, Any]) -> None:
    _splitting(text, values, options)
    width = values[0] if values else options.get("width", 4)
    width = len(width) if isinstance(width, str) else max(0, width)
    measure(len(text) + (1 + len(text.splitlines())) * width)


def _padding(text: str, values: Sequence[Any], options: Mapping[str, Any]) -> None:
    measure(len(text) + sum(value for value in (*values, *options.values()) if isinstance(value, int)))


def _splitting(text: str, _: Sequence[Any], __: Mapping[str, Any]) -> None:
    if len(text) > _MOST_SPLIT:
        raise SecurityError(f"it splits a text of {len(text):,} characters")


def _stripping(_: str, values: Sequence[Any], options: Mapping[str, Any]) -> None:
    if sum(len(value) for value in (*values, *options.values()) if isinstance(value, str)) > _MOST_STRIPPED:
        raise SecurityError(f"it strips more than {_MOST_STRIPPED:,} different characters")


# Filters and methods of texts whose result may be longer than all they get, or that take longer than to copy that.
_MAKING: Mapping[str, Callable[[str, Sequence[Any], Mapping[str, Any]], None]] = {
    "format": _formatting,
    "replace": _replacing,
    "join": _joining,
    "indent": _indenting,
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padding),
    **dict.fromkeys(("split", "rsplit", "splitlines", "title"), _splitting),
    **dict.fromkeys(("trim", "strip", "lstrip", "rstrip"), _stripping),
}


def _inside(value: Any) -> Sequence[Any]:
    """What a container has in it, keys and values; a text its characters."""
    if isinstance(value, _MAPPINGS):
        found = cast(Mapping[Any, Any], value)
        return [*found.keys(), *found.values()]
    if isinstance(value, _LISTS):
        return cast(Sequence[Any], value)
    if isinstance(value, _VIEWS):
        return [*cast(Any, value)]
    return ()


def _walk(values: Any) -> None:
    if hasattr(values, "__len__") and len(values) > MOST_WALKED:
        raise SecurityError(f"it walks {len(values):,} items at once, more than {MOST_WALKED:,}")
