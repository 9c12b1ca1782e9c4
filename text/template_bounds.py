"""Which filters and methods chat templates may use, and how much those may take and make.

They run as one step of C or of Jinja's, in which no clock is looked at. So what they get is measured before: long lists
where they walk lists, all that is inside where they compare or write it, and what becomes of it where that can be more.
What no chat template of a real model uses is left out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any, cast

import jinja2.utils
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS

MOST_CHARACTERS = 2**25  # of a text; items of a list that one operator makes
MOST_WALKED = 2**17  # items that a filter walks, or that are inside of what it compares or writes
_MOST_SPLIT = 2**22  # characters: of one that is split, every second may become a text
_MOST_STRIPPED = 2**10  # characters to strip, each of which is compared with each that is there

_PLAIN = "abs count d default first float int items last length reverse"
_WALKING = "list map reject rejectattr select selectattr"
_DEEP = "dictsort join max min sort string unique"
_WRITING = "capitalize center e escape format indent lower replace safe title trim upper"
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
    weight, walked, rest = 0, 1, [(value, 0)]
    while rest:
        found, level = rest.pop()
        if isinstance(found, str):
            weight += len(found)
        elif isinstance(found, jinja2.utils.Namespace):
            raise SecurityError("it compares or writes a namespace as a whole")
        else:
            weight += 1
            inside = _inside(found)
            walked += len(inside)
            if walked > MOST_WALKED:
                raise SecurityError(f"it compares or writes more than {MOST_WALKED:,} values at once")
            rest += [(item, level + 1) for item in inside]
        weight += per_item * level
        measure(weight)
    return weight


def check_filters(tick: Callable[[], object]) -> dict[str, Callable[..., Any]]:
    """Jinja's own filters that are allowed, by name, each with its checks; they call `tick` first."""
    kinds = ((_PLAIN, _plain), (_WALKING, _walking), (_DEEP, _deep), (_WRITING, _writing))
    return {name: _checked(name, check, tick) for names, check in kinds for name in names.split()}


def check_method(method: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raises SecurityError for what a template may not call of texts, lists, mappings and numbers, or not so."""
    method = getattr(method, "__wrapped__", method)  # as the sandbox wraps `str.format`
    owner = getattr(method, "__self__", None)
    kind = next((kind for kind in _METHODS if isinstance(owner, kind)), None)
    if kind is None:
        return
    if method.__name__ not in _METHODS[kind]:
        raise SecurityError(f"it uses {kind.__name__}.{method.__name__}, which chat templates have no use for")
    if kind is str:
        _writing(method.__name__, [owner, *arguments], options)
    else:
        weigh([*arguments, *options.values()])


def check_formatting(pattern: str, values: Any) -> None:
    """Of `%` and `format`: each place may take all that is there, as wide as any number in the pattern."""
    if re.search(r"\*|[:!][^{}]*\{", pattern):
        raise SecurityError("it formats with a width that is computed")
    width = sum(map(int, re.findall(r"\d+", pattern)))
    places = pattern.count("%") + pattern.count("{")
    measure(len(pattern) + places * (width + weigh(values)))


def settled(value: Any) -> Any:
    """A generator as the list of what it gives, which is measured on the way."""
    if not isinstance(value, GeneratorType):
        return value
    items: list[Any] = []
    made = 0
    for item in cast(Iterator[Any], value):
        items.append(item)
        made += len(item) if isinstance(item, str) else 1
        measure(made)
    return items


def _checked(
    name: str, check: Callable[[str, list[Any], Mapping[str, Any]], None], tick: Callable[[], object]
) -> Callable[..., Any]:
    """The filter of Jinja's, with a check of what it gets."""
    original = FILTERS[name]
    at = 1 if hasattr(original, "jinja_pass_arg") else 0  # first comes what Jinja itself passes

    @functools.wraps(original)
    def checked(*arguments: Any, **options: Any) -> Any:
        tick()
        values = [*map(settled, arguments[at:])]
        check(name, values, options)
        return original(*arguments[:at], *values, **options)

    return checked


def _plain(_: str, __: list[Any], ___: Mapping[str, Any]) -> None:
    """They take a moment, whatever they get."""


def _walking(_: str, values: list[Any], __: Mapping[str, Any]) -> None:
    _walk(values[0])


def _deep(name: str, values: list[Any], options: Mapping[str, Any]) -> None:
    items, arguments = values[0], [*values[1:], *options.values()]
    inside = weigh(items) + weigh(arguments)
    if name != "string":
        _walk(items)
    if name == "join":
        measure(inside + sum(len(str(each)) for each in arguments) * len(_inside(items)))


def _writing(name: str, values: list[Any], options: Mapping[str, Any]) -> None:
    """`values`: the text, and what the filter or method `name` takes beside it."""
    arguments = [*values[1:], *options.values()]
    inside = weigh(values[0]) + (weigh(arguments) if arguments else 0)
    text = str(values[0])
    texts = [argument for argument in arguments if isinstance(argument, str)]
    numbers = [argument for argument in arguments if isinstance(argument, int)]
    if name == "format":
        check_formatting(text, arguments)
    elif name == "replace":
        named = {**dict(zip(("old", "new"), values[1:], strict=False)), **options}
        measure(len(text) + text.count(str(named.get("old", ""))) * len(str(named.get("new", ""))))
    elif name == "join":
        measure(inside + len(text) * sum(len(_inside(argument)) for argument in arguments))
    elif name == "indent":
        measure(len(text) + (1 + text.count("\n")) * (4 + sum(numbers) + sum(map(len, texts))))
    elif name in ("center", "ljust", "rjust", "zfill"):
        measure(len(text) + sum(numbers))
    elif name in ("split", "rsplit", "splitlines", "title") and len(text) > _MOST_SPLIT:
        raise SecurityError(f"it splits a text of {len(text):,} characters")
    elif name in ("trim", "strip", "lstrip", "rstrip") and sum(map(len, texts)) > _MOST_STRIPPED:
        raise SecurityError(f"it strips more than {_MOST_STRIPPED:,} different characters")


def _inside(value: Any) -> Sequence[Any]:
    """What a container has in it, keys and values; a text its characters."""
    if isinstance(value, Mapping):
        found = cast(Mapping[Any, Any], value)
        return [*found.keys(), *found.values()]
    if isinstance(value, str | list | tuple):
        return cast(Sequence[Any], value)
    if isinstance(value, type({}.items()) | type({}.keys()) | type({}.values())):
        return [*cast(Any, value)]
    return ()


def _walk(values: Any) -> None:
    if hasattr(values, "__len__") and len(values) > MOST_WALKED:
        raise SecurityError(f"it walks {len(values):,} items at once, more than {MOST_WALKED:,}")
