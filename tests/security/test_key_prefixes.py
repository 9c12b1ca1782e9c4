"""A key is known by all of it: one that only begins like a cached key is refused."""

from __future__ import annotations

from typing import Any


def test_a_key_with_another_end_is_another_key(gateway: Any) -> None:
    key = gateway.key
    assert gateway.chat() == 200, "from here on the key is cached"
    for other in (key[:-1], key + "x", key[:-1] + "!", key[:40], key[:9], key.upper(), key.swapcase()):
        assert gateway.chat(other) == 401, other
    assert gateway.chat() == 200
