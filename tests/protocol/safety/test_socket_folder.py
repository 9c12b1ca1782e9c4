"""Unix sockets are bound although TMPDIR has a long path, and what to do is said where no folder is short enough."""

from __future__ import annotations

import socket
import stat
import tempfile
from pathlib import Path

import pytest
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.safety import system
from updraft.protocol.safety.system import socket_folder


@pytest.fixture
def long_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_socket_binds_in_a_private_folder_only(long_folder: Path) -> None:
    folder = socket_folder("updraft-test-", "commands")
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(folder / "commands"))
        (folder / "commands").unlink()
    finally:
        folder.rmdir()
    assert not list(long_folder.iterdir())


def test_without_a_short_folder_it_is_said_what_to_set(long_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_SHORT_FOLDER", str(long_folder))
    with pytest.raises(ConfigurationError, match="set TMPDIR"):
        socket_folder("updraft-test-", "commands")
    assert not list(long_folder.iterdir())
