"""TLS of real servers: handshakes hold up nobody, certificates are taken anew, and beyond loopback all is encrypted."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import subprocess
import sys
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from certificates import Authority
from raw_http import exchanged
from server_processes import FAKE_NODE, TINY_LIMIT, TYPING, running
from serving import serving
from starlette.types import Receive, Scope, Send
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.http import tls
from updraft.protocol.http.access import ConnectionLimits
from updraft.protocol.http.tls import TlsFiles, check_encrypted
from waiting import wait_for

GATEWAY = ("-m", "updraft", "gateway", "--port", "0", "--node", "http://127.0.0.1:1", "--no-auth")


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def serial(url: str, context: ssl.SSLContext) -> int:
    """Of the certificate that a new connection is shown."""
    address = urlsplit(url)
    with (
        socket.create_connection((address.hostname, address.port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as wrapped,
    ):
        certificate = wrapped.getpeercert()
        assert certificate
        return int(str(certificate["serialNumber"]), 16)


def test_a_new_certificate_is_taken_and_old_connections_live_on(authority: Authority, tmp_path: Path) -> None:
    certificate, key, log, context = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "log", authority.client()
    first = authority.issue(certificate, key)
    files = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--ledger", str(tmp_path / "db"))
    with running(*GATEWAY, *files, log=log) as server, httpx.Client(base_url=server.url, verify=context) as client:
        assert server.url.startswith("https://127.0.0.1:")
        assert client.get("/v1/models").status_code == 200
        assert serial(server.url, context) == first
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health")
        second = authority.issue(certificate, key)
        assert serial(server.url, context) == second
        assert client.get("/v1/models").status_code == 200
        key.write_text("no key")
        assert [serial(server.url, context) for _ in range(2)] == [second] * 2
        assert "keeping the old one" in log.read_text()
        third = authority.issue(certificate, key)
        assert serial(server.url, context) == third
        assert log.read_text().count("keeping the old one") == 1, "a failure is logged once, not at every connection"


BEGUN = b"\x16\x03\x01\x02\x00\x01\x00\x01"  # of the client's first message


@pytest.mark.skipif(sys.platform == "win32", reason="no descriptors to run out of")
def test_more_handshakes_than_descriptors_stop_nobody(authority: Authority, tmp_path: Path) -> None:
    certificate, key, log = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "log"
    authority.issue(certificate, key)
    files = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--ledger", str(tmp_path / "db"))
    with running("-c", TINY_LIMIT, *GATEWAY[2:], *files, log=log) as server:
        address, idle = urlsplit(server.url), list[socket.socket]()
        try:
            for number in range(300):
                idle.append(socket.create_connection((address.hostname, address.port), timeout=20))
                idle[-1].sendall(BEGUN[: number % 3 * 4])
            for _ in range(3):
                assert httpx.get(f"{server.url}/v1/models", verify=authority.client(), timeout=20).status_code == 200
            exchanged(server.url, b"GET / HTTP/1.1\r\n\r\n")
            server.popen.terminate()
            assert server.popen.wait(60) == 0
        finally:
            for each in idle:
                each.close()
    assert log.read_text() == ""


async def scheme(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-scheme", scope["scheme"].encode())]})
    await send({"type": "http.response.body", "body": b"here"})


def test_a_handshake_counts_and_ends(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem")
    authority.issue(files.certificate, files.key)
    limits, heard = ConnectionLimits(2, 2), caplog.at_level(logging.WARNING)
    handshake = partial(tls.Handshake, tls.Certificate(files), limits)
    with heard, serving(scheme, protocol=handshake, loop="asyncio") as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        first, second = (socket.create_connection(address, timeout=20) for _ in range(2))
        wait_for(lambda: len(limits._addresses) == 2)
        answer = together(address, authority.client(), b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"x-scheme: https" in answer
        assert first.recv(1) == b"", "the longest idle connection is closed"
        second.sendall(BEGUN)
        monkeypatch.setattr(tls, "HANDSHAKE_S", 0.1)
        with socket.create_connection(address, timeout=20) as third:
            assert third.recv(1) == b"", "it took too long"
        first.close()
        second.close()
        wait_for(lambda: not limits._addresses)
    assert not caplog.records


def together(address: tuple[str, int], context: ssl.SSLContext, request: bytes) -> bytes:
    """The beginning of the answer to a request that is sent in one piece with the end of the handshake."""
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    wrapped = context.wrap_bio(received, sent, server_hostname="localhost")
    with socket.create_connection(address, timeout=20) as client:
        while True:
            try:
                wrapped.do_handshake()
                break
            except ssl.SSLWantReadError:
                client.sendall(sent.read())
                received.write(client.recv(65536))
        wrapped.write(request)
        client.sendall(sent.read())
        while True:
            try:
                return wrapped.read(65536)
            except ssl.SSLWantReadError:
                received.write(client.recv(65536))


def test_a_gateway_asks_nodes_by_tls(authority: Authority, tmp_path: Path) -> None:
    """A node's certificate is checked: one of an authority that nobody named keeps the node out."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    authority.issue(certificate, key)
    files = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--ledger", str(tmp_path / "db"))
    with (
        running(str(FAKE_NODE)) as node,
        running(*GATEWAY[:-3], "--node", node.url, "--no-auth", *files) as behind,
        running(*GATEWAY[:-3], "--node", behind.url, "--no-auth", "--ledger", str(tmp_path / "other")) as before,
    ):
        (shown,) = httpx.get(f"{before.url}/admin/nodes").json()["nodes"]
        assert shown["healthy"] is False
        assert "CERTIFICATE_VERIFY_FAILED" in shown["reason"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing", "Cannot read .*key.pem: No such file"),
        ("no certificate", "cert.pem holds no valid certificate: give --ssl-certfile a PEM file"),
        ("no key", "key.pem holds no valid private key: give --ssl-keyfile a PEM file"),
        ("mixed", "key.pem is not the key of .*cert.pem: give --ssl-keyfile the key of this certificate"),
        ("passphrase", "passphrase"),
    ],
)
def test_files_that_do_not_fit_are_refused(authority: Authority, tmp_path: Path, fault: str, words: str) -> None:
    files = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem")
    authority.issue(files.certificate, files.key, b"word" if fault == "passphrase" else None)
    if fault == "missing":
        files.key.unlink()
    elif fault == "no certificate":
        files.certificate.write_text("certificate")
    elif fault == "no key":
        files.key.write_text("")
    elif fault == "mixed":
        authority.issue(tmp_path / "other.pem", files.key)
    with pytest.raises(ConfigurationError, match=words):
        check_encrypted("127.0.0.1", files, insecure=False)


def test_only_loopback_is_served_in_the_clear(authority: Authority, tmp_path: Path) -> None:
    files = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem")
    authority.issue(files.certificate, files.key)
    for host in ("0.0.0.0", "::", "192.0.2.7", "box.lan"):
        check_encrypted(host, files, insecure=False)
        check_encrypted(host, None, insecure=True)
        with pytest.raises(ConfigurationError, match="--ssl-certfile and --ssl-keyfile"):
            check_encrypted(host, None, insecure=False)
    for host in ("127.0.0.1", "::1", "localhost"):
        check_encrypted(host, None, insecure=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["node", "--model", "pocket", "--host", "0.0.0.0"], "unencrypted"),
        (
            ["serve", "--local", "pocket", "--host", "0.0.0.0", "--client-api-key-env", "UPDRAFT_NODE_API_KEY"],
            "unencrypted",
        ),
        ([*GATEWAY[2:], "--ssl-certfile", "c.pem"], "go together"),
        ([*GATEWAY[2:], "--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem"], "c.pem"),
        (["node", "--model", "pocket", "--client-api-key-file", "missing"], "missing"),
        ([*GATEWAY[2:], "--api-key-file", os.devnull], "is empty"),
    ],
)
def test_a_server_that_would_not_be_safe_does_not_start(arguments: list[str], said: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(TYPING),
        "UPDRAFT_HOME": str(tmp_path),
        "UPDRAFT_NODE_API_KEY": "node-key",
    }
    command = [sys.executable, "-m", "updraft", *arguments, *([] if "--port" in arguments else ["--port", "0"])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_node_beyond_loopback_by_tls_and_a_key_of_a_file(authority: Authority, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="nodes need torch")
    certificate, key, secret = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "secret"
    authority.issue(certificate, key)
    secret.write_text("from-a-file\n")
    command = ("-m", "updraft", "node", "--model", "pocket", "--threads", "1", "--host", "0.0.0.0", "--port", "0")
    files = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--client-api-key-file", str(secret))
    with running(*command, *files) as node:
        url = node.url.replace("0.0.0.0", "127.0.0.1")
        with httpx.Client(base_url=url, verify=authority.client(), timeout=60) as client:
            assert client.get("/v1/models").status_code == 401
            assert client.get("/v1/models", headers={"authorization": "Bearer from-a-file"}).status_code == 200
