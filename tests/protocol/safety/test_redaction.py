"""The part of an address that others may see."""

import pytest
from updraft.protocol.safety.redaction import is_sendable, shown_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:canary@host:1/v1", "http://host:1/v1"),
        ("https://canary@host", "https://host"),
        ("http://user:p@canary@host/v1", "http://host/v1"),
        ("http://user:can/ary@host/v1", "http://host/v1"),
        ("http://user:canary@[::1]:80/", "http://[::1]:80/"),
        ("http://user:canary@[::1/", "http://[::1/"),
        ("http://host/v1?key=canary", "http://host/v1"),
        ("http://host/v1#canary", "http://host/v1"),
        ("user:canary@host", "host"),
        ("http://host/a@b", "http://host/a@b"),
        ("http://host:8000/v1", "http://host:8000/v1"),
    ],
)
def test_no_secret_is_shown(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@pytest.mark.parametrize(
    ("key", "sendable"), [("sk-1", True), ("sk-1\n", False), ("sk\r\nx: y", False), ("clé", False)]
)
def test_keys_that_no_header_holds(key: str, sendable: bool) -> None:
    assert is_sendable(key) is sendable
