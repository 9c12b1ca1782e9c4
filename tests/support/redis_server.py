"""A real Redis or Valkey server for tests."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from ports import free_port
from updraft.cloud_engine.gateway.limits import redis_store
from waiting import wait_for


@contextmanager
def running_redis(folder: Path) -> Iterator[str]:
    """Run Redis or Valkey, and yield its URL. Skips the test without such a server or without the Python client."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None or importlib.util.find_spec("redis") is None:
        pytest.skip("needs redis-server or valkey-server, and the package redis")
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_for(lambda: _listens(port))
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()


def _listens(port: int) -> bool:
    with suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


def expire_leases(url: str) -> None:
    """Delete the leases of all workers, as if they had expired."""
    import redis

    with redis.Redis.from_url(url) as client:
        for key in client.keys("{updraft}:worker:*"):
            assert 0 < client.pttl(key) <= redis_store.LEASE_S * 1000
            client.delete(key)
