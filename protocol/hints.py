"""Hints: fields of some API that tell a server how to work. Requests of every API accept all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

#: Texts for booleans. Clients send these where a boolean belongs, and templates read any other text as true.
SWITCHES = {"true": True, "false": False}
#: Hints of OpenAI's chat requests, which translations of other APIs keep.
_KEPT = (
    "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
)  # fmt: skip
#: Hints that no chat API knows.
UNKNOWN = ("client_metadata", "context_management", "defer_loading")
_DROPPED = (*UNKNOWN, "metadata")
#: Hints that have no effect on an answer.
HINTS = (*_DROPPED, *_KEPT)
#: Spellings of the reasoning effort.
EFFORTS = ("reasoning_effort", "output_config", "reasoning", "thinking", "think")
_LOW_BUDGET, _MEDIUM_BUDGET = 4096, 16384  # thinking budgets below these are low and medium efforts, in tokens
_EFFORTS = {"true": "medium", "false": "none"}  # efforts of Ollama's `think`


class Hints(msgspec.Struct, kw_only=True):
    """Fields that no request is refused for. Subclasses narrow the types of fields that have an effect."""

    # Reasoning effort in the spellings of OpenAI, Anthropic, OpenRouter, Anthropic's budgets and Ollama.
    reasoning_effort: Any = None
    output_config: Any = None
    reasoning: Any = None
    thinking: Any = None
    think: Any = None
    # Caller and accounting.
    user: Any = None
    safety_identifier: Any = None
    metadata: Any = None
    client_metadata: Any = None
    service_tier: Any = None
    # Caching and loading. These are so common that `cache_control` gets no note.
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    cache_control: Any = None
    context_management: Any = None
    defer_loading: Any = None

    @property
    def effort(self) -> tuple[str | None, str]:
        """Reasoning effort, and the field that sets it."""
        efforts = {
            "reasoning_effort": self.reasoning_effort,
            "output_config.effort": member(self.output_config, "effort"),
            "reasoning.effort": member(self.reasoning, "effort"),
            "thinking": None if self.thinking is None else _thinking_effort(self.thinking),
            "think": _EFFORTS.get(str(self.think).lower(), self.think),
        }
        return next(((value, name) for name, value in efforts.items() if isinstance(value, str)), (None, ""))

    @property
    def kept(self) -> dict[str, Any]:
        """The hints for the chat request that this request is translated to."""
        return {name: value for name in _KEPT if (value := getattr(self, name)) is not None}

    def dropped(self, *used: str) -> list[str]:
        """Return notes on the hints that no chat request has, except `used`."""
        return [f"{name}: no effect" for name in _DROPPED if getattr(self, name) is not None and name not in used]


def unused_hints(
    fields: Mapping[str, Any],
    used: Collection[str] = (),
    names: Mapping[str, str] | None = None,
    hints: Sequence[str] = HINTS,
) -> tuple[str, ...]:
    """Return one note on the `hints` in `fields`, except `used`. `names`: the caller's names of fields."""
    names = names or {}
    given = [names.get(name, name) for name in hints if fields.get(name) is not None and name not in used]
    return (f"{', '.join(given)}: no effect",) if given else ()


def member(value: Any, name: str) -> Any:
    """Return a field of an object or struct; None for other values."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)  # pyright: ignore


def _thinking_effort(thinking: Any) -> str:
    """Return the reasoning effort of Anthropic's `thinking`, whose budget is a number of tokens."""
    if member(thinking, "type") == "disabled":
        return "none"
    budget = member(thinking, "budget_tokens")
    tokens = budget if isinstance(budget, int) else _LOW_BUDGET
    return "low" if tokens < _LOW_BUDGET else "medium" if tokens < _MEDIUM_BUDGET else "high"
