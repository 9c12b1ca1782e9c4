"""A hub that lies makes no file outside the models' folder, and a server that it redirects to gets no token."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

from model_hub import Hub, running, tiny_gguf
from updraft.cloud_engine.models.loading.hub import find_model
from updraft.local_engine.store.find import find
from updraft.local_engine.store.library import Library
from updraft.local_engine.store.pull import pull
from updraft.model_files.download.web import RetryLimits
from updraft.protocol.errors import UpdraftError

HURRY = RetryLimits(connect_s=2, read_s=2, tries=2, backoff_s=0.01, window_s=10, worthwhile=10_000)
MODEL = tiny_gguf()
NAMES = ("../evil.gguf", "../../evil.gguf", "/tmp/evil.gguf", "a/../../evil.gguf", "..\\evil.gguf", "%2e%2e/evil.gguf")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path / "deep" / "er" / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "deep" / "er" / "hf"))
    monkeypatch.setenv("HF_TOKEN", "hf_canary")


@pytest.mark.parametrize("name", NAMES)
def test_no_file_leaves_its_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(tmp_path / "deep" / "er" / "models")
    with running(Hub({"owner/repo": {name: MODEL, "config.json": b"{}", "tokenizer.json": b"{}"}})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for get in (
            lambda: pull(library, find("hf:owner/repo", retries=HURRY), retries=HURRY),
            lambda: find_model("owner/repo"),
            lambda: find_model(f"hf:owner/repo/{name}"),
        ):
            try:
                get()
            except UpdraftError:
                continue
    own = tmp_path / "deep" / "er"
    files = [path for path in tmp_path.rglob("*") if path.is_file() or path.is_symlink()]
    assert not [path for path in files if not path.resolve().is_relative_to(own)]
    assert not [path for path in library.folder.rglob("*") if not path.resolve().is_relative_to(library.folder)]
    assert not Path("/tmp/evil.gguf").exists()


def test_a_redirect_takes_no_token_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Hub({"owner/repo": {"m.gguf": MODEL}})) as hub, running(Hub(files=hub.files), "127.0.0.2") as other:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.other = other.url
        pull(Library(tmp_path / "models"), find("hf:owner/repo", retries=HURRY), retries=HURRY)
        find_model("hf:owner/repo/m.gguf")
    assert {received.headers["authorization"] for received in hub.received} == {"Bearer hf_canary"}
    assert other.received
    assert not [each for each in other.received if "hf_canary" in str(each.headers)]
