"""The folder of models: one writer at a time, no half models, and what happens when the disk or the person stops it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
from model_hub import Hub, tiny_gguf
from updraft.local_engine.store.find import find, is_offline
from updraft.local_engine.store.library import Library, model_path
from updraft.local_engine.store.pull import pull
from updraft.model_files.download.partial_file import PartialFile, ResumeRecord
from updraft.model_files.download.progress import ProgressReport
from updraft.model_files.download.web import RetryLimits
from updraft.protocol.errors import (
    ConfigurationError,
    DiskSpaceError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
    OfflineError,
    OverloadedError,
)

ROOT = Path(__file__).resolve().parents[3]
MODEL = tiny_gguf()
ADDRESS = "/files/tiny.gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.gguf"
    path.write_bytes(MODEL)
    return path


def test_a_file_is_copied_in(file: Path, library: Library) -> None:
    manifest = pull(library, find(str(file)))
    file.unlink()
    assert library.path("mine").read_bytes() == MODEL
    assert (manifest.licence, manifest.source) == ("mit", str(file))
    assert [(entry.name, entry.state, entry.size) for entry in library.entries()] == [("mine", "ready", len(MODEL))]


def test_a_file_that_is_no_model(file: Path) -> None:
    file.write_bytes(MODEL[:1000])
    with pytest.raises(ModelLoadError, match="truncated"):
        find(str(file))


def test_a_name_that_is_taken(file: Path, library: Library, tmp_path: Path) -> None:
    pull(library, find(str(file)))
    other = tmp_path / "elsewhere" / "mine.gguf"
    other.parent.mkdir()
    other.write_bytes(tiny_gguf(seed=1))
    with pytest.raises(InvalidRequestError, match="--name"):
        pull(library, find(str(other)))
    pull(library, find(str(other), name="other"))
    assert [entry.name for entry in library.entries()] == ["mine", "other"]


def test_remove(file: Path, library: Library) -> None:
    pull(library, find(str(file)))
    assert library.remove("mine") > len(MODEL)
    assert library.entries() == []
    with pytest.raises(ModelNotFoundError, match="holds no model at all"):
        library.remove("mine")


def test_verify_finds_a_single_bit(file: Path, library: Library) -> None:
    pull(library, find(str(file)))
    assert library.verify("mine", ProgressReport()) == "ready"
    data = bytearray(MODEL)
    data[100_000] ^= 1
    library.path("mine").write_bytes(data)
    assert library.verify("mine", ProgressReport()) == "damaged"
    library.path("mine").write_bytes(MODEL[:-1])
    assert pull(library, find(str(file))).size == len(MODEL)
    assert library.verify("mine", ProgressReport()) == "ready"
    library.path("mine").unlink()
    assert library.verify("mine", ProgressReport()) == "missing"
    assert [entry.state for entry in library.entries()] == ["missing"]
    with pytest.raises(ModelNotFoundError):
        library.verify("other", ProgressReport())


@pytest.mark.parametrize("manifest", ["", "{", "[]", '{"name": 1}'])
def test_a_broken_manifest_stops_nothing_else(file: Path, library: Library, manifest: str) -> None:
    pull(library, find(str(file)))
    pull(library, find(str(file), name="whole"))
    (library.folder / "mine.json").write_text(manifest)
    assert [(entry.name, entry.state) for entry in library.entries()] == [("mine", "damaged"), ("whole", "ready")]
    assert library.find("mine") is None
    assert library.verify("mine", ProgressReport()) == "damaged"
    pull(library, find(str(file)))
    assert library.verify("mine", ProgressReport()) == "ready"


def test_foreign_files_are_not_models(file: Path, library: Library) -> None:
    pull(library, find(str(file)))
    for name in ("._mine.gguf", "my other model.gguf", "pocket.gguf", ".DS_Store.json"):
        (library.folder / name).write_bytes(b"x")
    assert [(entry.name, entry.state) for entry in library.entries()] == [("mine", "ready")]


@pytest.mark.parametrize("step", range(3))
def test_a_kill_while_a_model_is_replaced(file: Path, library: Library, monkeypatch, step: int) -> None:
    """After each of the steps: what is called ready is what its manifest says, and the next pull repairs."""
    pull(library, find(str(file)))
    newer = bytearray(MODEL)
    newer[-1] ^= 1
    file.write_bytes(newer)
    done, (replace, unlink) = [], (Path.replace, Path.unlink)

    def counted(real, path: Path, *arguments, **options):
        if path.name in ("mine.json", "mine.part", "mine.manifest"):
            if len(done) == step:
                raise KeyboardInterrupt
            done.append(path.name)
        return real(path, *arguments, **options)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "replace", lambda path, target: counted(replace, path, target))
        patched.setattr(Path, "unlink", lambda path, missing_ok=False: counted(unlink, path, missing_ok=missing_ok))
        pull(library, find(str(file)))
    for entry in library.entries():
        assert entry.state != "ready" or library.verify("mine", ProgressReport()) == "ready"
    pull(library, find(str(file)))
    assert library.path("mine").read_bytes() == newer
    assert library.verify("mine", ProgressReport()) == "ready"


def test_a_model_by_name_or_path(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    pull(library, find(str(file)))
    assert model_path("mine") == library.path("mine")
    assert model_path(str(file)) == file
    assert model_path("../mine") == Path("../mine")
    assert model_path("absent.gguf") == Path("absent.gguf")
    assert model_path("absent") == library.path("absent"), "a name without a model is no path"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").touch()
    assert model_path("mine") == library.path("mine")
    assert model_path("./mine") == Path("mine")
    monkeypatch.setenv("UPDRAFT_MODELS", str(tmp_path / "elsewhere"))
    assert Library().folder == tmp_path / "elsewhere"


def test_the_router_takes_the_name(file: Path) -> None:
    from updraft.router.config import RouterConfig
    from updraft.router.factory import model_file

    pull(Library(), find(str(file)))
    assert model_file(RouterConfig(local="mine")) == Library().path("mine")


class TestOffline:
    @pytest.mark.parametrize("variable", ["UPDRAFT_OFFLINE", "HF_HUB_OFFLINE"])
    @pytest.mark.parametrize("what", ["hf:owner/repo", "https://example.org/x.gguf"])
    def test_offline_error_names_the_variable(self, variable: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(variable, "1")
        with pytest.raises(OfflineError, match=variable):
            find(what)

    def test_a_file_needs_no_network(self, file: Path, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UPDRAFT_OFFLINE", "true")
        assert pull(library, find(str(file))).name == "mine"

    def test_the_settings_file(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert not is_offline()
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "config.toml").write_text("offline = true")
        assert is_offline()
        monkeypatch.setenv("UPDRAFT_OFFLINE", "0")
        assert not is_offline()
        (tmp_path / "home" / "config.toml").write_text('offline = "true"')
        monkeypatch.delenv("UPDRAFT_OFFLINE")
        assert is_offline()

    @pytest.mark.parametrize(
        ("variable", "value"), [("UPDRAFT_OFFLINE", "y"), ("UPDRAFT_OFFLINE", "enabled"), ("HF_HUB_OFFLINE", "2")]
    )
    def test_a_switch_that_cannot_be_read_is_not_off(self, variable, value, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(variable, value)
        with pytest.raises(ConfigurationError, match=value):
            find("hf:owner/repo")


class TestSpace:
    def test_too_little_is_said_before_the_download(
        self, hub: Hub, library: Library, retries: RetryLimits, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr("shutil.disk_usage", lambda _: usage(0, 0, 1_000_000))
        spec = find("hf:owner/repo", retries=retries)
        with pytest.raises(DiskSpaceError, match=f"needs {len(MODEL):,} more bytes.*1,000,000 free") as caught:
            pull(library, spec, retries=retries)
        assert (caught.value.needed, caught.value.free) == (len(MODEL), 1_000_000)
        assert hub.bodies == []

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
    def test_a_full_disk_in_the_middle(self, tmp_path: Path) -> None:
        """A device that is always full: the write fails as on a disk."""
        part = PartialFile(tmp_path, "x", ResumeRecord("same", "there", 10_000_000))
        part.append(b"x" * 1000)
        part._file.close()
        part._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - the part closes it
        with pytest.raises(DiskSpaceError, match="pull again") as caught, part:
            part.append(b"x" * 1000)
        assert caught.value.needed == 10_000_000 - 1000
        assert part.size == 1000

    @pytest.mark.parametrize("identity", ["same", None])
    def test_the_last_bytes_stay_free(self, tmp_path: Path, monkeypatch, identity: str | None) -> None:
        """Of whatever size the file turns out to be; what cannot be continued does not stay."""
        usage, block = namedtuple("usage", "total used free"), b"x" * 2**20
        start = 80 * 2**20
        with PartialFile(tmp_path, "x", ResumeRecord(identity, "there", None)) as part:
            monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, start - part.path.stat().st_size))
            with pytest.raises(DiskSpaceError) as caught:
                for _ in range(80):
                    part.append(block)
            assert ("to resume" in caught.value.message) == (identity is not None)
            assert ("was deleted" in caught.value.message) == (identity is None)
            kept = part.path.stat().st_size
        assert 16 * 2**20 <= kept <= 24 * 2**20 if identity else kept == 0

    def test_partial_file_on_a_full_disk_is_resumed(
        self, hub: Hub, library: Library, retries: RetryLimits, tmp_path: Path
    ) -> None:
        """A limit of the system on the size of files, lifted afterwards."""
        program = (
            "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n" + PULL
        )
        done = run(program, hub, library)
        assert done.returncode == 3, done.stderr
        assert "is full: 100,000 bytes are kept" in done.stdout
        manifest = pull(library, find(hub.url + ADDRESS, retries=retries), retries=retries)
        assert hub.bodies[-1].start == 100_000
        assert library.verify(manifest.name, ProgressReport()) == "ready"


PULL = """
import sys
from pathlib import Path
from updraft.local_engine.store.find import find
from updraft.local_engine.store.library import Library
from updraft.local_engine.store.pull import pull
from updraft.model_files.download.progress import ProgressReport
from updraft.protocol.errors import DiskSpaceError
try:
    pull(Library(Path(sys.argv[1])), find(sys.argv[2]), report=ProgressReport(say=lambda line: print(line, flush=True)))
except DiskSpaceError as error:
    print(error)
    sys.exit(3)
"""


def start(program: str, hub: Hub, library: Library) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".typing")}
    command = [sys.executable, "-c", program, str(library.folder), hub.url + ADDRESS]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT / "docs"
    )


def run(program: str, hub: Hub, library: Library) -> subprocess.CompletedProcess[str]:
    process = start(program, hub, library)
    out, error = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def part_size(library: Library) -> int:
    return sum(path.stat().st_size for path in library.partial.glob("*.part"))


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_pull_resumes(stop: signal.Signals, hub: Hub, library: Library, retries: RetryLimits) -> None:
    hub.pause_s = 0.1
    process = start(PULL, hub, library)
    while part_size(library) < 40_000:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(stop)
    process.communicate(timeout=60)
    assert process.returncode != 0
    kept, hub.pause_s = part_size(library), 0.0
    assert library.find("tiny") is None
    lines: list[str] = []
    report = ProgressReport(say=lines.append)
    manifest = pull(library, find(hub.url + ADDRESS, retries=retries), retries=retries, report=report)
    assert hub.bodies[-1].start == kept >= 40_000
    assert lines == [f"Resuming after {kept:,} bytes."]
    assert library.verify(manifest.name, ProgressReport()) == "ready"


def test_two_pulls_at_once_are_one_download(hub: Hub, library: Library) -> None:
    hub.pause_s = 0.05
    both = [start(PULL, hub, library) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert [received.start for received in hub.bodies] == [0]
    assert sum("waiting for it" in out for out, _ in outputs) == 1
    assert library.verify("tiny", ProgressReport()) == "ready"


def test_model_in_download_cannot_be_removed(hub: Hub, library: Library, retries: RetryLimits) -> None:
    hub.pause_s = 0.05
    spec = find(hub.url + ADDRESS, retries=retries)
    thread = threading.Thread(target=pull, args=(library, spec), kwargs={"retries": retries})
    thread.start()
    try:
        while not part_size(library):
            time.sleep(0.005)
        with pytest.raises(OverloadedError, match="another process"):
            library.remove("tiny")
    finally:
        thread.join()
    library.remove("tiny")


def test_a_crash_between_the_last_two_steps(hub: Hub, library: Library, retries: RetryLimits) -> None:
    """The manifest is there, the model still has its working name: no model, and the next pull finishes it."""
    spec = find(hub.url + ADDRESS, retries=retries)
    pull(library, spec, retries=retries)
    library.path("tiny").rename(library.partial / "tiny.part")
    record = {"identity": spec.identity, "source": spec.source, "size": spec.size}
    (library.partial / "tiny.json").write_text(json.dumps(record))
    assert library.find("tiny") is None
    pull(library, spec, retries=retries)
    assert len(hub.bodies) == 1
    assert library.verify("tiny", ProgressReport()) == "ready"


@pytest.mark.skipif(shutil.which("true") is None, reason="POSIX only")
def test_a_folder_that_cannot_be_made(file: Path, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file is in the way")
    with pytest.raises(ConfigurationError, match="UPDRAFT_MODELS"):
        pull(Library(tmp_path / "models"), find(str(file)))
