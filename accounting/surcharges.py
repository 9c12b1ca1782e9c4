"""Surcharges: request fields and headers that raise a provider's price per token, so that no budget can bound the cost.

The price table has one price per model, for the usual service.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..protocol.errors import UnsupportedFeatureError
from ..protocol.http.forwarding import Forwarding
from ..protocol.http.lenient_json import object_of
from .token_estimate import NESTED

# Values of each field that cost no more than the usual service.
_USUAL = {
    "service_tier": ("auto", "default", "flex", "standard", "standard_only"),
    "speed": ("standard",),
    "inference_geo": ("global",),
    "provider": (),  # OpenRouter's choice among hosts, whose prices differ
}
#: Fields that `surcharge_of` reads.
PRICED = (*_USUAL, *NESTED)
_BETA = "anthropic-beta"
_LONG_CONTEXT = "context-1m"  # prefix of the beta feature with a higher price for long prompts


def surcharge_of(fields: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """Return the first field or header of a request that raises the price per token, or an empty string.

    `headers`: values by lower-case name. Numbers never raise the price: `speed` of speech is a number.
    """
    for table in (fields, *(object_of(fields.get(name)) for name in NESTED)):
        for name, usual in _USUAL.items():
            if isinstance(value := table.get(name), str | dict) and value not in usual:
                return name
    return _BETA if _LONG_CONTEXT in headers.get(_BETA, "") else ""


def check_surcharges(body: Mapping[str, Any], forwarded: Forwarding) -> None:
    """Refuse a request, in the caller's API or translated, that raises the price. Raises UnsupportedFeatureError."""
    name = surcharge_of(body, forwarded.headers)
    if not name and (native := forwarded.native) is not None:
        name = surcharge_of(native.fields, native.headers)
    if name:
        raise surcharge_refused(name)


def surcharge_refused(name: str) -> UnsupportedFeatureError:
    """Return the error of a request to which a budget in dollars applies. `name`: result of `surcharge_of`."""
    message = f"{name} can raise the price of tokens, but a budget applies to this request: leave it out."
    return UnsupportedFeatureError(message, param=name)
