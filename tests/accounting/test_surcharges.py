"""Requests that raise the price per token are recognised, whichever API they use."""

from __future__ import annotations

from typing import Any

import pytest
from updraft.accounting.surcharges import check_surcharges, surcharge_of
from updraft.protocol.errors import UnsupportedFeatureError
from updraft.protocol.http.forwarding import Forwarding, NativeRequest

LONG = {"anthropic-beta": "prompt-caching-2024-07-31,context-1m-2025-08-07"}


@pytest.mark.parametrize(
    ("fields", "headers", "name"),
    [
        ({"service_tier": "priority"}, {}, "service_tier"),
        ({"extra_body": {"service_tier": "priority"}}, {}, "service_tier"),
        ({"speed": "fast"}, {}, "speed"),
        ({"inference_geo": "us"}, {}, "inference_geo"),
        ({"provider": {"order": ["dear-host"]}}, {}, "provider"),
        ({"extra_body": {"provider": {"sort": "throughput"}}}, {}, "provider"),
        ({}, LONG, "anthropic-beta"),
        ({"service_tier": "auto", "inference_geo": None}, {"anthropic-beta": "prompt-caching-2024-07-31"}, ""),
        ({"service_tier": "flex", "speed": 1.25}, {}, ""),
    ],
)
def test_fields_that_raise_the_price(fields: dict[str, Any], headers: dict[str, str], name: str) -> None:
    assert surcharge_of(fields, headers) == name


@pytest.mark.parametrize("native", [({"inference_geo": "us"}, {}), ({}, LONG)])
def test_the_request_before_its_translation_counts_too(native: tuple[dict[str, Any], dict[str, str]]) -> None:
    with pytest.raises(UnsupportedFeatureError, match="can raise the price of tokens"):
        check_surcharges({}, Forwarding(native=NativeRequest("anthropic", *native)))
