"""Hints: request fields that no answer depends on, and the reasoning effort. Every API accepts all of them."""

from __future__ import annotations

from typing import Any, cast

import msgspec

#: Texts that clients send in place of booleans.
SWITCHES = {"true": True, "false": False}
_CACHE = ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
_KEPT = ("user", "service_tier", "safety_identifier", *_CACHE)  # fields of chat requests too, so translations keep them
#: Fields in which the various APIs send the reasoning effort.
EFFORTS = ("reasoning_effort", "output_config", "reasoning", "thinking", "think")
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512  # OpenAI's limits of metadata, in pairs and characters
METADATA_LIMITS = (
    f"metadata holds at most {_MAX_PAIRS} texts of up to {_MAX_VALUE} characters, with names of up to {_MAX_KEY}"
)
_SWITCHED = {"true": "medium", "false": "none"}  # effort by the value of Ollama's `think`


class UnknownHints(msgspec.Struct, kw_only=True):
    """Hints that do not exist in OpenAI's chat requests."""

    client_metadata: Any = None
    context_management: Any = None
    defer_loading: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    background_options: Any = None
    max_tool_calls: Any = None


UNKNOWN = UnknownHints.__struct_fields__
_DROPPED = (*UNKNOWN, "metadata")
#: Hints without effect on an answer. `cache_control` is missing, because it is too common for a note.
HINTS = (*_DROPPED, *_KEPT)


class Hints(UnknownHints, kw_only=True):
    """Fields that every request accepts. Subclasses narrow the types of the fields that have an effect."""

    reasoning_effort: Any = None
    output_config: Any = None
    reasoning: Any = None
    thinking: Any = None
    think: Any = None
    user: Any = None
    safety_identifier: Any = None
    metadata: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    cache_control: Any = None

    @property
    def effort(self) -> tuple[str | None, str]:
        """Reasoning effort, and the name of the field that sets it."""
        efforts = {
            "reasoning_effort": self.reasoning_effort,
            "output_config.effort": member(self.output_config, "effort"),
            "reasoning.effort": member(self.reasoning, "effort"),
            "thinking": None if self.thinking is None else _thinking_effort(self.thinking),
            "think": _SWITCHED.get(str(self.think).lower(), self.think),
        }
        return next(((value, name) for name, value in efforts.items() if isinstance(value, str)), (None, ""))

    def kept(self, *same: str) -> dict[str, Any]:
        """Return the hints, and the fields `same`, that the translation of this request to a chat request keeps."""
        return {name: value for name in (*same, *_KEPT) if (value := getattr(self, name)) is not None}

    def dropped(self, *used: str) -> list[str]:
        """Return notes for the answer on the hints that are dropped, except the fields in `used`."""
        return [f"{name}: no effect" for name in _DROPPED if getattr(self, name) is not None and name not in used]


def storable(metadata: Any) -> dict[str, str]:
    """Return the pairs of `metadata` that OpenAI's limits allow to store."""
    pairs = [(name, value) for name, value in object_of(metadata).items() if isinstance(value, str)]
    return dict(
        [(name, value) for name, value in pairs if len(name) <= _MAX_KEY and len(value) <= _MAX_VALUE][:_MAX_PAIRS]
    )


def metadata_notes(metadata: Any) -> tuple[str, ...]:
    """Return a note if `storable` leaves out a part of `metadata`."""
    return () if metadata in (None, storable(metadata)) else (f"metadata: kept in part, {METADATA_LIMITS}",)


def object_of(value: Any) -> dict[str, Any]:
    """Return `value` if it is an object, else an empty object."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def member(value: Any, name: str) -> Any:
    """Return a field of an object or struct; None for other values."""
    return object_of(msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else value).get(name)


def _thinking_effort(thinking: Any) -> str:
    """Return the reasoning effort of Anthropic's `thinking`, whose budget is a number of tokens."""
    budget = member(thinking, "budget_tokens")
    tokens = budget if isinstance(budget, int) else 4096
    effort = "low" if tokens < 4096 else "medium" if tokens < 16384 else "high"
    return "none" if member(thinking, "type") == "disabled" else effort
