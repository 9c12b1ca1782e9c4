"""Databases, with what SQLite keeps beside them, can be read by their user alone, whatever the umask."""

from __future__ import annotations

from typing import Any


def test_databases_are_closed_to_others(gateway: Any) -> None:
    assert gateway.chat() == 200
    gateway.rows()
    databases = list(gateway.keys_file.parent.glob("*.sqlite*"))
    modes = {path.name: (path.is_dir(), oct(path.stat().st_mode & 0o777)) for path in databases}
    assert {"keys.sqlite3", "usage.sqlite3", "usage.sqlite3-wal", "usage.sqlite3-shm"} <= set(modes)
    assert set(modes.values()) <= {(False, "0o600"), (True, "0o700")}, modes
    assert gateway.log_file.exists()
