"""Keys of a running gateway: what each may do, and changes that hold at once in every process."""

from __future__ import annotations

import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gateway_keys import make_key
from updraft.cloud_engine.gateway.access.database import KeyDatabase, KeyRotation, NewKey
from updraft.cloud_engine.gateway.access.keys import KeyStore
from updraft.cloud_engine.gateway.access.principal import ANONYMOUS, Limits
from updraft.protocol.errors import AuthenticationError, ConfigurationError, OverloadedError
from waiting import wait_for

ASK = {"model": "echo", "messages": [{"role": "user", "content": "abc"}]}


@dataclass
class TwoGateways:
    """Two processes over one key database, as two workers are."""

    clients: list[httpx.Client]
    file: Path
    admin: dict[str, str]

    def manage(self, method: str, path: str = "", **options: Any) -> httpx.Response:
        return self.clients[0].request(method, f"/admin/keys{path}", headers=self.admin, **options)

    def statuses(self, key: str, method: str = "POST", path: str = "/v1/chat/completions") -> list[int]:
        body = {"json": ASK} if path == "/v1/chat/completions" else {}
        return [client.request(method, path, headers=bearer(key), **body).status_code for client in self.clients]


@pytest.fixture
def gateways(spawn: Any, fake_node: Any, tmp_path: Path) -> Iterator[TwoGateways]:
    file = tmp_path / "keys.sqlite3"
    admin = bearer(make_key(file, "operator", "admin"))
    command = ["-m", "updraft", "gateway", "--port", "0", "--node", fake_node.url, "--keys", str(file)]
    clients = [
        httpx.Client(base_url=spawn(*command, "--ledger", str(tmp_path / f"{n}.sqlite3"), "--exit-with-parent").url)
        for n in range(2)
    ]
    yield TwoGateways(clients, file, admin)
    for client in clients:
        client.close()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_health_reports_a_missing_key_database(gateways: TwoGateways) -> None:
    health = [client.get("/health") for client in gateways.clients]
    assert [each.json()["status"] for each in health] == ["ok", "ok"]
    gateways.file.rename(gateways.file.with_suffix(".away"))
    for client in gateways.clients:
        wait_for(lambda client=client: client.get("/health").json().get("keys") == "unavailable")
        degraded = client.get("/health")
        assert (degraded.status_code, degraded.json()["status"]) == (200, "degraded")
    gateways.file.with_suffix(".away").rename(gateways.file)
    for client in gateways.clients:
        wait_for(lambda client=client: client.get("/health").json()["status"] == "ok")


def test_health_reports_an_unreachable_store_of_limits(spawn: Any, fake_node: Any, tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # refuses, because nobody listens
        file, store = tmp_path / "keys.sqlite3", f"redis://127.0.0.1:{silent.getsockname()[1]}"
        make_key(file, "operator", "admin")
        command = [
            "--node",
            fake_node.url,
            "--keys",
            str(file),
            "--ledger",
            str(tmp_path / "db"),
            "--limits-url",
            store,
        ]
        url = spawn("-m", "updraft", "gateway", "--port", "0", *command, "--exit-with-parent").url
        wait_for(lambda: httpx.get(f"{url}/health").json().get("limits") == "unavailable")
        degraded = httpx.get(f"{url}/health")
        assert (degraded.status_code, degraded.json()["status"]) == (200, "degraded")


def test_a_key_lives_and_dies_without_a_restart(gateways: TwoGateways) -> None:
    made = gateways.manage("POST", json={"name": "team-a"})
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    key, key_id = made.json()["key"], made.json()["id"]
    assert gateways.statuses(key) == [200, 200]
    rotated = gateways.manage("POST", f"/{key_id}/rotate").json()
    assert rotated["id"] == key_id
    wait_for(lambda: gateways.statuses(key) == [401, 401])
    assert gateways.statuses(rotated["key"]) == [200, 200]
    assert gateways.manage("DELETE", f"/{key_id}").json() == {"id": key_id, "revoked": True}
    wait_for(lambda: gateways.statuses(rotated["key"]) == [401, 401])
    assert gateways.manage("DELETE", f"/{key_id}").json()["error"]["code"] == "key_not_found"
    audit = gateways.clients[1].get("/admin/audit", headers=gateways.admin).json()["audit"]
    assert [(entry["action"], entry["name"]) for entry in audit] == [
        ("revoke", "team-a"), ("rotate", "team-a"), ("create", "team-a"), ("create", "operator"),
    ]  # fmt: skip
    assert audit[0]["actor"].startswith("operator (key-")
    texts = [str(audit), gateways.manage("GET").text, gateways.file.read_bytes().decode("latin-1")]
    assert not [text for text in texts if key in text or rotated["key"] in text]


def test_a_key_does_what_its_scopes_say(gateways: TwoGateways) -> None:
    keys = {scope: make_key(gateways.file, scope, scope) for scope in ("inference", "usage")}
    keys["admin"] = gateways.admin["authorization"].split()[1]
    routes = {
        "inference": [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/echo")],
        "usage": [("GET", "/admin/usage")],
        "admin": [("GET", "/admin/nodes"), ("GET", "/admin/keys"), ("GET", "/admin/audit")],
    }
    for scope, wanted in routes.items():
        for method, path in wanted:
            for name, key in keys.items():
                assert gateways.statuses(key, method, path) == [200 if name == scope else 403] * 2, (name, path)
            assert gateways.statuses("nobody's", method, path) == [401] * 2
    refused = gateways.clients[0].delete("/admin/keys/operator", headers=bearer(keys["inference"]))
    assert (refused.status_code, "'admin'" in refused.json()["error"]["message"]) == (403, True)


def test_a_key_sees_and_asks_its_own_models(gateways: TwoGateways) -> None:
    other, ours = (make_key(gateways.file, name, models=(name,)) for name in ("other", "echo"))
    refused = gateways.clients[0].post("/v1/chat/completions", json=ASK, headers=bearer(other))
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "model")
    assert gateways.clients[0].get("/v1/models", headers=bearer(other)).json()["data"] == []
    assert gateways.clients[0].get("/v1/models/echo", headers=bearer(other)).status_code == 404
    assert gateways.statuses(ours) == [200, 200]
    assert len(gateways.clients[0].get("/v1/models", headers=bearer(ours)).json()["data"]) == 1


def test_a_key_that_cannot_be_is_refused(gateways: TwoGateways) -> None:
    cases: list[tuple[bytes, str | None]] = [
        (b"{", None),
        (b"[]", None),
        (b'{"name": "a b"}', "name"),
        (b'{"name": "a/../b"}', "name"),
        (b'{"name": "a", "scopes": []}', "scopes"),
        (b'{"name": "a", "scopes": ["root"]}', "scopes[0]"),
        (b'{"name": "a", "nonsense": 1}', "nonsense"),
        (b'{"name": "a", "limits": {"max_concurrency": 0}}', "limits.max_concurrency"),
        (b'{"name": "a", "limits": {"tokens": 1}}', "limits"),
        (b'{"name": "a", "expires_in_days": -1}', "expires_in_days"),
        (b'{"name": "operator"}', "name"),
    ]
    for body, param in cases:
        refused = gateways.manage("POST", content=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert [key["name"] for key in gateways.manage("GET").json()["keys"]] == ["operator"]


def test_without_keys_there_is_nothing_to_manage(spawn: Any, fake_node: Any, tmp_path: Path) -> None:
    command = ("-m", "updraft", "gateway", "--port", "0", "--node", fake_node.url, "--no-auth", "--exit-with-parent")
    url = spawn(*command, "--ledger", str(tmp_path / "usage.sqlite3")).url
    refused = httpx.get(f"{url}/admin/keys")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_keys")
    assert KeyStore(None).principal("") is ANONYMOUS


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """So much later by the clock that expiries are on; what is cached stays."""
    clock = SimpleNamespace(time=lambda: time.time() + seconds, monotonic=time.monotonic)
    monkeypatch.setattr("updraft.cloud_engine.gateway.access.keys.time", clock)


def test_a_key_expires_also_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.sqlite3"
    _, key = KeyDatabase(file).create(NewKey("brief", expires_in_days=1), "test")
    store = KeyStore(file)
    assert store.principal(f"Bearer {key}").name == "brief"
    later(monkeypatch, 86_401)
    with pytest.raises(AuthenticationError, match="has expired"):
        store.principal(f"Bearer {key}")


def test_two_keys_work_until_the_overlap_is_over_and_never_beyond_the_expiry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = KeyDatabase(tmp_path / "keys.sqlite3")
    record, first = database.create(NewKey("team", expires_in_days=1), "test")
    _, second = database.rotate("team", "test", KeyRotation(overlap_s=300))
    _, third = database.rotate(record.principal.key_id, "test", KeyRotation(overlap_s=3600))
    with closing(sqlite3.connect(database.path)) as connection:
        rows = connection.execute("SELECT expires_at FROM digests ORDER BY expires_at").fetchall()
    assert [row[0] - time.time() > limit for row, limit in zip(rows, (200, 3500, 86_000), strict=True)] == [True] * 3
    assert rows[2][0] == record.expires_at
    later(monkeypatch, 301)
    store = KeyStore(database.path)
    assert store.principal(f"Bearer {second}") == store.principal(f"Bearer {third}") == record.principal
    with pytest.raises(AuthenticationError):
        store.principal(f"Bearer {first}")


def test_a_database_that_is_gone_or_another_lets_nobody_in(tmp_path: Path) -> None:
    file, other = tmp_path / "keys.sqlite3", tmp_path / "other.sqlite3"
    old, new = make_key(file, "old"), make_key(other, "new")
    store = KeyStore(file)
    assert store.principal(f"Bearer {old}").name == "old"
    for path in tmp_path.glob("keys.sqlite3*"):
        path.unlink()
    time.sleep(0.3)
    with pytest.raises(OverloadedError):
        store.principal(f"Bearer {old}")
    other.replace(file)
    assert store.principal(f"Bearer {new}").name == "new"
    with pytest.raises(AuthenticationError):
        store.principal(f"Bearer {old}")


def test_limits_are_kept_as_they_were_given(tmp_path: Path) -> None:
    limits = Limits(requests_per_minute=3, usd_per_month=0.0)
    key = make_key(tmp_path / "keys", "a", limits=limits, priority="batch", tenant="t")
    principal = KeyStore(tmp_path / "keys").principal(f"Bearer {key}")
    assert (principal.limits, principal.priority, principal.tenant) == (limits, "batch", "t")


def test_a_key_cannot_be_named_like_the_id_of_another(tmp_path: Path) -> None:
    """Keys are rotated and revoked by name or id."""
    database = KeyDatabase(tmp_path / "keys")
    record, _ = database.create(NewKey("a"), "operator")
    with pytest.raises(ConfigurationError, match="already exists"):
        database.create(NewKey(record.principal.key_id), "operator")


def test_a_limit_is_kept_under_its_new_name(tmp_path: Path) -> None:
    key = make_key(tmp_path / "keys", "concurrent", limits=Limits(max_concurrency=3), models=("concurrent",))
    with closing(sqlite3.connect(tmp_path / "keys")) as connection, connection:
        connection.execute("UPDATE keys SET principal = replace(principal, 'max_concurrency', 'concurrent')")
    (record,) = KeyDatabase(tmp_path / "keys").keys()
    principal = KeyStore(tmp_path / "keys").principal(f"Bearer {key}")
    assert principal == record.principal
    assert (principal.limits, principal.models) == (Limits(max_concurrency=3), ("concurrent",))
