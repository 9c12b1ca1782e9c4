"""Token counts that a server reports, in the field names of several APIs and at any depth of an answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any, cast

from ..protocol.decoding import integral
from ..protocol.http.lenient_json import object_of, tables
from ..protocol.responses import MAX_TOKENS

_DIGITS = re.compile(r"[0-9]{1,10}")  # as many as `MAX_TOKENS` has
_USAGES = ("usage", "usageMetadata", "usage_metadata", "token_usage")
_READ = ("prompt_tokens", "input_tokens", "promptTokenCount")
_WRITTEN = ("completion_tokens", "output_tokens", "candidatesTokenCount")
#: Field names for prompt tokens read from the cache (_CACHED), and for prompt tokens written to it (_STORED).
_CACHED = ("cached_tokens", "prompt_cache_hit_tokens", "cache_read_input_tokens", "cachedContentTokenCount")
_STORED = ("cache_write_tokens", "cache_creation_tokens", "cache_creation_input_tokens")
_STORED_1H = ("cache_write_1h_tokens", "ephemeral_1h_input_tokens")  # the part of _STORED that is kept for an hour
_OF_ITERATIONS = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
#: Fields not searched for usage: their values are long, or written by the model.
_SKIPPED = frozenset(
    ("content", "tool_calls", "function_call", "arguments", "input", "output", "parsed", "logprobs", "embedding")
)


@dataclass(slots=True)
class ReportedUsage:
    """Token counts reported by a server."""

    prompt_tokens: int = 0
    # Completion tokens, including hidden reasoning.
    completion_tokens: int = 0
    accepted: int = 0
    rejected: int = 0
    # Prompt tokens from the server's cache.
    cached_tokens: int = 0
    # Whether the server reported completion tokens, by themselves or in a total.
    has_completion: bool = field(default=True, compare=False)
    # Prompt tokens written to the server's cache.
    stored_tokens: int = 0
    # Prompt tokens of `stored_tokens` that the cache keeps for an hour.
    stored_1h_tokens: int = 0

    @staticmethod
    def of(answer: Mapping[str, Any], prompt_estimate: int = 0) -> ReportedUsage | None:
        """Return the outermost usage of an answer or stream event, or None if it is missing or impossible.

        An impossible count could exhaust every budget, and the cost of a partial usage is unknown. `prompt_estimate`:
        assumed prompt tokens if the server reports only a total.
        """
        reads = [read for each in _usages(answer) if (read := _read(each, prompt_estimate)) is not None]
        return next(filter(None, reads), reads[0] if reads else None)

    def __bool__(self) -> bool:
        """Return whether any token is reported."""
        return bool(self.prompt_tokens or self.completion_tokens)

    @property
    def priced(self) -> tuple[int, int, int, int, int]:
        """Counts in the order of `Price.of`."""
        counts = self.prompt_tokens, self.completion_tokens, self.cached_tokens
        return *counts, self.stored_tokens, self.stored_1h_tokens

    def after(self, earlier: ReportedUsage) -> ReportedUsage:
        """Return the counts of a stream's later event. Counts that are missing in the event come from `earlier`."""
        return ReportedUsage(*(mine or before for mine, before in zip(astuple(self), astuple(earlier), strict=True)))

    def standard(self, given: Any) -> dict[str, Any]:
        """Return the usage object `given` with OpenAI's names for the counts added. Existing counts are kept."""
        usage = object_of(given)
        read = counted(usage.get("prompt_tokens")) or self.prompt_tokens
        made: dict[str, Any] = {**usage, "prompt_tokens": read}
        if self.has_completion:
            written = counted(usage.get("completion_tokens")) or self.completion_tokens
            made |= {"completion_tokens": written, "total_tokens": counted(usage.get("total_tokens")) or read + written}
        caches = {"cached_tokens": self.cached_tokens, "cache_write_tokens": self.stored_tokens}
        caches["cache_write_1h_tokens"] = self.stored_1h_tokens
        if caches := {name: count for name, count in caches.items() if count}:
            made["prompt_tokens_details"] = _details(usage, _READ) | caches
        if outputs := _details(usage, _WRITTEN):
            made["completion_tokens_details"] = outputs
        return made


def counted(value: Any) -> int | None:
    """Return `value` as an integer if it is a plausible token count, also as a whole float or digits, else None."""
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        value = int(value)
    count = integral(value)
    return count if isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= MAX_TOKENS else None


def _usages(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all usage objects, the outermost first."""
    parts: list[Any] = [answer]
    for part in parts:
        if isinstance(part, list):
            parts += [item for item in cast("list[Any]", part) if isinstance(item, dict)]
            continue
        members = cast("dict[str, Any]", part)
        yield from (cast("dict[str, Any]", each) for name in _USAGES if isinstance(each := members.get(name), dict))
        parts += [each for name, each in members.items() if isinstance(each, dict | list) and name not in _SKIPPED]


def _read(usage: dict[str, Any], prompt_estimate: int) -> ReportedUsage | None:
    usage = _with_iterations(usage)
    read, written = _first(usage, _READ), _first(usage, _WRITTEN)
    total = _first(usage, ("total_tokens", "totalTokenCount")) or 0
    if read is None or written is None:
        return None
    if usage.get("prompt_tokens") is None:  # Anthropic's count excludes tokens read from or written to the cache
        read += sum(counted(usage.get(f"cache_{name}_input_tokens")) or 0 for name in ("read", "creation"))
    read = read or max(0, min(prompt_estimate, total - written))
    inputs, outputs = _details(usage, _READ), _details(usage, _WRITTEN)
    hidden = counted(outputs.get("reasoning_tokens")) or 0
    # some servers' counts exclude reasoning
    written = max(written, total - read, written + hidden if hidden > written else 0)
    accepted, rejected = (counted(outputs.get(f"{kind}_prediction_tokens")) or 0 for kind in ("accepted", "rejected"))
    cached, stored = ((_first(inputs, names) or _first(usage, names) or 0) for names in (_CACHED, _STORED))
    cached = min(cached, read)
    stored = min(stored, read - cached)
    lasting = object_of(usage.get("cache_creation"))
    stored_1h = min(_first(inputs, _STORED_1H) or _first(lasting, _STORED_1H) or 0, stored)
    has_completion = written > 0 or any(usage.get(name) is not None for name in _WRITTEN)
    return ReportedUsage(read, written, accepted, rejected, cached, has_completion, stored, stored_1h)


def _with_iterations(usage: dict[str, Any]) -> dict[str, Any]:
    """Return Anthropic's usage with the counts of all `iterations`, which are billed. The outer counts leave out the
    iterations that compact the context."""
    if not (steps := tables(usage.get("iterations"))):
        return usage
    sums = {name: sum(counted(step.get(name)) or 0 for step in steps) for name in _OF_ITERATIONS}
    larger = {name: count for name, count in sums.items() if count > (counted(usage.get(name)) or 0)}
    caches = [object_of(step.get("cache_creation")) for step in steps]
    stored_1h = sum(counted(cache.get("ephemeral_1h_input_tokens")) or 0 for cache in caches)
    lasting = {"cache_creation": {"ephemeral_1h_input_tokens": stored_1h}} if stored_1h else {}
    return {**usage, **larger, **lasting}


def _details(usage: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return object_of(next(filter(None, (usage.get(f"{name}_details") for name in names)), None))


def _first(counts: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """Return the first of the counts that is present, 0 if all are missing, or None if the count is impossible."""
    value = next((value for name in names if (value := counts.get(name)) is not None), None)
    return 0 if value is None else counted(value)
