"""State is for the user alone, whatever the umask, and also where it was found open."""

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryFile

import msgspec
import pytest
from updraft.classifier.online.experience import ExperienceStore
from updraft.classifier.policy.files import put_policy
from updraft.cli.calibrate.saved_answers import SavedAnswers
from updraft.cloud_engine.gateway.access.database import KeyDatabase
from updraft.cloud_engine.gateway.ledger.opening import open_store
from updraft.local_engine.machine.json_store import JsonStore
from updraft.local_engine.store.library import Library
from updraft.model_files.download import partial_file
from updraft.protocol.errors import ConfigurationError, DiskSpaceError
from updraft.protocol.safety.private_files import private_file, write_private
from updraft.protocol.safety.system import reserve_blocks
from updraft.router.accounting.ledger import Ledger
from updraft.router.settings_sources import load_config
from updraft.router.storage.answer_store import AnswerStore

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")


class ResumeRecord(msgspec.Struct):
    text: str


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def keep_everything(home: Path) -> None:
    (home / "config.toml").parent.mkdir(exist_ok=True)
    (home / "config.toml").write_text('cloud_api_key = "secret"\n')
    config = load_config()
    assert config.ledger is not None
    with closing(Ledger(config.ledger)) as ledger, closing(ExperienceStore(home / "experience.sqlite3")):
        assert ledger.rows() == []
        assert (home / "ledger.sqlite3-shm").exists()
        meter = open_store(home / "gateway.sqlite3")
        JsonStore("tried-models").write("key", ResumeRecord("well"))
        put_policy(home / "policies" / "a--b", {"gate1-0123456789abcdef.onnx": b"graph"}, b"{}")
        with Library().lock("a"):
            assert open_paths(home) == []
        meter.close()


def open_paths(folder: Path) -> list[str]:
    return [str(path) for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077]


def test_created_files_are_private(home: Path) -> None:
    keep_everything(home)
    assert (home / "ledger.sqlite3").stat().st_mode & 0o777 == 0o600
    assert home.stat().st_mode & 0o777 == 0o700


def test_open_files_are_made_private(home: Path) -> None:
    keep_everything(home)
    for path in (home, *home.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    keep_everything(home)


def test_the_files_of_a_database_that_is_in_use_are_closed_too(home: Path) -> None:
    path = home / "ledger.sqlite3"
    home.mkdir()
    with closing(sqlite3.connect(path)) as older:
        older.execute("PRAGMA journal_mode=WAL")
        older.execute("CREATE TABLE t (a)")
        assert {"ledger.sqlite3", "ledger.sqlite3-wal", "ledger.sqlite3-shm"} == {f.name for f in home.iterdir()}
        assert open_paths(home)
        private_file(path)
        assert open_paths(home) == []


def test_foreign_folder_keeps_its_permissions(home: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    with closing(Ledger(shared / "ledger.sqlite3")):
        assert shared.stat().st_mode & 0o777 == 0o755
        assert [path.stat().st_mode & 0o777 for path in shared.iterdir()] == [0o600] * len(list(shared.iterdir()))


def test_downloaded_files_are_private(home: Path) -> None:
    library = Library()
    with library.lock("a"):
        part = partial_file.PartialFile(library.partial, "a", partial_file.ResumeRecord(None, "https://host/a", 3))
        assert open_paths(home) == []
        part.discard()


def test_a_link_where_a_file_is_to_be_written_is_not_followed(tmp_path: Path) -> None:
    precious, path = tmp_path / "precious", tmp_path / "node.url"
    precious.write_text("mine")
    path.with_name(f".{path.name}.{os.getpid()}").symlink_to(precious)
    path.symlink_to(precious)
    write_private(path, "http://127.0.0.1:1\n")
    assert precious.read_text() == "mine"
    assert path.read_text() == "http://127.0.0.1:1\n"
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of file sizes")
def test_a_failed_write_leaves_no_file_and_names_its_cause(tmp_path: Path) -> None:
    import resource

    path, (usual, hard) = tmp_path / "config.toml", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # as a disk that is full
    try:
        with pytest.raises(ConfigurationError, match="cannot be written"):
            write_private(path, "x" * 200)
        with TemporaryFile() as file, pytest.raises(DiskSpaceError, match=r"ulimit -f"):
            reserve_blocks(file.fileno(), path, 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (usual, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_all_users_is_left_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o1777)
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path))
    private_file(tmp_path / "a")
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777


@pytest.mark.parametrize("content", [b"plain text\n", None])
def test_a_file_that_is_refused_keeps_its_rights(home: Path, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "theirs"
    if content is None:
        with closing(sqlite3.connect(path)) as theirs:
            theirs.execute("PRAGMA journal_mode=WAL")
            theirs.execute("CREATE TABLE usage (a)")
            theirs.execute("CREATE TABLE others (a)")
    else:
        path.write_bytes(content)
    path.chmod(0o664)
    stores: list[Callable[[], object]] = [
        lambda: open_store(path),
        lambda: AnswerStore(path, days=1, most=1),
        lambda: Ledger(path),
    ]
    refused = [*stores, lambda: SavedAnswers(path), lambda: KeyDatabase(path)] if content is not None else stores
    for use in refused:
        with pytest.raises(ConfigurationError):
            use()
        assert path.stat().st_mode & 0o777 == 0o664


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may change others' files")
def test_a_file_of_another_user_keeps_its_rights(home: Path, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", home / "ours"
    home.mkdir()
    for path in (theirs, ours):
        path.touch()
        os.chown(path, 65534, 65534)
        path.chmod(0o664)
        private_file(path)
    assert theirs.stat().st_mode & 0o777 == 0o664
    assert ours.stat().st_mode & 0o777 == 0o600, "in a folder of Updraft"


def test_devices_keep_their_permissions(tmp_path: Path) -> None:
    """A ledger or log file may be named /dev/null, which all users of the machine need."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    pipe.chmod(0o666)
    private_file(pipe)
    assert pipe.stat().st_mode & 0o777 == 0o666
