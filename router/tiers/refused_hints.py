"""Hints that a cloud's models refuse, and requests without these hints."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ...protocol.hints import EFFORTS, object_of
from ...protocol.http.forwarding import Forwarding
from ...protocol.http.lenient_json import json_bytes
from .failures import CloudFailure

#: Hints with the request fields that set them, and with a pattern of the errors that refuse them.
_HINTS = {
    "reasoning": (EFFORTS, re.compile("reasoning|thinking|effort", re.IGNORECASE)),
    "metadata": (("metadata",), re.compile("metadata")),
}


def hint_keys(body: Mapping[str, Any], forwarded: Forwarding) -> dict[str, bytes]:
    """Return the hints of a request, each with a key of the model and of the hint's values. Metadata of an answer that
    the cloud should store is more than a hint."""
    own: Mapping[str, Any] = {} if forwarded.native is None else forwarded.native.fields
    keys: dict[str, bytes] = {}
    for hint, (names, _) in _HINTS.items():
        values = [fields.get(name) for fields in (body, own) for name in names]
        if any(values) and not (hint == "metadata" and body.get("store") is True):
            keys[hint] = json_bytes([hint, body.get("model"), values])
    return keys


def refused_by(failure: CloudFailure) -> set[str]:
    """Return the hints because of which the cloud seems to have refused a request."""
    told = f"{failure.error.message} {failure.error.param}" if failure.status in (400, 422) else ""
    return {hint for hint, (_, pattern) in _HINTS.items() if pattern.search(told)}


def without(hints: Collection[str], body: dict[str, Any], forwarded: Forwarding) -> tuple[dict[str, Any], Forwarding]:
    """Return a request without `hints`, neither in its body nor in the caller's own request."""
    names = [name for hint in hints for name in _HINTS[hint][0]]
    native = forwarded.native and replace(forwarded.native, fields=_without(names, forwarded.native.fields))
    return _without(names, body), replace(forwarded, native=native)


def _without(names: list[str], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` without `names`. The format in `output_config` stays, because it is no hint."""
    kept = {name: value for name, value in fields.items() if name not in names}
    wanted = object_of(fields.get("output_config")).get("format")
    return {**kept, "output_config": {"format": wanted}} if wanted and "output_config" in names else kept
