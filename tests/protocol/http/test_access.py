"""Whom a server lets in: Host, Origin and key, checked before any route."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.testclient import TestClient
from updraft.protocol.errors import AuthenticationError, ConfigurationError, InvalidRequestError, PermissionDeniedError
from updraft.protocol.http.access import Access, check_keyless
from updraft.protocol.http.app import create_app


def lets_in(access: Access, *headers: tuple[str, str], address: str = "127.0.0.1", path: str = "/v1/models") -> bool:
    encoded = [(name.encode(), value.encode()) for name, value in headers]
    try:
        access.check({"type": "http", "server": (address, 4114), "path": path, "headers": encoded})
    except (PermissionDeniedError, AuthenticationError):
        return False
    return True


@pytest.mark.parametrize(
    ("host", "address", "served"),
    [
        ("localhost:4114", "127.0.0.1", True),
        ("LOCALHOST", "127.0.0.1", True),
        ("127.0.0.1:4114", "127.0.0.1", True),
        ("[::1]:4114", "::1", True),
        ("127.0.0.2", "127.0.0.1", True),
        ("box.lan:80", "127.0.0.1", True),
        ("[2001:db8::7]", "127.0.0.1", True),
        ("evil.example:4114", "127.0.0.1", False),
        ("localhost.evil.example", "127.0.0.1", False),
        ("evil.localhost", "127.0.0.1", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("evil.example@localhost", "127.0.0.1", False),
        ("localhost@evil.example", "127.0.0.1", False),
        ("localhost/evil.example", "127.0.0.1", False),
        ("localhost:4114:evil", "127.0.0.1", False),
        ("localhost, evil.example", "127.0.0.1", False),
        ("0.0.0.0:4114", "127.0.0.1", False),
        ("192.168.1.5", "127.0.0.1", False),
        ("", "127.0.0.1", False),
        ("[]", "127.0.0.1", False),
        ("192.168.1.5:4114", "192.168.1.5", True),
        ("10.9.8.7", "172.17.0.2", True),
        ("evil.example", "192.168.1.5", False),
    ],
)
def test_hosts(host: str, address: str, served: bool) -> None:
    access = Access(allowed_hosts=("Box.lan", "2001:db8::7", ""))
    assert lets_in(access, ("host", host), address=address) is served


def test_every_host_header_counts_and_one_is_needed() -> None:
    assert not lets_in(Access())
    assert not lets_in(Access(), ("host", "localhost"), ("host", "evil.example"))


@pytest.mark.parametrize(
    ("origin", "served"),
    [
        ("http://localhost:3000", True),
        ("https://127.0.0.1", True),
        ("http://[::1]:8080", True),
        ("https://App.example", True),
        ("tauri://localhost", True),
        ("http://box.lan:4114", True),
        ("http://box.lan", False),
        ("https://app.example:8443", False),
        ("http://app.example", False),
        ("https://evil.example", False),
        ("http://localhost.evil.example", False),
        ("http://localhost@evil.example", False),
        ("file://", False),
        ("chrome-extension://localhost", False),
        ("null", False),
        ("", False),
    ],
)
def test_origins(origin: str, served: bool) -> None:
    access = Access(("box.lan",), ("https://app.example", "tauri://localhost"))
    assert lets_in(access, ("host", "box.lan:4114"), ("origin", origin)) is served


def test_a_key_is_asked_for_everywhere_but_by_health() -> None:
    access = Access(api_key="sch\u00f6n")
    host = ("host", "localhost")
    assert lets_in(access, host, ("authorization", "Bearer sch\u00f6n"))
    assert not lets_in(access, host, ("authorization", "Bearer other"))
    assert not lets_in(access, host, path="/metrics")
    assert lets_in(access, host, path="/health")
    assert not lets_in(access, ("host", "evil.example"), path="/health")
    assert "sch" not in repr(access)
    assert lets_in(Access(api_key="key", public_paths=("/health", "/metrics")), host, path="/metrics")


def test_refused_requests_reach_no_route_and_name_the_setting() -> None:
    reached: list[str] = []

    async def route(request: Request) -> Response:
        reached.append(request.method)
        return PlainTextResponse("ok")

    app = create_app("test", access=Access(allowed_origins=("https://app.example",)))
    app.add_route("/admin/usage", route, methods=["GET", "POST"])
    client = TestClient(app, base_url="http://localhost")
    for headers, setting in (({"host": "evil.example"}, "allowed_hosts"), ({"origin": "null"}, "allowed_origins")):
        for method in ("GET", "POST", "OPTIONS"):
            answer = client.request(method, "/admin/usage", headers={"content-type": "text/plain", **headers})
            assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
            assert setting in answer.json()["error"]["message"]
    assert not reached
    page = {"origin": "https://app.example"}
    assert client.get("/admin/usage", headers=page).headers["access-control-allow-origin"] == page["origin"]
    preflight = {**page, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert client.options("/admin/usage", headers=preflight).status_code == 200
    private = client.options("/admin/usage", headers={**preflight, "access-control-request-private-network": "true"})
    assert (private.status_code, private.headers["access-control-allow-private-network"]) == (200, "true")
    assert reached == ["GET"]


@pytest.mark.parametrize(
    ("allowed", "origin", "other"),
    [
        ("app://obsidian.md", "app://obsidian.md", "app://other"),
        ("tauri://localhost", "tauri://localhost", "tauri://other"),
        ("vscode-file://", "vscode-file://vscode-app", "vscode-webview://x"),
        ("app://*", "app://anything", "apps://anything"),
        ("Moz-Extension://*", "moz-extension://0f1e-22", "chrome-extension://0f1e-22"),
        ("chrome-extension://abc", "chrome-extension://abc", "chrome-extension://abd"),
        ("https://app.example", "https://app.example", "https://appxexample"),
    ],
)
def test_pages_of_desktop_apps_and_extensions(allowed: str, origin: str, other: str) -> None:
    app = create_app("test", access=Access(allowed_origins=("https://b.example", allowed)))
    app.add_route("/", lambda _: PlainTextResponse("ok"), methods=["POST"])
    client = TestClient(app, base_url="http://localhost")
    answer = client.post("/", headers={"origin": origin})
    assert (answer.text, answer.headers["access-control-allow-origin"]) == ("ok", origin)
    preflight = {"origin": origin, "access-control-request-method": "POST"}
    assert client.options("/", headers=preflight).headers["access-control-allow-origin"] == origin
    for stranger in (other, "null", "", "evil.example", f"{origin}.evil.example"):
        refused = client.post("/", headers={"origin": stranger}).status_code
        assert refused == (200 if allowed.endswith(("://", "*")) and stranger.startswith(origin) else 403)


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed_origins": ("https://",)},
        {"allowed_origins": ("http://*",)},
        {"allowed_origins": ("https://*.example",)},
        {"allowed_origins": ("app:",)},
        {"allowed_origins": ("app://a/b",)},
        {"allowed_hosts": ("http://box.lan",)},
        {"allowed_hosts": ("box.lan:4114",)},
        {"allowed_hosts": ("*",)},
        {"allowed_hosts": ("*.box.lan",)},
        {"allowed_origins": ("app.example",)},
        {"allowed_origins": ("*",)},
        {"allowed_origins": ("https://app.example/path",)},
    ],
)
def test_names_that_no_browser_sends_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="allowed_"):
        Access(**settings)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "box.lan", "192.168.1.5"])
def test_without_a_key_only_loopback_is_served(host: str) -> None:
    with pytest.raises(ConfigurationError, match="without a key: set one"):
        check_keyless(host, "set one")
    for ours in ("127.0.0.1", "localhost", "::1", "127.8.9.10"):
        check_keyless(ours, "set one")


def test_localhost_is_what_the_system_says_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    check_keyless("localhost", "set one")
    addresses = [(2, 1, 6, "", ("127.0.0.1", 0)), (2, 1, 6, "", ("192.0.2.7", 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_words, **_options: addresses)
    with pytest.raises(ConfigurationError, match="without a key"):
        check_keyless("localhost", "set one")


@pytest.mark.parametrize(
    "keys",
    [
        (("authorization", "Bearer a"), ("authorization", "Bearer b")),
        (("authorization", "Basic a"), ("authorization", "Bearer b")),
        (("x-api-key", "a"), ("x-api-key", "b")),
    ],
)
@pytest.mark.parametrize("required", ["a", "b", None])
def test_two_keys_are_refused_in_any_order(keys: tuple[tuple[str, str], ...], required: str | None) -> None:
    for order in (keys, keys[::-1]):
        with pytest.raises(InvalidRequestError, match="Send only one") as caught:
            lets_in(Access(api_key=required), ("host", "localhost"), *order)
        assert caught.value.param == keys[0][0]


def test_authorization_has_priority_over_another_x_api_key() -> None:
    keys = (("authorization", "Bearer a"), ("x-api-key", "b"))
    for order in (keys, keys[::-1]):
        assert lets_in(Access(api_key="a"), ("host", "localhost"), *order)
        assert lets_in(Access(), ("host", "localhost"), *order)
        assert not lets_in(Access(api_key="b"), ("host", "localhost"), *order)


def test_the_same_key_twice_is_one_key() -> None:
    keys = (("authorization", "Bearer a"), ("authorization", "bearer  a"), ("x-api-key", "a"), ("authorization", ""))
    assert lets_in(Access(api_key="a"), ("host", "localhost"), *keys)
