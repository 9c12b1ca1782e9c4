"""Checks of names in requests: lengths, since names are quoted and stored, and spellings of fields."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from ..errors import UnsupportedFeatureError, invalid_field
from ..hints import object_of

MAX_NAME = 256  # maximum characters of a model's or tool's name
_MAX_SHOWN = 100  # maximum characters of a field's name in an error
_MAX_LABEL = 1024  # maximum characters of a caller's or request's identifier
_BOUNDS = {
    **dict.fromkeys(("model", "reasoning_effort", "service_tier", "verbosity", "prompt_cache_retention"), MAX_NAME),
    **dict.fromkeys(("user", "cache_salt", "safety_identifier", "prompt_cache_key"), _MAX_LABEL),
}

#: Fields that OpenRouter and others accept for fallback models, for which no permissions or prices were checked.
_FURTHER_MODELS = re.compile(
    r"models|model_list|route|preset|(\w+_)?fallbacks?|(draft|speculative)_(model|config)\w*|(lora|adapter)(s|_\w+)?",
    re.IGNORECASE,
)


def check_models(fields: Iterable[str]) -> None:
    """Refuse fields that name further models. Raises UnsupportedFeatureError."""
    if name := next(filter(_FURTHER_MODELS.fullmatch, fields), None):
        shown = name[:MAX_NAME]
        raise UnsupportedFeatureError(f"The field {shown!r} names further models: send one `model` only.", param=shown)


def check_spelling(fields: Iterable[str], known: Collection[str], prefix: str = "") -> None:
    """Refuse `Model` for `model`, since Go's JSON decoder reads both. `prefix`: path of the fields' object.

    Raises InvalidRequestError.
    """
    for name in fields:
        if name not in known and (usual := name.casefold()) in known:
            shown = (prefix + name)[:_MAX_SHOWN]
            raise invalid_field(shown, f"The field {shown!r} must be spelled {prefix + usual!r}.")


def check_names(fields: Mapping[str, Any]) -> None:
    """Check the lengths of names. Skips values of a wrong type, which decoding reports. Raises InvalidRequestError."""
    for field, most in _BOUNDS.items():
        _check(field, fields.get(field), most)
    tools: Any = fields.get("tools")
    named = [("tool_choice", fields.get("tool_choice"))]
    if isinstance(tools, list):
        named += [(f"tools[{index}]", tool) for index, tool in enumerate(cast("list[Any]", tools))]
    for path, tool in named:
        _check(f"{path}.function.name", object_of(object_of(tool).get("function")).get("name"), MAX_NAME)


def _check(param: str, value: Any, most: int) -> None:
    if isinstance(value, str) and len(value) > most:
        fault = f"{param} has {len(value)} characters, at most {most} are allowed: '{value[:40]}...'"
        raise invalid_field(param, fault)
