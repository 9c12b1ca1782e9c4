"""Names of local models on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from updraft.cli.models import resolve
from updraft.protocol.errors import ConfigurationError, ModelLoadError


def test_words_and_files(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert resolve("pocket") == "pocket"
    assert resolve("none") == "none"
    assert resolve(str(file)) == str(file)


@pytest.mark.parametrize("name", ["hf:", "hf:owner/repo", "hf:owner/repo/file.bin", "hf:../../etc/passwd.gguf.txt"])
def test_a_malformed_hub_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"hf:owner/repo/file\.gguf"):
        resolve(name)


def test_no_network(updraft) -> None:
    """A hub that does not answer is a clear error; in a process, since the hub reads its settings once."""
    done = updraft(
        "ask", "hi", "--local", "hf:owner/repo/file.gguf", env={"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"}
    )
    assert done.returncode == 1
    assert "cannot be downloaded" in done.stderr
    assert "HF_ENDPOINT" in done.stderr


def test_an_endpoint_that_refuses(updraft, tmp_path: Path) -> None:
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = updraft("ask", "hi", "--local", "hf:owner/repo/file.gguf", env=env)
    assert done.returncode == 1
    assert "cannot be downloaded" in done.stderr


def test_a_missing_file() -> None:
    with pytest.raises(ModelLoadError, match="no local model"):
        resolve("nowhere.gguf")
