"""Models from a hub: what is downloaded, what resumes, what is kept where, and what is refused."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

huggingface_hub = pytest.importorskip("huggingface_hub")

from model_hub import COMMIT, Hub, running
from updraft.cloud_engine.models.loading import hub as loading
from updraft.cloud_engine.models.loading.hub import find_model, name_of
from updraft.model_files.download.web import RetryLimits
from updraft.protocol.errors import ConfigurationError, DiskSpaceError, ModelLoadError, ModelNotFoundError, UpdraftError

WEIGHTS = os.urandom(300_000)
REPO = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors": WEIGHTS,
    "consolidated.safetensors": WEIGHTS[::-1],
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, of the test's own, and no token."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(loading, "RetryLimits", lambda tries=5: RetryLimits(tries=min(tries, 3), backoff_s=0.01))
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running(Hub({"owner/model": dict(REPO), "owner/one": {"sub/file.gguf": WEIGHTS}})) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_repository_without_optional_files(hub: Hub) -> None:
    folder = find_model("owner/model")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert name_of(folder) == "owner/model"
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_the_cache_is_the_one_of_the_hubs_library(hub: Hub, cache: Path) -> None:
    """The node's downloads are found by others, and theirs are not fetched again."""
    folder = find_model("owner/model")
    model_folder = huggingface_hub.try_to_load_from_cache("owner/model", "model.safetensors", cache_dir=cache)
    assert Path(model_folder) == folder / "model.safetensors"
    (cached,) = huggingface_hub.scan_cache_dir(cache).repos
    assert (cached.repo_id, {revision.commit_hash for revision in cached.revisions}) == ("owner/model", {COMMIT})
    before = len(hub.bodies)
    assert find_model("owner/model") == folder
    assert len(hub.bodies) == before
    theirs = cache / "models--owner--one" / "blobs" / hashlib.sha256(WEIGHTS).hexdigest()
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(WEIGHTS)
    assert find_model("hf:owner/one/sub/file.gguf").read_bytes() == WEIGHTS
    assert len(hub.bodies) == before


def test_a_broken_download_resumes_and_a_second_use_needs_no_network(hub: Hub, monkeypatch) -> None:
    hub.cuts = 1
    path = find_model("hf:owner/one/sub/file.gguf")
    assert [received.start for received in hub.bodies] == [0, hub.cut_after]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert find_model("hf:owner/one/sub/file.gguf") == path
    assert path.read_bytes() == WEIGHTS


def test_a_download_that_ended_is_continued_by_the_next(hub: Hub) -> None:
    hub.cuts = 3
    with pytest.raises(ModelLoadError, match="cannot be downloaded"):
        find_model("hf:owner/one/sub/file.gguf")
    arrived = hub.bodies[-1].start + hub.cut_after
    assert find_model("hf:owner/one/sub/file.gguf").read_bytes() == WEIGHTS
    assert hub.bodies[-1].start == arrived


def test_a_damaged_download_is_refused_and_forgotten(hub: Hub, cache: Path) -> None:
    hub.corrupt = True
    with pytest.raises(ModelLoadError, match="SHA-256"):
        find_model("hf:owner/one/sub/file.gguf")
    assert not list(cache.rglob("*.gguf"))
    hub.corrupt = False
    assert find_model("hf:owner/one/sub/file.gguf").read_bytes() == WEIGHTS


def test_a_token_stays_with_the_hub(hub: Hub, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with running(Hub(files=hub.files), "127.0.0.2") as storage:
        hub.other = storage.url
        find_model("hf:owner/one/sub/file.gguf")
    assert hub.bodies[0].headers["authorization"] == "Bearer hf_secret"
    assert all("authorization" not in received.headers for received in storage.received)


def test_a_full_disk(hub: Hub, monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 0})())
    with pytest.raises(DiskSpaceError):
        find_model("hf:owner/one/sub/file.gguf")


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("owner/absent", ModelNotFoundError, "no repository owner/absent"),
        ("hf:owner/absent/file.gguf", ModelNotFoundError, "no repository owner/absent"),
        ("hf:owner/model/absent.gguf", ModelLoadError, "owner/model contains neither the requested file"),
        ("owner/one", ModelLoadError, "nor a safetensors model"),
    ],
)
def test_files_missing_on_the_hub(hub: Hub, name: str, error: type[UpdraftError], reason: str) -> None:
    with pytest.raises(error, match=reason):
        find_model(name)


def test_without_a_network(cache: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelLoadError, match=r"cannot be downloaded(?s:.*)HF_ENDPOINT"):
        find_model("owner/model")


def test_no_file_lies_outside_its_repository(hub: Hub, cache: Path, monkeypatch) -> None:
    with pytest.raises(ConfigurationError, match="form"):
        find_model("hf:owner/repo/../../file.gguf")
    monkeypatch.setattr("model_hub.COMMIT", "../../..")
    with pytest.raises(ModelLoadError, match="invalid revision"):
        find_model("owner/model")
    assert not list(cache.rglob("*.json"))


def test_paths_need_no_hub(tmp_path: Path) -> None:
    assert find_model(str(tmp_path)) == tmp_path
    assert name_of(tmp_path) == tmp_path.name
    for name in ("nowhere", "a/b/c", "../x/y", "", "hf:owner/repo/file.bin"):
        with pytest.raises(ModelLoadError, match=r"does not exist|not found"):
            find_model(name)
