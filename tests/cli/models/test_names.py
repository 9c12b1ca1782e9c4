"""Names of local models on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from model_hub import Hub, running, tiny_gguf
from updraft.cli.models.names import resolve
from updraft.local_engine.store.library import Library
from updraft.protocol.errors import InvalidRequestError, ModelLoadError, OfflineError


def test_words_and_files(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert resolve("pocket") == "pocket"
    assert resolve("none") == "none"
    assert resolve(str(file)) == str(file)


@pytest.mark.parametrize("name", ["hf:", "hf:owner", "hf:../../etc/passwd.gguf.txt"])
def test_a_malformed_hub_name(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"hf:owner/repo:file\.gguf"):
        resolve(name)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("UPDRAFT_OFFLINE", "HF_HUB_OFFLINE", "UPDRAFT_MODELS", "UPDRAFT_CONFIG", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    files = {"m-Q8_0.gguf": tiny_gguf(), "m-Q4_0.gguf": tiny_gguf(seed=1)}
    with running(Hub({"owner/repo": files})) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_a_hubs_model_is_pulled_once(hub: Hub, monkeypatch, capsys) -> None:
    """And then found without the hub, by every name it has there."""
    path = resolve("hf:owner/repo:Q8_0")
    assert Path(path) == Library().path("m-Q8_0")
    assert Path(path).read_bytes() == tiny_gguf()
    printed = capsys.readouterr().err
    assert all(word in printed for word in ("apache-2.0", "0.2 MB", "sha256", "free"))
    monkeypatch.setenv("UPDRAFT_OFFLINE", "1")
    requests = len(hub.received)
    for name in ("hf:owner/repo:Q8_0", "hf:owner/repo/m-Q8_0.gguf", "hf:owner/repo:m-Q8_0.gguf", "hf:owner/repo"):
        assert resolve(name) == path
    with pytest.raises(OfflineError):
        resolve("hf:owner/repo:Q4_0")
    assert len(hub.received) == requests


def test_no_network(updraft) -> None:
    for name in ("UPDRAFT_OFFLINE", "HF_HUB_OFFLINE"):
        done = updraft("ask", "hi", "--local", "hf:owner/repo/file.gguf", env={name: "1", "HF_HOME": "/nonexistent"})
        assert done.returncode == 1
        assert "the network is forbidden by UPDRAFT_OFFLINE, HF_HUB_OFFLINE" in done.stderr


def test_tune_asks_nobody_offline(updraft) -> None:
    done = updraft("tune", "hf:owner/repo:Q8_0", env={"UPDRAFT_OFFLINE": "1"})
    assert (done.returncode, "the network is forbidden" in done.stderr) == (1, True)


def test_a_missing_file() -> None:
    with pytest.raises(ModelLoadError, match="no local model"):
        resolve("nowhere.gguf")
