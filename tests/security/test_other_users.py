"""Other users of the machine get nothing from a daemon or node without a key, by whatever path or protocol."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from raw_http import post
from server_processes import running
from tiny_model import write_model
from updraft.protocol.http.access import PeerUser
from updraft.protocol.safety.system import NO_USER, connection_user

NOBODY = 65534
SERVE = ("-m", "updraft", "serve", "--port", "0", "--local", "none", "--cloud-url", "http://127.0.0.1:9/v1")
SERVE += ("--cloud-model", "big")
#: A client that becomes another user before it has a socket.
CLIENT = """
import encodings.idna, os, socket, sys
os.setgroups([]); os.setgid({user}); os.setuid({user})
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 30) as connection:
    connection.sendall(sys.stdin.buffer.read())
    sys.stdout.buffer.write(connection.makefile("rb").read())
"""
UPGRADE = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: "
UPGRADE += b"AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can change its user")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no other system tells whose a connection is")


def get(path: str, *lines: bytes) -> bytes:
    return b"\r\n".join(
        [f"GET {path} HTTP/1.1".encode(), b"host: localhost", *(lines or (b"connection: close\r\n\r\n",))]
    )


def answer_to(user: int, url: str, request: bytes) -> tuple[int, bytes]:
    """Status and body of what a process of this user is answered."""
    address = urlsplit(url)
    command = [sys.executable, "-P", "-c", CLIENT.format(user=user), str(address.hostname), str(address.port)]
    received = subprocess.run(command, input=request, capture_output=True, check=True, timeout=60).stdout
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.fixture(scope="module", params=["127.0.0.1", "::1"])
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = str(tmp_path_factory.mktemp("home"))
    with running(*SERVE, "--host", request.param, UPDRAFT_HOME=home) as process:
        yield process.url


REQUESTS = {
    "models": get("/v1/models"),
    "chat": post("/v1/chat/completions", b'{"model": "cloud", "messages": [{"role": "user", "content": "hi"}]}'),
    "ollama pull": post("/api/pull", b'{"model": "smollm2"}'),
    "pull of the page": post("/updraft/models/pull", b'{"model": "smollm2"}'),
    "websocket": get("/updraft/chat", UPGRADE),
    "no route": get("/nowhere"),
}


@needs_root
@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_another_user_is_refused(request_: bytes, daemon: str) -> None:
    closing = request_.replace(b"host:", b"connection: close\r\nhost:", 1) if request_.startswith(b"POST") else request_
    status, body = answer_to(NOBODY, daemon, closing)
    assert status == 403
    error = json.loads(body)["error"]
    error = error if isinstance(error, dict) else {"message": error}
    assert "set a key with --client-api-key-env, or set allow_other_users = true" in error["message"]


@needs_root
def test_the_same_user_and_the_health_check_are_served(daemon: str) -> None:
    assert answer_to(os.geteuid(), daemon, REQUESTS["models"])[0] == 200
    assert answer_to(NOBODY, daemon, get("/health"))[0] == 200
    assert httpx.get(f"{daemon}/v1/models").status_code == 200


@needs_root
@pytest.mark.parametrize(
    ("options", "variables", "key"),
    [
        ((), {"UPDRAFT_ALLOW_OTHER_USERS": "true"}, b""),
        (("--client-api-key-env", "THE_KEY"), {"THE_KEY": "secret"}, b"secret"),
    ],
    ids=["setting", "key"],
)
def test_a_setting_or_a_key_lets_other_users_in(
    options: tuple[str, ...], variables: dict[str, str], key: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with running(*SERVE, *options, UPDRAFT_HOME=str(tmp_path)) as process:
        asked = get("/v1/models", b"authorization: Bearer " + key, b"connection: close\r\n\r\n")
        assert answer_to(NOBODY, process.url, asked)[0] == 200


@pytest.mark.slow
@needs_root
def test_a_node_without_a_key_refuses_them_too(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny", 0)
    with running("-m", "updraft", "node", "--port", "0", "--model", str(model), "--threads", "1") as node:
        status, body = answer_to(NOBODY, node.url, get("/v1/models"))
        assert (status, json.loads(body)["error"]["code"]) == (403, "other_user")
        assert b"UPDRAFT_NODE_API_KEY" in body
        assert httpx.get(f"{node.url}/v1/models").status_code == 200


@needs_root
@pytest.mark.parametrize(
    ("family", "server_at", "client_at"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET, "127.0.0.2", "127.0.0.2"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::", "127.0.0.1"),
        (socket.AF_INET6, "::", "::ffff:127.0.0.1"),
    ],
)
def test_user_of_a_connection(family: int, server_at: str, client_at: str) -> None:
    """An IPv4 client of a server on both families has one more form there, and another one in the kernel's table."""
    with socket.create_server((server_at, 0), family=family, dualstack_ipv6=server_at == "::") as server:
        address = (client_at, server.getsockname()[1])
        os.seteuid(NOBODY)
        try:
            client = socket.create_connection(address)
        finally:
            os.seteuid(0)
        connection, _ = server.accept()
        with connection:
            ends = connection.getpeername()[:2], connection.getsockname()[:2]
            with client:
                assert connection_user(*ends) == NOBODY
                client.shutdown(socket.SHUT_WR)
                assert connection_user(*ends) == NOBODY
            assert connection_user(*ends) == NO_USER, "it has sent, closed, and must not be taken for root"


def test_a_client_that_is_gone_is_nobody() -> None:
    """A reset takes both ends out of the table at once; what the client sent can still be read."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        connection, _ = server.accept()
        with connection:
            ends = connection.getpeername(), connection.getsockname()
            assert connection_user(*ends) == os.geteuid()
            assert not PeerUser(*ends).is_other_user
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
            client.close()
            assert connection_user(*ends) == NO_USER
            assert PeerUser(*ends).is_other_user


def test_unlisted_connections_have_no_user() -> None:
    """As in a container whose /proc shows another network: nothing there is of our port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    assert connection_user(("127.0.0.1", 9), ("127.0.0.1", free)) is None
    assert not PeerUser(("127.0.0.1", 9), ("127.0.0.1", free)).is_other_user
    assert not PeerUser(None, None).is_other_user
