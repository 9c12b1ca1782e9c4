"""Downloads over real sockets from servers that cut, stall, lie and redirect."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from model_hub import Hub, ReceivedRequest, running, tiny_gguf
from updraft.local_engine.store.find import find
from updraft.local_engine.store.library import Library, Manifest
from updraft.local_engine.store.pull import pull
from updraft.model_files.download.progress import ProgressReport
from updraft.model_files.download.web import RetryLimits, _redirected
from updraft.protocol.errors import (
    ChecksumError,
    DownloadError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
)

pytest.importorskip("huggingface_hub")
MODEL = tiny_gguf()
SHA256 = hashlib.sha256(MODEL).hexdigest()
NAME = "hf:owner/repo"
KINDS = ("hub", "web")


def wanted(kind: str, hub: Hub) -> str:
    return NAME if kind == "hub" else f"{hub.url}/files/tiny.gguf"


def get(
    what: str, library: Library, retries: RetryLimits, report: ProgressReport | None = None, **given: str
) -> Manifest:
    return pull(library, find(what, retries=retries, **given), retries=retries, report=report)


def leftovers(library: Library) -> list[str]:
    return sorted(path.name for path in library.partial.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_arrives(kind: str, hub: Hub, library: Library, retries: RetryLimits) -> None:
    steps: list[tuple[int, int | None]] = []
    report = ProgressReport(lambda done, total: steps.append((done, total)))
    manifest = get(wanted(kind, hub), library, retries, report)
    assert library.path(manifest.name).read_bytes() == MODEL
    assert (manifest.sha256, manifest.size) == (SHA256, len(MODEL))
    assert manifest.licence == ("apache-2.0" if kind == "hub" else "mit")
    assert manifest.published is (kind == "hub")
    assert steps[0] == (0, len(MODEL))
    assert steps[-1] == (len(MODEL), len(MODEL))
    assert leftovers(library) == []
    assert library.find(manifest.name) == manifest


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_pull_fetches_nothing(kind: str, hub: Hub, library: Library, retries: RetryLimits) -> None:
    first = get(wanted(kind, hub), library, retries)
    assert get(wanted(kind, hub), library, retries) == first
    assert len(hub.bodies) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_cut_connections_are_continued(kind: str, hub: Hub, library: Library, retries: RetryLimits) -> None:
    hub.cuts = 3
    lines: list[str] = []
    manifest = get(wanted(kind, hub), library, retries, ProgressReport(say=lines.append))
    assert library.path(manifest.name).read_bytes() == MODEL
    assert [received.start for received in hub.bodies] == [0, 50_000, 100_000, 150_000]
    assert len(lines) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_tries_are_bounded_and_the_next_pull_continues(
    kind: str, hub: Hub, library: Library, retries: RetryLimits
) -> None:
    hub.cuts, hub.cut_after = 1000, 2_000  # never enough for a new row of tries
    with pytest.raises(DownloadError, match="gave up after 4 tries; 8,000 downloaded bytes are kept"):
        get(wanted(kind, hub), library, retries)
    (entry,) = library.entries()
    assert (entry.state, entry.size) == ("partial", 8_000)
    hub.cuts = 0
    manifest = get(wanted(kind, hub), library, retries)
    assert hub.bodies[-1].start == 8_000
    assert library.path(manifest.name).read_bytes() == MODEL


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_without_ranges_starts_again(kind: str, hub: Hub, library: Library, retries: RetryLimits) -> None:
    hub.no_ranges, hub.cuts = True, 2
    manifest = get(wanted(kind, hub), library, retries)
    assert library.path(manifest.name).read_bytes() == MODEL


def test_a_server_without_ranges_that_always_cuts_is_given_up(hub: Hub, library: Library, retries: RetryLimits) -> None:
    """It brings many bytes each time, but always the same ones."""
    hub.no_ranges, hub.cuts = True, 1000
    with pytest.raises(DownloadError, match="gave up after 4 tries"):
        get(NAME, library, retries)
    assert len(hub.bodies) <= 5


def test_a_wrong_range_is_not_taken(hub: Hub, library: Library, retries: RetryLimits) -> None:
    hub.cuts, hub.wrong_range = 1, True
    manifest = get(NAME, library, retries)
    assert library.path(manifest.name).read_bytes() == MODEL
    assert [received.start for received in hub.bodies] == [0, 50_000, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_bytes_are_deleted(kind: str, hub: Hub, library: Library, retries: RetryLimits) -> None:
    hub.corrupt = True
    known = {} if kind == "hub" else {"sha256": SHA256}
    with pytest.raises(ChecksumError, match=f"arrived damaged and was deleted: .*expected .*{SHA256}"):
        get(wanted(kind, hub), library, retries, **known)
    assert library.entries() == []
    assert leftovers(library) == []
    hub.corrupt = False
    assert get(wanted(kind, hub), library, retries, **known).sha256 == SHA256


def test_a_part_that_rotted_on_the_disk_is_found(hub: Hub, library: Library, retries: RetryLimits) -> None:
    hub.cuts = 1000
    with pytest.raises(DownloadError):
        get(NAME, library, replace(retries, tries=1))
    hub.cuts = 0
    part = library.partial / "tiny-Q8_0.part"
    part.write_bytes(bytes(1000) + part.read_bytes()[1000:])
    with pytest.raises(ChecksumError):
        get(NAME, library, retries)
    assert get(NAME, library, retries).sha256 == SHA256


def test_busy_servers_are_asked_again(hub: Hub, library: Library, retries: RetryLimits) -> None:
    hub.statuses = [503, 429]
    assert get(NAME, library, retries).sha256 == SHA256
    hub.statuses = [502, 500]
    assert get(f"{hub.url}/files/tiny.gguf", library, retries).sha256 == SHA256


@pytest.mark.parametrize(("status", "error"), [(404, ModelNotFoundError), (403, DownloadError), (400, DownloadError)])
def test_a_refusal_is_final(
    hub: Hub, library: Library, retries: RetryLimits, status: int, error: type[Exception]
) -> None:
    hub.statuses = [status] * 9
    with pytest.raises(error, match=str(status)):
        get(f"{hub.url}/files/tiny.gguf", library, retries)
    assert len(hub.received) == 1


def test_a_silent_server_is_given_up(hub: Hub, library: Library, retries: RetryLimits) -> None:
    hub.pause_s = 5
    with pytest.raises(DownloadError, match="no answer in time; gave up after 2 tries"):
        get(NAME, library, replace(retries, read_s=0.2, tries=2, worthwhile=10**9))


def test_a_trickle_is_given_up(hub: Hub, library: Library, retries: RetryLimits) -> None:
    """No single read takes long, but the file would take for ever."""
    hub.pause_s, hub.piece = 0.05, 10
    with pytest.raises(DownloadError, match="sent only"):
        get(NAME, library, replace(retries, window_s=0.3, tries=2))


def test_nobody_listens(hub: Hub, library: Library, retries: RetryLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="hub cannot be reached"):
        get(NAME, library, retries)
    with pytest.raises(DownloadError, match="gave up"):
        get("http://127.0.0.1:9/tiny.gguf", library, retries)


class TestSecrets:
    TOKEN = "hf_verysecretverysecretverysecret"

    @pytest.fixture(autouse=True)
    def token(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", self.TOKEN)

    def test_the_token_stays_with_the_hub(self, hub: Hub, library: Library, retries: RetryLimits) -> None:
        with running(Hub(files=hub.files, etag='"storage"'), "127.0.0.2") as storage:
            hub.other, storage.cuts = storage.url, 1
            lines: list[str] = []
            manifest = get(NAME, library, retries, ProgressReport(say=lines.append))
        assert manifest.sha256 == SHA256
        assert {with_token(received) for received in hub.received} == {True}
        assert len(hub.bodies) == len(storage.received) == 2
        assert not any(self.TOKEN in value for received in storage.received for value in received.headers.values())
        kept = "".join(path.read_text() for path in library.folder.rglob("*.json"))
        assert self.TOKEN not in "".join(lines) + kept + repr(find(NAME, retries=retries))

    def test_nor_does_who_answers_for_the_hub_get_it(self, hub: Hub, retries: RetryLimits) -> None:
        with running(Hub(files=hub.files), "127.0.0.2") as other:
            hub.facts_at = other.url
            assert find(NAME, retries=retries).sha256 == SHA256
        assert with_token(hub.received[0])
        assert not any(with_token(received) for received in other.received)

    def test_no_web_server_gets_it(self, hub: Hub, library: Library, retries: RetryLimits) -> None:
        with running(Hub(web=hub.web), "127.0.0.2") as other:
            get(f"{other.url}/files/tiny.gguf", library, retries)
        assert not any(with_token(received) for received in other.received)

    def test_token_is_in_no_error(self, hub: Hub, library: Library, retries: RetryLimits) -> None:
        hub.cuts = 1000
        with pytest.raises(DownloadError) as caught:
            get(NAME, library, replace(retries, tries=1))
        hub.cuts, hub.corrupt = 0, True
        with pytest.raises(ChecksumError) as second:
            get(NAME, library, retries)
        assert self.TOKEN not in str(caught.value) + str(second.value)

    def test_a_query_is_kept_nowhere(self, hub: Hub, library: Library, retries: RetryLimits) -> None:
        """Signed addresses carry their secret there."""
        get(f"{hub.url}/files/tiny.gguf?signature=secret", library, retries)
        assert "signature=secret" in hub.received[-1].path
        for path in library.folder.rglob("*"):
            assert path.is_dir() or b"signature" not in path.read_bytes()


def with_token(received: ReceivedRequest) -> bool:
    return "authorization" in received.headers


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("http://192.0.2.1/x.gguf", "not encrypted"),
        ("file:///etc/passwd", "not from file"),
        ("ftp://127.0.0.1/x", "not from ftp"),
        ("https://user:pass@127.0.0.1/x", "holds a password"),
        ("http://[", "refused"),
    ],
)
def test_redirects_that_are_refused(hub: Hub, library: Library, retries: RetryLimits, target: str, why: str) -> None:
    hub.target = target
    with pytest.raises(DownloadError, match=why):
        get(f"{hub.url}/files/tiny.gguf", library, retries)


def test_a_redirect_loop(hub: Hub, library: Library, retries: RetryLimits) -> None:
    hub.target = "/again"
    with pytest.raises(DownloadError, match="redirects more than 10 times"):
        get(f"{hub.url}/files/tiny.gguf", library, retries)


@pytest.mark.parametrize(
    "address",
    ["http://example.org/x.gguf", "ftp://example.org/x", "https://me:pw@example.org/x.gguf", "https://", "http://[/x"],
)
def test_addresses_that_are_refused(address: str, retries: RetryLimits) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        find(address, retries=retries)
    assert "pw" not in str(caught.value)


def test_a_hub_that_is_not_encrypted_is_refused(monkeypatch: pytest.MonkeyPatch, retries: RetryLimits) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example.org")
    with pytest.raises(InvalidRequestError, match="not encrypted"):
        find(NAME, retries=retries)


class TestVersions:
    """A file on a web server may be exchanged while it is fetched, or between two pulls."""

    def interrupted(self, hub: Hub, library: Library, retries: RetryLimits) -> str:
        hub.cuts = 1000
        address = f"{hub.url}/files/tiny.gguf"
        with pytest.raises(DownloadError):
            get(address, library, replace(retries, tries=1))
        hub.cuts = 0
        return address

    def test_another_version_is_begun_anew(self, hub: Hub, library: Library, retries: RetryLimits) -> None:
        address = self.interrupted(hub, library, retries)
        hub.web["/files/tiny.gguf"], hub.etag = tiny_gguf(seed=1), '"two"'
        manifest = get(address, library, retries)
        assert library.path(manifest.name).read_bytes() == tiny_gguf(seed=1)
        assert hub.bodies[-1].start == 0

    def test_a_change_in_the_middle_is_an_error(self, hub: Hub, library: Library, retries: RetryLimits) -> None:
        spec = find(f"{hub.url}/files/tiny.gguf", retries=retries)
        hub.web["/files/tiny.gguf"], hub.etag = tiny_gguf(seed=1), '"two"'
        with pytest.raises(DownloadError, match="changed during"):
            pull(library, spec, retries=retries)
        hub.web["/files/tiny.gguf"] = tiny_gguf(1000)
        with pytest.raises(DownloadError, match="were announced"):
            pull(library, spec, retries=retries)

    def test_without_a_validator_nothing_is_continued(self, hub: Hub, library: Library, retries: RetryLimits) -> None:
        hub.etag = None
        address = self.interrupted(hub, library, retries)
        get(address, library, retries)
        assert hub.bodies[-1].start == 0

    def test_with_a_known_checksum_it_is(self, hub: Hub, library: Library, retries: RetryLimits) -> None:
        hub.etag, hub.cuts = None, 1
        get(f"{hub.url}/files/tiny.gguf", library, retries, sha256=SHA256)
        assert hub.bodies[-1].start == 50_000

    def test_a_newer_version_replaces_the_old_one(self, hub: Hub, library: Library, retries: RetryLimits) -> None:
        get(NAME, library, retries)
        hub.files["owner/repo"]["tiny-Q8_0.gguf"] = tiny_gguf(seed=2)
        manifest = get(NAME, library, retries)
        assert library.path(manifest.name).read_bytes() == tiny_gguf(seed=2)
        assert library.verify(manifest.name, ProgressReport()) == "ready"


def test_no_length_is_no_obstacle(hub: Hub, library: Library, retries: RetryLimits) -> None:
    hub.no_length = hub.no_ranges = True
    address = f"{hub.url}/files/tiny.gguf"
    assert find(address, retries=retries).size is None
    assert get(address, library, retries).sha256 == SHA256


def test_no_length_and_a_cut_is_noticed(hub: Hub, library: Library, retries: RetryLimits) -> None:
    """The connection just ends: only the model's own header tells that something is missing."""
    hub.no_length = hub.no_ranges = True
    hub.cuts = 1
    with pytest.raises(ModelLoadError, match="truncated"):
        get(f"{hub.url}/files/tiny.gguf", library, retries)
    assert library.entries() == []


def test_more_than_was_announced_is_not_read_to_its_end(hub: Hub, library: Library, retries: RetryLimits) -> None:
    hub.no_length, hub.tail = True, b"x" * 1000
    with pytest.raises(DownloadError, match="is longer than"):
        get(NAME, library, retries)
    assert part_bytes(library) == 0


def part_bytes(library: Library) -> int:
    return sum(path.stat().st_size for path in library.partial.glob("*.part"))


def test_no_way_back_from_encryption() -> None:
    with pytest.raises(DownloadError, match="redirects from https"):
        _redirected(httpx.URL("https://example.org/x"), "http://127.0.0.1/x")


def test_a_page_is_no_model(hub: Hub, library: Library, retries: RetryLimits) -> None:
    hub.web["/files/tiny.gguf"] = b"<!doctype html>" * 100
    with pytest.raises(ModelLoadError, match="is not a usable model and was deleted"):
        get(f"{hub.url}/files/tiny.gguf", library, retries)
    assert leftovers(library) == []


def test_files_outside_large_storage_have_no_checksum_beforehand(
    hub: Hub, library: Library, retries: RetryLimits
) -> None:
    hub.lfs, hub.cuts = False, 1
    manifest = get(NAME, library, retries)
    assert (manifest.published, manifest.sha256) == (False, SHA256)
    assert hub.bodies[-1].start == 50_000


def test_a_checksum_that_the_hub_contradicts(hub: Hub, retries: RetryLimits) -> None:
    with pytest.raises(DownloadError, match="is published with"):
        find(NAME, retries=retries, sha256="0" * 64)
    with pytest.raises(InvalidRequestError, match="64 hexadecimal"):
        find(NAME, retries=retries, sha256="1234")


def test_missing_hub_fields(hub: Hub, retries: RetryLimits, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no repository owner/absent"):
        find("hf:owner/absent", retries=retries)
    hub.gated = True
    with pytest.raises(DownloadError, match="HF_TOKEN") as caught:
        find(NAME, retries=retries)
    assert caught.value.code == "access_denied"
    hub.statuses = [200]
    with pytest.raises(DownloadError, match="cannot be read"):
        find(NAME, retries=retries)


def test_headers_drop_by_drop_are_a_failure(retries: RetryLimits) -> None:
    """Each read is quick, and there is always one more."""
    done = threading.Event()

    def drip(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            while not done.wait(0.05):
                connection.sendall(b"x: y\r\n")

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(server.accept()[0],), daemon=True).start()

    hurry, lines = replace(retries, connect_s=0.2, read_s=0.3, tries=2), []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(DownloadError, match="no complete response in time; gave up after 2 tries"):
            find(
                f"http://127.0.0.1:{server.getsockname()[1]}/x.gguf",
                retries=hurry,
                report=ProgressReport(say=lines.append),
            )
        done.set()
    assert time.monotonic() - began < 60
