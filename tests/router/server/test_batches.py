"""Batches: each line is answered once, whatever ends the process; they wait for callers, expire and are cancelled."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Batch as OpenAIBatch
from router_fakes import FakeCloud, ScriptedLocal, tiers
from server_processes import running
from serving import serving
from updraft.protocol.errors import BudgetExceededError
from updraft.protocol.http.wire import WireRequest, WireResponse
from updraft.router.accounting.ledger import Ledger
from updraft.router.config import RouterConfig
from updraft.router.responses.completion import failure
from updraft.router.router import Router
from updraft.router.server.app import daemon_app
from updraft.router.server.batches.lines import answer_line, answered
from updraft.router.server.batches.run import Background, BatchRun, InteractiveRequests, Stores
from updraft.router.storage.batch_store import Batch, BatchJob, BatchStore
from updraft.router.storage.file_store import DATABASE, MB, FileMetadata, FilesDatabase, FileStore
from waiting import wait_for

CHAT = "/v1/chat/completions"
OVER = ("completed", "failed", "cancelled", "expired")


def request(custom_id: str, *, url: str = CHAT, **body: Any) -> dict[str, Any]:
    given = {"model": "cloud", "messages": [{"role": "user", "content": custom_id}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": given}


def jsonl(*lines: Any) -> bytes:
    return "\n".join(json.dumps(line) for line in lines).encode()


def create(client: openai.OpenAI, *lines: Any, **given: Any) -> OpenAIBatch:
    file = client.files.create(file=("requests.jsonl", jsonl(*lines)), purpose="batch")
    return client.batches.create(**{"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **given})


def end_of(client: openai.OpenAI, batch: OpenAIBatch) -> OpenAIBatch:
    wait_for(lambda: client.batches.retrieve(batch.id).status in OVER)
    return client.batches.retrieve(batch.id)


def answers(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """By `custom_id`, of which there are no two."""
    lines = [json.loads(line) for line in client.files.content(file_id or "").text.splitlines()]
    lines_by_id = {line["custom_id"]: line for line in lines}
    assert len(lines_by_id) == len(lines)
    return lines_by_id


@pytest.fixture(scope="module")
def local() -> ScriptedLocal:
    return ScriptedLocal()


@pytest.fixture(scope="module")
def ledger_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state") / "ledger.sqlite3"


@pytest.fixture(scope="module")
def client(cloud_server: FakeCloud, local: ScriptedLocal, ledger_file: Path) -> Iterator[openai.OpenAI]:
    config = RouterConfig(
        local="pocket",
        cloud_url=cloud_server.url,
        cloud_model="pocket-large",
        files=ledger_file.with_name("files"),
        store=ledger_file.with_name("answers.sqlite3"),
        ledger=ledger_file,
    )
    with (
        serving(daemon_app(Router(config, tiers(local, config))), lifespan=True) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="ann", max_retries=0) as client,
    ):
        yield client


@contextmanager
def daemon(cloud: FakeCloud, home: Path) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """`updraft serve` with its own settings, and a client of it."""
    with (
        running(
            *("-m", "updraft", "serve", "--port", "0"),
            UPDRAFT_HOME=str(home),
            UPDRAFT_CLOUD_URL=cloud.url,
            UPDRAFT_CLOUD_MODEL="pocket-large",
        ) as process,
        openai.OpenAI(base_url=f"{process.url}/v1", api_key="ann", max_retries=0) as client,
    ):
        yield process.popen, client


def test_killed_daemon_resumes_and_answers_each_line_once(cloud: FakeCloud, tmp_path: Path) -> None:
    cloud.delay_s = 0.1
    lines = [request(f"line {number}") for number in range(12)]
    with daemon(cloud, tmp_path) as (popen, client):
        batch = create(client, *lines)
        wait_for(lambda: len(cloud.requests) >= 5)
        popen.kill()
        popen.wait()
    with closing(sqlite3.connect(tmp_path / "files" / DATABASE)) as database:
        output = database.execute("SELECT output_id FROM batches").fetchone()[0]
    with (tmp_path / "files" / output).open("ab") as torn:
        torn.write(b'{"id": "batch_req')
    with daemon(cloud, tmp_path) as (_, client):
        over = end_of(client, batch)
        assert over.request_counts is not None
        assert over.request_counts.to_dict() == {"total": 12, "completed": 12, "failed": 0}
        lines_by_id = answers(client, over.output_file_id)
    assert lines_by_id.keys() == {line["custom_id"] for line in lines}
    assert len(cloud.requests) <= 12 + 2, "only what was in flight is asked twice"


def test_the_answers_and_the_errors_of_each_endpoint(
    client: openai.OpenAI, cloud: FakeCloud, ledger_file: Path
) -> None:
    batch = create(client, request("good"), request("bad", messages="none"), metadata={"night": "1"})
    assert (batch.status, batch.expires_at, batch.metadata) == ("validating", batch.created_at + 86400, {"night": "1"})
    over = end_of(client, batch)
    OpenAIBatch.model_validate(over.to_dict())
    assert (over.status, over.errors) == ("completed", None)
    assert over.request_counts is not None
    assert over.request_counts.to_dict() == {"total": 2, "completed": 1, "failed": 1}
    good = answers(client, over.output_file_id)["good"]["response"]
    assert good["status_code"] == 200
    assert good["body"]["updraft"]["route"] == "cloud"
    bad = answers(client, over.error_file_id)["bad"]["response"]
    assert (bad["status_code"], bad["body"]["error"]["param"]) == (400, "messages")
    output = client.files.retrieve(over.output_file_id or "")
    assert (output.filename, output.purpose) == (f"{batch.id}_output.jsonl", "batch_output")
    for url, body in (("/v1/embeddings", {"input": ["a"]}), ("/v1/responses", {"input": "hello"}),
                      ("/v1/moderations", {"input": "a"}), ("/v1/images/generations", {"prompt": "a"})):  # fmt: skip
        line = {"custom_id": "one", "method": "POST", "url": url, "body": {"model": "cloud", **body}}
        over = end_of(client, create(client, line, endpoint=url))
        assert answers(client, over.output_file_id)["one"]["response"]["status_code"] == 200, url
    assert [each.id for each in client.batches.list(limit=1)][-1] == batch.id, "newest first, page by page"
    with closing(Ledger(ledger_file)) as ledger:
        keys = {row.key for row in ledger.rows() if row.model == "cloud"}
    assert keys == {hashlib.sha256(b"ann").hexdigest()[:32]}, "what a batch costs is its caller's"
    with openai.OpenAI(base_url=client.base_url, api_key="bob", max_retries=0) as bob:
        assert not list(bob.batches.list())
        with pytest.raises(openai.NotFoundError):
            bob.batches.cancel(batch.id)
    with pytest.raises(openai.BadRequestError, match="completed"):
        client.batches.cancel(batch.id)


def test_input_errors_are_reported_by_line_before_any_request(client: openai.OpenAI, cloud: FakeCloud) -> None:
    good = request("a")
    over = end_of(
        client,
        create(client, good, good, {**good, "custom_id": "b", "method": "GET"}, request("c", url="/v1/embeddings"),
               "no", request("d", stream=True), {"custom_id": "e"}),
    )  # fmt: skip
    assert over.status == "failed" and over.errors is not None and over.errors.data is not None
    assert [(each.line, each.code) for each in over.errors.data] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_method"),
        (4, "invalid_url"),
        (5, "invalid_json_line"),
        (6, "invalid_value"),
        (7, "invalid_json_line"),
    ]
    assert not cloud.requests
    empty = end_of(client, create(client))
    assert empty.errors is not None and empty.errors.data is not None
    assert [each.code for each in empty.errors.data] == ["empty_file"]
    other = client.files.create(file=("a", b"{}"), purpose="user_data")
    for wrong in ({"input_file_id": other.id}, {"endpoint": "/v1/models"}, {"completion_window": "1h"}):
        with pytest.raises(openai.BadRequestError) as refused:
            create(client, good, **wrong)
        assert refused.value.param == next(iter(wrong))


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_file_in_another_encoding_fails_with_the_line(client: openai.OpenAI, cloud: FakeCloud, encoding: str) -> None:
    line = json.dumps(request("a", user="\u00e9"), ensure_ascii=False)
    file = client.files.create(file=("requests.jsonl", line.encode(encoding)), purpose="batch")
    over = end_of(client, create(client, input_file_id=file.id))
    assert over.status == "failed" and over.errors is not None and over.errors.data is not None
    assert [(each.line, each.code) for each in over.errors.data] == [(1, "invalid_json_line")]
    assert "not a valid request" in (over.errors.data[0].message or "")
    assert not cloud.requests


def test_a_batch_waits_for_callers_and_can_be_cancelled(
    client: openai.OpenAI, cloud: FakeCloud, local: ScriptedLocal
) -> None:
    cloud.mode = "slow"
    before = local.started

    body = json.dumps(request("caller")["body"]).encode()
    address = client.base_url.host, client.base_url.port
    with socket.create_connection(address) as caller:
        caller.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        wait_for(lambda: cloud.requests)
        first, second = (create(client, request("a", model="local")) for _ in range(2))
        wait_for(lambda: client.batches.retrieve(first.id).status == "in_progress")
        with pytest.raises(openai.BadRequestError, match=first.id):
            client.files.delete(first.input_file_id)
        assert client.batches.cancel(second.id).status == "cancelled", "it has not begun"
        assert client.batches.cancel(first.id).status == "cancelling"
        over = end_of(client, first)
        assert (over.status, over.output_file_id, over.error_file_id) == ("cancelled", None, None)
        assert local.started == before, "it looked whether it was cancelled while a caller was being answered"
        third = create(client, request("a", model="local"))
    assert end_of(client, third).status == "completed"
    assert local.started == before + 1


def answer_of(size: int, outages: int) -> Callable[[WireRequest], Awaitable[WireResponse]]:
    """The first requests find no cloud."""
    asked_before: list[WireRequest] = []

    async def ask(asked: WireRequest) -> WireResponse:
        asked_before.append(asked)
        if len(asked_before) <= outages:
            return WireResponse.json({}, status=502)
        failed = b"odd" in asked.body
        return WireResponse.json({"text": "x" * size}, status=400 if failed else 200)

    return ask


@dataclass
class Night:
    """A batch of six requests, of which every other one fails, in a folder of its own."""

    folder: Path
    max_bytes: int = MB
    size: int = 10
    expires_in: int = 3600
    outages: int = 0

    def __post_init__(self) -> None:
        self.database = FilesDatabase(self.folder)
        files = FileStore(self.folder, self.database, self.max_bytes)
        self.stores = Stores(self.database, files, BatchStore(self.database))
        lines = [request(f"{number} {'odd' if number % 2 else 'even'}") for number in range(6)]
        self.input = jsonl(*lines)
        writer = files.begin("ann")
        writer.write(self.input)
        writer.close()
        files.complete(writer.id, FileMetadata(writer.size, "a", "batch"))
        now = int(time.time())
        batch = Batch(
            id="batch-1",
            endpoint=CHAT,
            input_file_id=writer.id,
            completion_window="24h",
            created_at=now,
            expires_at=now + self.expires_in,
        )
        self.stores.batches.create("ann", batch, None)
        outputs = [files.begin("ann") for _ in range(2)]
        for each in outputs:
            each.close()
        self.output, self.errors = (files.path(each.id) for each in outputs)
        self.begun = self.stores.batches.begin(batch.id, 6, *(each.id for each in outputs))

    def run(self) -> Batch:
        job = self.stores.batches.next()
        assert isinstance(job, BatchJob)
        run = BatchRun(self.stores, job, Background(answer_of(self.size, self.outages), InteractiveRequests()))
        return asyncio.run(run.run())

    def again(self) -> None:
        """As if the process had ended before the last change."""
        self.stores.batches.change("batch-1", lambda batch: setattr(batch, "status", "in_progress"))


@given(st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=15)
def test_at_whatever_byte_the_process_ended_each_line_is_answered_once(output: float, errors: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        night = Night(Path(folder))
        night.run()
        for path, share in ((night.output, output), (night.errors, errors)):
            content = path.read_bytes()
            path.write_bytes(content[: round(share * len(content))])
        night.again()
        over = night.run()
        night.database.close()
        written = night.output.read_text() + night.errors.read_text()
        kept = [json.loads(line)["custom_id"] for line in written.splitlines()]
    assert sorted(kept) == sorted(json.loads(line)["custom_id"] for line in night.input.splitlines())
    assert (over.status, over.request_counts.completed, over.request_counts.failed) == ("completed", 3, 3)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"a":\n 1.10,\r\n "b": 12345678901234567890123}', {"a": 1.1, "b": 12345678901234567890123}),
        ('{"a": "x\u2028y\u2029z\x85"}'.encode(), {"a": "x\u2028y\u2029z\x85"}),
        (b'{"a":\n "\\ud83d"}', {"a": "\ud83d"}),
        (b'{"input":\n {"a":\r\n 1e400}}', {"input": {"a": float("inf")}}),
        (b'\xef\xbb\xbf{"a": NaN\n}', {"a": None}),
        ('{"a": 1}'.encode("utf-16"), {"a": 1}),
        (b"<html>\nGateway\xff</html>", "<html>\nGateway\ufffd</html>"),
    ],
)
def test_an_answer_of_any_kind_is_one_line_of_json(tmp_path: Path, body: bytes, told: Any) -> None:
    line = answer_line("one", WireResponse(200, {}, body), "req_1")
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line)["response"]["body"] == told
    output = tmp_path / "output.jsonl"
    output.write_bytes(line)
    assert answered(output) == {"one"}


def test_an_outage_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("updraft.router.server.batches.run.RETRY_S", (0.0, 0.0, 0.0))
    night = Night(tmp_path / "files", outages=3)
    over = night.run()
    night.database.close()
    assert (over.request_counts.completed, over.request_counts.failed) == (3, 3), "as without it"
    assert len(night.output.read_text().splitlines()) == 3


def test_each_line_asks_a_spent_budget_once(tmp_path: Path) -> None:
    """Every request leaves a row in the ledger."""
    asked: list[WireRequest] = []

    async def ask(request: WireRequest) -> WireResponse:
        asked.append(request)
        return failure(BudgetExceededError("The budget is spent.", renews_s=3600.0))

    night = Night(tmp_path / "files")
    job = night.stores.batches.next()
    assert isinstance(job, BatchJob)
    over = asyncio.run(BatchRun(night.stores, job, Background(ask, InteractiveRequests())).run())
    night.database.close()
    assert over.request_counts.failed == len(asked) == 6


def test_unanswered_lines_expire(tmp_path: Path) -> None:
    night = Night(tmp_path / "files", expires_in=0)
    over = night.run()
    night.database.close()
    assert (over.status, over.output_file_id, over.request_counts.failed) == ("expired", None, 6)
    errors = [json.loads(line) for line in night.errors.read_text().splitlines()]
    assert {(each["response"], each["error"]["code"]) for each in errors} == {(None, "batch_expired")}


def test_a_batch_on_a_full_disk_ends_with_the_stored_answers(tmp_path: Path) -> None:
    night = Night(tmp_path / "files", size=400_000)
    over = night.run()
    night.database.close()
    assert over.status == "failed" and over.errors is not None
    assert [each.code for each in over.errors.data] == ["files_full"]
    assert 1 <= over.request_counts.completed + over.request_counts.failed <= 2
    kept = [path for path in (night.output, night.errors) if path.exists()]  # an empty one is removed
    assert sum(path.stat().st_size for path in kept) < MB
