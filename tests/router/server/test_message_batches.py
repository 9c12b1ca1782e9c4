"""Batches of Anthropic's Messages API, through the real anthropic client over a daemon's socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse
from router_fakes import CLOUD_TEXT, FakeCloud
from scripted_cloud import cloud_says
from serving import serving
from updraft.protocol.safety.system import try_lock
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app
from updraft.router.storage.batch_store import BatchStore
from updraft.router.storage.file_store import FilesDatabase
from waiting import wait_for


@pytest.fixture
def url(cloud: FakeCloud, tmp_path: Path) -> Iterator[str]:
    config = RouterConfig(local=None, cloud_url=cloud.url, cloud_model="pocket-large", files=tmp_path / "files")
    with serving(daemon_app(Router(config)), lifespan=True) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="ann", max_retries=0) as client:
        yield client


def request(custom_id: str, **params: Any) -> Any:
    messages = [{"role": "user", "content": custom_id}]
    return {"custom_id": custom_id, "params": {"model": "cloud", "max_tokens": 9, "messages": messages, **params}}


def end_of(client: anthropic.Anthropic, batch: MessageBatch) -> MessageBatch:
    wait_for(lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended")
    return MessageBatch.model_validate(client.messages.batches.retrieve(batch.id).to_dict())


def results(client: anthropic.Anthropic, batch: MessageBatch) -> dict[str, MessageBatchIndividualResponse]:
    lines = [
        MessageBatchIndividualResponse.model_validate(each.to_dict())
        for each in client.messages.batches.results(batch.id)
    ]
    return {line.custom_id: line for line in lines}


def test_each_request_has_its_result(client: anthropic.Anthropic, url: str, cloud: FakeCloud) -> None:
    batch = client.messages.batches.create(
        requests=[request("one"), request("two", top_k=3), request("bad", model="x")]
    )
    MessageBatch.model_validate(batch.to_dict())
    assert batch.request_counts.processing == 3 and batch.results_url is None
    over = end_of(client, batch)
    assert over.request_counts.to_dict() == {
        "processing": 0, "succeeded": 2, "errored": 1, "canceled": 0, "expired": 0
    }  # fmt: skip
    assert over.ended_at is not None and over.created_at.tzinfo is not None and over.results_url
    lines = results(client, over)
    assert lines.keys() == {"one", "two", "bad"}
    answer: Any = lines["one"].result
    assert (answer.type, answer.message.content[0].text) == ("succeeded", CLOUD_TEXT)
    refused: Any = lines["bad"].result
    assert (refused.type, refused.error.error.type) == ("errored", "not_found_error")
    assert [each["top_k"] for each in cloud.requests if "top_k" in each] == [3]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="ann", max_retries=0) as other:
        assert not other.files.list().data and not other.batches.list().data, "the two APIs are kept apart"
    stranger = client.with_options(api_key="other")
    for attempt in (
        lambda: stranger.messages.batches.retrieve(batch.id),
        lambda: stranger.messages.batches.cancel("x"),
    ):
        with pytest.raises(anthropic.NotFoundError):
            attempt()


def test_arguments_of_calls_are_unchanged(client: anthropic.Anthropic, url: str, cloud: FakeCloud) -> None:
    arguments = '{"a": 3.14159265358979323846, "b": 1e400, "c": "x\u2028y", "a": 12345678901234567890123}'
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    cloud_says(cloud, {"content": None, "tool_calls": [call]}, "tool_calls")
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    over = end_of(client, client.messages.batches.create(requests=[request("one", tools=tools)]))
    headers = {"authorization": "Bearer ann"}
    told = httpx.get(f"{url}/v1/messages/batches/{over.id}/results", headers=headers).text
    assert len(told.splitlines()) == 1
    assert f'"input":{arguments}'.replace("\u2028", "\\u2028") in told


def test_batches_are_listed_newest_first(client: anthropic.Anthropic) -> None:
    made = [client.messages.batches.create(requests=[request("a")]).id for _ in range(3)]
    first = client.messages.batches.list(limit=2)
    assert [each.id for each in first.data] == [made[2], made[1]] and first.has_more
    assert [each.id for each in client.messages.batches.list(after_id=made[1]).data] == [made[0]]
    assert client.messages.batches.list(after_id=made[0]).data == []


def test_a_cancelled_batch_keeps_its_answers(client: anthropic.Anthropic, cloud: FakeCloud) -> None:
    cloud.delay_s = 0.2
    batch = client.messages.batches.create(requests=[request(str(number)) for number in range(200)])
    wait_for(lambda: len(cloud.requests) >= 2)
    cancelled = client.messages.batches.cancel(batch.id)
    assert cancelled.processing_status == "canceling" and cancelled.cancel_initiated_at is not None
    with pytest.raises(anthropic.BadRequestError, match="not ended"):
        client.get(f"/v1/messages/batches/{batch.id}/results", cast_to=object)
    over = end_of(client, batch)
    kinds = [line.result.type for line in results(client, over).values()]
    assert len(kinds) == 200
    for kind in ("succeeded", "canceled"):
        assert kinds.count(kind) == getattr(over.request_counts, kind) > 0


def test_an_expired_batch(client: anthropic.Anthropic, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir(mode=0o700)
    with (tmp_path / "files" / "batches.lock").open("wb") as lock:  # no batch runs while another process has the lock
        assert try_lock(lock.fileno())
        batch = client.messages.batches.create(requests=[request("late")])
        BatchStore(FilesDatabase(tmp_path / "files")).change(batch.id, lambda each: setattr(each, "expires_at", 1))
    over = end_of(client, batch)
    assert over.request_counts.expired == 1
    assert results(client, over)["late"].result.type == "expired"


def test_an_invalid_request_fails_alone(client: anthropic.Anthropic, cloud: FakeCloud) -> None:
    faulty: list[Any] = [request("stream", stream=True), {"custom_id": "none"}, {"custom_id": "list", "params": [1]}]
    over = end_of(client, client.messages.batches.create(requests=[*faulty, request("good", stream="false")]))
    assert (over.request_counts.succeeded, over.request_counts.errored) == (1, 3)
    ended = results(client, over)
    assert {name: line.result.type for name, line in ended.items()} == {
        "stream": "errored",
        "none": "errored",
        "list": "errored",
        "good": "succeeded",
    }
    error: Any = ended["stream"].result
    assert error.error.error.type == "invalid_request_error" and "stream" in error.error.error.message


def test_an_ended_batch_is_deleted_with_its_files(
    client: anthropic.Anthropic, cloud: FakeCloud, tmp_path: Path
) -> None:
    cloud.delay_s = 0.2
    batch = client.messages.batches.create(requests=[request(str(number)) for number in range(200)])
    with pytest.raises(anthropic.BadRequestError, match="cancel it first"):
        client.messages.batches.delete(batch.id)
    client.messages.batches.cancel(batch.id)
    deleted = client.messages.batches.delete(end_of(client, batch).id)
    assert deleted.to_dict() == {"id": batch.id, "type": "message_batch_deleted"}
    for call in (client.messages.batches.retrieve, client.messages.batches.delete):
        with pytest.raises(anthropic.NotFoundError):
            call(batch.id)
    assert not list((tmp_path / "files").glob("file-*"))


@pytest.mark.parametrize(
    ("requests", "says"),
    [
        ([], "no requests"),
        ([request("a"), request("a")], r"requests\[1\]: Two lines"),
        ([{"params": {}}], r"requests\[0\]: .*custom_id"),
        ([1], "object"),
    ],
)
def test_faulty_batches_are_refused(client: anthropic.Anthropic, tmp_path: Path, requests: Any, says: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=says):
        client.messages.batches.create(requests=requests)
    assert not list((tmp_path / "files").glob("file-*")), "a refused batch leaves no file"
