"""The proxy to a cloud, and wrong words about it in the environment."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from updraft.protocol.errors import ConfigurationError
from updraft.router.tiers.connection import CloudEndpoint, open_client, proxy_for

NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.mark.parametrize(
    ("no_proxy", "passed_by"),
    [
        ("localhost,127.0.0.0/8,::1/128", ["localhost", "127.9.9.9", "[::1]"]),
        ("[::1],10.0.0.0/8", ["[::1]", "10.1.2.3"]),
        ("localhost\n127.0.0.1 \t example.com", ["localhost", "127.0.0.1", "example.com"]),
        ("::1,fe80::/10", ["[::1]", "[fe80::1]"]),
        (".example.com", ["a.example.com", "example.com"]),
        ("*.example.com", ["a.example.com"]),
        ("Example.COM", ["a.b.example.com", "example.com"]),
        ("example.com:80,[::2]:80", ["example.com", "[::2]"]),
        ("http://example.com", ["example.com"]),
        ("xn--bcher-kva.example", ["b\xfccher.example"]),
        ("B\xfccher.example", ["b\xfccher.example"]),
        ("*", ["any.where", "127.0.0.1"]),
    ],
)
def test_hosts_that_bypass_the_proxy(no_proxy: str, passed_by: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    for host in passed_by:
        assert proxy_for(httpx.URL(f"http://{host}/v1")) is None, host
    for host in ("other.example", "notexample.com", "192.0.2.1", "[2001:db8::1]"):
        assert (proxy_for(httpx.URL(f"http://{host}/v1")) is None) == (no_proxy == "*"), host
    assert open_client(CloudEndpoint("http://other.example/v1")), "nothing in NO_PROXY keeps it from starting"


@pytest.mark.parametrize(
    "no_proxy",
    [
        "example.com:8080",
        "https://example.com",
        "example.com.evil",
        "example.com:" + "8" * 5000,
        "[::1",
        ":",
        ",,",
        "//",
    ],
)
def test_other_hosts_use_the_proxy(no_proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert proxy_for(httpx.URL("http://example.com/v1")) == "http://proxy.example:3128"


def test_a_proxy_is_for_its_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://secure.example:1")
    monkeypatch.setenv("ALL_PROXY", "http://all.example:2")
    assert proxy_for(httpx.URL("https://cloud.example/v1")) == "http://secure.example:1"
    assert proxy_for(httpx.URL("http://cloud.example/v1")) == "http://all.example:2"


@pytest.mark.parametrize("proxy", ["ftp://me:secret@proxy.example", "http://me:secret@[::1", "socks9://me:secret@x:1"])
def test_a_proxy_that_cannot_be_used_is_named_without_its_password(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(ConfigurationError, match="proxy") as caught:
        open_client(CloudEndpoint("http://cloud.example/v1"))
    assert "cloud.example" in caught.value.message
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("content", [None, b"", b"no certificate", "\ufeff".encode("utf-16")])
def test_certificates_that_cannot_be_read_are_named(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with pytest.raises(ConfigurationError, match=r"SSL_CERT_FILE=.*ca\.pem"):
        open_client(CloudEndpoint("https://cloud.example/v1"))
    assert open_client(CloudEndpoint("http://cloud.example/v1")), "no certificate is needed there"


def test_a_key_log_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSLKEYLOGFILE", "/dev/null/keys")
    with pytest.raises(ConfigurationError, match="SSLKEYLOGFILE=/dev/null/keys"):
        open_client(CloudEndpoint("https://cloud.example/v1"))


@pytest.mark.parametrize(
    "key", ["sk-secret\n", "sk-secret\r\nx-evil: 1", " sk-secret", "sk-\u0441ecret", "sk-secr\xe9t", "sk-\x00"]
)
def test_a_key_that_no_header_carries_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigurationError, match="API key") as caught:
        open_client(CloudEndpoint("http://127.0.0.1:9/v1", key))
    assert "sk-" not in str(caught.value)
    assert "secr" not in str(caught.value)
