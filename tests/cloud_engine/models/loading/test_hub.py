"""Models from a hub: what is downloaded, what resumes, and what is refused."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

huggingface_hub = pytest.importorskip("huggingface_hub")

from fake_hub import Hub, running
from updraft.cloud_engine.models.loading.hub import find_model, name_of
from updraft.protocol.errors import ConfigurationError, ModelLoadError

ROOT = Path(__file__).resolve().parents[4]
WEIGHTS = os.urandom(24_000_000)
REPO = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "consolidated.safetensors": WEIGHTS,
}
FIND = """
import sys
from updraft.cloud_engine.models.loading.hub import find_model
from updraft.protocol.errors import UpdraftError
try:
    print(find_model(sys.argv[1]))
except UpdraftError as error:
    sys.exit(str(error))
"""


def find(name: str, hub: Hub, home: Path) -> subprocess.CompletedProcess[str]:
    """In a process, since the hub's library reads its settings once."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".typing"), "HF_ENDPOINT": hub.url, "HF_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-c", FIND, name], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_repository_without_what_is_not_needed(tmp_path: Path) -> None:
    with running(Hub({"owner/model": REPO})) as hub:
        found = find("owner/model", hub, tmp_path)
    assert found.returncode == 0, found.stderr
    folder = Path(found.stdout.strip())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert name_of(folder) == "owner/model"
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_broken_download_resumes_and_a_second_use_needs_no_network(tmp_path: Path) -> None:
    with running(Hub({"owner/model": {"file.gguf": WEIGHTS}}, breaks=1)) as hub:
        found = find("hf:owner/model/file.gguf", hub, tmp_path)
    assert found.returncode == 0, found.stderr
    assert len(hub.ranges) == 1
    assert 0 < int(hub.ranges[0].removeprefix("bytes=").removesuffix("-")) <= len(WEIGHTS) // 2
    again = find("hf:owner/model/file.gguf", hub, tmp_path)  # nobody listens any more
    assert again.stdout == found.stdout
    assert Path(again.stdout.strip()).read_bytes() == WEIGHTS


def test_a_damaged_download_is_refused_and_forgotten(tmp_path: Path) -> None:
    with running(Hub({"owner/model": {"file.gguf": WEIGHTS}}, corrupt={"file.gguf"})) as hub:
        found = find("hf:owner/model/file.gguf", hub, tmp_path)
        assert found.returncode == 1
        assert "SHA-256" in found.stderr
        hub.corrupt.clear()
        found = find("hf:owner/model/file.gguf", hub, tmp_path)
    assert Path(found.stdout.strip()).read_bytes() == WEIGHTS


def test_a_damaged_shard_is_found_though_the_download_broke_off_behind_it(tmp_path: Path) -> None:
    shards = {"model-00001-of-00002.safetensors": WEIGHTS, "model-00002-of-00002.safetensors": WEIGHTS[::-1]}
    hub = Hub({"owner/model": {"config.json": b"{}", **shards}}, corrupt={min(shards)}, lost={max(shards)})
    with running(hub):
        found = find("owner/model", hub, tmp_path)
        assert "cannot be downloaded" in found.stderr
        assert [blob.stat().st_size for blob in tmp_path.glob("hub/*/blobs/*")].count(len(WEIGHTS)) == 1
        hub.lost.clear()
        found = find("owner/model", hub, tmp_path)
        assert found.returncode == 1
        assert "SHA-256" in found.stderr
        hub.corrupt.clear()
        found = find("owner/model", hub, tmp_path)
    assert {name: (Path(found.stdout.strip()) / name).read_bytes() for name in shards} == shards


def test_a_file_is_compared_once_and_again_when_it_was_written_again(tmp_path: Path) -> None:
    with running(Hub({"owner/model": {"file.gguf": WEIGHTS}})) as hub:
        path = Path(find("hf:owner/model/file.gguf", hub, tmp_path).stdout.strip())
        before = path.stat()
        path.write_bytes(WEIGHTS[::-1])
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # so that only reading it could tell
        assert find("hf:owner/model/file.gguf", hub, tmp_path).returncode == 0
        os.utime(path)
        assert "SHA-256" in find("hf:owner/model/file.gguf", hub, tmp_path).stderr


def test_a_cache_that_takes_no_notes_serves_all_the_same(tmp_path: Path) -> None:
    with running(Hub({"owner/model": {"file.gguf": WEIGHTS}})) as hub:
        path = Path(find("hf:owner/model/file.gguf", hub, tmp_path).stdout.strip())
        (notes,) = tmp_path.glob("hub/*/updraft-verified")
        shutil.rmtree(notes)
        notes.touch()  # in the way, as root may write anywhere
        found = find("hf:owner/model/file.gguf", hub, tmp_path)
    assert found.stdout.strip() == str(path)
    assert "no note of it can be kept" in found.stderr


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("owner/absent", "no repository owner/absent"),
        ("hf:owner/absent/file.gguf", "no repository owner/absent"),
        ("hf:owner/model/absent.gguf", r"owner/model holds no absent.gguf"),
    ],
)
def test_what_the_hub_does_not_have(tmp_path: Path, name: str, reason: str) -> None:
    with running(Hub({"owner/model": REPO})) as hub:
        found = find(name, hub, tmp_path)
    assert found.returncode == 1
    assert reason in found.stderr


def test_without_a_network(tmp_path: Path) -> None:
    found = find("owner/model", Hub({}, url="http://127.0.0.1:9"), tmp_path)
    assert found.returncode == 1
    assert "cannot be downloaded" in found.stderr
    assert "HF_ENDPOINT" in found.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_what_the_disk_says(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fails(*_: str) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    with pytest.raises(ModelLoadError, match=r"(no space left|Permission denied)\. HF_HOME"):
        find_model("hf:owner/repo/file.gguf")


def test_no_file_lies_outside_its_repository() -> None:
    with pytest.raises(ConfigurationError, match="form"):
        find_model("hf:owner/repo/../../file.gguf")


def test_paths_need_no_hub(tmp_path: Path) -> None:
    assert find_model(str(tmp_path)) == tmp_path
    assert name_of(tmp_path) == tmp_path.name
    for name in ("nowhere", "a/b/c", "../x/y", "", "hf:owner/repo/file.bin"):
        with pytest.raises(ModelLoadError, match="There is no model"):
            find_model(name)
