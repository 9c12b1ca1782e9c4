"""Uploaded files through the real openai client on a real socket: pages, content, owners, limits, bad forms."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import updraft
from router_fakes import ScriptedLocal, tiers
from serving import serving
from updraft.protocol.errors import DiskSpaceError, NotFoundError
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app
from updraft.router.storage.answer_store import Page
from updraft.router.storage.file_store import FileMetadata, FilesDatabase, FileStore
from waiting import wait_for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state") / "files"


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    config = RouterConfig(local="pocket", files=folder, files_mb=3)
    with serving(daemon_app(Router(config, tiers(ScriptedLocal(), config))), lifespan=True) as address:
        yield address


def client(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def test_upload_list_retrieve_content_delete(url: str, folder: Path) -> None:
    content = bytes(range(256)) * 3000 + b"\r\n--almost a boundary\r\n"
    with client(url, "ann") as ann, client(url, "bob") as bob:
        made = [ann.files.create(file=("../../a name.bin", content[each:]), purpose="user_data") for each in range(3)]
        batch = ann.files.create(file=("b.jsonl", b"{}"), purpose="batch")
        assert (made[0].filename, made[0].bytes, made[0].expires_at) == ("a name.bin", len(content), None)
        assert batch.expires_at == batch.created_at + 30 * 86400
        ids = [each.id for each in made]
        assert [each.id for each in ann.files.list(limit=2)] == [batch.id, *ids[::-1]], "newest first, over two pages"
        assert [each.id for each in ann.files.list(limit=1, order="asc", purpose="user_data")] == ids
        assert ann.files.retrieve(ids[1]).to_dict() == made[1].to_dict()
        assert ann.files.content(ids[2]).content == content[2:]
        for path in (folder, *folder.iterdir()):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path == folder else 0o600), path
        assert not list(bob.files.list())
        for ask in (bob.files.retrieve, bob.files.content, bob.files.delete):
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                ask(ids[0])
        with pytest.raises(openai.NotFoundError):
            ann.files.list(after="file-none")
        assert ann.files.delete(ids[0]).deleted
        assert not (folder / ids[0]).exists()
        with pytest.raises(openai.NotFoundError):
            ann.files.content(ids[0])
        for each in (*ids[1:], batch.id):
            ann.files.delete(each)


def test_oversized_files_leave_no_trace(url: str, folder: Path) -> None:
    with client(url, "ann") as ann:
        for wrong in (
            {"file": ("a", b"x"), "purpose": "none"},
            {"file": ("a", b"x"), "purpose": "batch", "expires_after": {"anchor": "created_at", "seconds": 5}},
            {"file": ("a", b"x"), "purpose": "batch", "extra_body": {"more": "1"}},
        ):
            given: dict[str, Any] = wrong
            with pytest.raises(openai.BadRequestError):
                ann.files.create(**given)
        with pytest.raises(openai.APIStatusError, match="files_mb") as full:
            ann.files.create(file=("a", bytes(2**22)), purpose="user_data")
        assert full.value.status_code == 507
        kept = ann.files.create(file=("a", bytes(2**21)), purpose="user_data")
        with pytest.raises(openai.APIStatusError, match="files_mb"):
            ann.files.create(file=("b", bytes(2**21)), purpose="user_data")
        ann.files.delete(kept.id)
    for sent, content_type in (
        (b"{}", "application/json"),
        (b"--x\r\n", "multipart/form-data; boundary=x"),
        (b"--x\r\n\r\n1\r\n--x--", "multipart/form-data; boundary=x"),
        (b"no", "multipart/form-data; boundary="),
    ):
        answer = httpx.post(f"{url}/v1/files", content=sent, headers={"content-type": content_type})
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert not list(folder.glob("file-*"))


def test_a_client_that_leaves_in_the_middle_leaves_nothing(url: str, folder: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + bytes(2**20)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        httpx.post(f"{url}/v1/files", content=pieces(), headers={"content-type": "multipart/form-data; boundary=x"})
    with client(url, "ann") as ann:
        ann.files.delete(ann.files.create(file=("a", bytes(2**20)), purpose="vision").id)
    wait_for(lambda: not list(folder.glob("file-*")))


def test_expired_files_are_deleted(tmp_path: Path) -> None:
    database = FilesDatabase(tmp_path)
    store = FileStore(tmp_path, database, max_bytes=100)
    kept, gone = store.begin("ann"), store.begin("ann")
    for writer, expires_s in ((kept, 3600), (gone, 0)):
        writer.write(b"x" * 50)
        writer.close()
        store.complete(writer.id, FileMetadata(writer.size, "a", "batch", expires_s))
    with pytest.raises(NotFoundError):
        store.get("ann", gone.id)
    assert [each.id for each in store.page("ann", Page(), None)[0]] == [kept.id]
    store.prune()
    assert not store.path(gone.id).exists()
    writer = store.begin("ann")
    writer.write(b"x" * 50)
    with pytest.raises(DiskSpaceError):
        writer.write(b"x")
    writer.close()
    database.close()


def test_the_sdk_keeps_files_too_and_none_where_that_is_off(tmp_path: Path) -> None:
    config = RouterConfig(cloud_url="http://127.0.0.1:9", cloud_model="big", files=tmp_path / "files")
    with updraft.OpenAI(config=config, max_retries=0) as sdk:
        made = sdk.files.create(file=("b.jsonl", b"one\r\n" * 200_000), purpose="batch")
        assert sdk.files.content(made.id).content == b"one\r\n" * 200_000
    off = updraft.OpenAI(config=RouterConfig(cloud_url="http://127.0.0.1:9", cloud_model="big"), max_retries=0)
    with off, pytest.raises(openai.NotFoundError, match="set `files` to a folder"):
        off.files.list()
