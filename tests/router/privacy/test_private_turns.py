"""Turns that follow a private turn stay on the device too, by whatever way they take over its items."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_fakes import FakeCloud, ScriptedGates, ScriptedLocal, tiers
from serving import serving
from updraft.router.config import CacheSettings, RouterConfig
from updraft.router.privacy.rules import Privacy
from updraft.router.router import Router
from updraft.router.server.app import daemon_app
from updraft.router.storage.answer_store import AnswerStore
from websockets.sync.client import connect

SECRET = "the code is SECRET42"
PRIVATE: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "flag": ({"updraft": {"private": True}}, {}),
    "instructions": ({"instructions": "You serve ann@example.com"}, {}),
    "user": ({"user": "ann@example.com"}, {}),
    "header": ({}, {"x-mail": "ann@example.com"}),
}


class Daemon:
    """A daemon whose gates send every request to the cloud that no rule keeps on the device."""

    def __init__(self, url: str, cloud: FakeCloud) -> None:
        self.url = url
        self.cloud = cloud

    def post(self, path: str, headers: dict[str, str] | None = None, status: int = 200, **body: Any) -> dict[str, Any]:
        made = httpx.post(f"{self.url}{path}", json={"model": "auto", **body}, headers=headers, timeout=60)
        assert made.status_code == status, made.text
        return made.json()

    def respond(self, **body: Any) -> dict[str, Any]:
        return self.post("/v1/responses", **body)

    def turn(self, reason: str, **more: Any) -> dict[str, Any]:
        body, headers = PRIVATE[reason]
        return self.respond(input=SECRET, headers=headers, **body, **more)

    @property
    def leaks(self) -> bool:
        return "SECRET42" in json.dumps(self.cloud.requests)

    def ended(self, response: dict[str, Any]) -> dict[str, Any]:
        while response["status"] in ("queued", "in_progress"):
            time.sleep(0.01)
            response = httpx.get(f"{self.url}/v1/responses/{response['id']}").json()
        return response


@pytest.fixture
def daemon(cloud: FakeCloud, tmp_path: Path) -> Iterator[Daemon]:
    config = RouterConfig(
        local="pocket",
        cloud_url=cloud.url,
        cloud_model="pocket-large",
        privacy=Privacy(builtin=("email",)),
        store=tmp_path / "answers.sqlite3",
    )
    router = Router(config, tiers(ScriptedLocal(), config, ScriptedGates(before=True)))
    with serving(daemon_app(router), lifespan=True) as url:
        yield Daemon(url, cloud)


@pytest.mark.parametrize("reason", PRIVATE)
def test_the_next_turn_and_the_one_after_it_stay(daemon: Daemon, reason: str) -> None:
    response = daemon.turn(reason)
    for _ in range(2):
        response = daemon.respond(input="Go on.", previous_response_id=response["id"])
        assert response["updraft"]["tier"] == "local"
    assert daemon.cloud.requests == []


@pytest.mark.parametrize("reason", PRIVATE)
def test_a_conversation_stays_after_a_private_turn(daemon: Daemon, reason: str) -> None:
    conversation = httpx.post(f"{daemon.url}/v1/conversations", json={}).json()["id"]
    assert daemon.respond(input="Hello.", conversation=conversation)["updraft"]["tier"] == "cloud"
    daemon.turn(reason, conversation=conversation)
    assert daemon.respond(input="Go on.", conversation=conversation)["updraft"]["tier"] == "local"
    assert not daemon.leaks


@pytest.mark.parametrize("reason", PRIVATE)
def test_a_reference_to_a_private_item_stays(daemon: Daemon, reason: str) -> None:
    response = daemon.turn(reason)
    given = httpx.get(f"{daemon.url}/v1/responses/{response['id']}/input_items").json()["data"]
    for item in (*given, *response["output"]):
        referring = [{"type": "item_reference", "id": item["id"]}, {"role": "user", "content": "Go on."}]
        assert daemon.respond(input=referring)["updraft"]["tier"] == "local"
    assert daemon.cloud.requests == []


@pytest.mark.parametrize("reason", PRIVATE)
def test_a_private_item_that_the_caller_sends_again_stays(daemon: Daemon, reason: str) -> None:
    public = daemon.respond(input="Hello.")
    response = daemon.turn(reason)
    sent = len(daemon.cloud.requests)
    given = httpx.get(f"{daemon.url}/v1/responses/{response['id']}/input_items").json()["data"]
    for item in (*given, *response["output"]):
        again = [item, {"role": "user", "content": "Go on."}]
        assert daemon.respond(input=again)["updraft"]["tier"] == "local"
        daemon.post("/v1/responses", status=400, model="cloud", input=again)
        made, empty = (
            httpx.post(f"{daemon.url}/v1/conversations", json={"items": items}).json()["id"] for items in ([item], [])
        )
        httpx.post(f"{daemon.url}/v1/conversations/{empty}/items", json={"items": [item]})
        for conversation in (made, empty):
            assert daemon.respond(input="Go on.", conversation=conversation)["updraft"]["tier"] == "local"
    assert len(daemon.cloud.requests) == sent
    again = [*public["output"], {"role": "user", "content": "Go on."}]
    assert daemon.respond(input=again)["updraft"]["tier"] == "cloud"


@pytest.mark.parametrize("reason", PRIVATE)
def test_a_compaction_and_its_use_stay(daemon: Daemon, reason: str) -> None:
    response, body = daemon.turn(reason), PRIVATE[reason][0]
    of_stored = daemon.post("/v1/responses/compact", previous_response_id=response["id"])
    of_given = daemon.post("/v1/responses/compact", PRIVATE[reason][1], input=SECRET, **body)
    for compacted in (of_stored, of_given):
        again = daemon.post("/v1/responses/compact", input=compacted["output"])
        for output in (compacted["output"], again["output"]):
            response = daemon.respond(input=[*output, {"role": "user", "content": "Go on."}])
            assert response["updraft"]["tier"] == "local"
    assert daemon.cloud.requests == []


def test_a_request_that_compacts_a_private_part_stays(daemon: Daemon) -> None:
    history = [{"role": role, "content": text} for role, text in
               (("user", "Mail ann@example.com."), ("assistant", SECRET), ("user", "Go on."))]  # fmt: skip
    limit = [{"type": "compaction", "compact_threshold": 1}]
    response = daemon.respond(input=history, context_management=limit)
    assert (response["output"][0]["type"], response["updraft"]["tier"]) == ("compaction", "local")
    assert daemon.respond(input="More.", previous_response_id=response["id"])["updraft"]["tier"] == "local"
    assert daemon.cloud.requests == []


@pytest.mark.parametrize("reason", PRIVATE)
def test_a_background_response_stays_private_also_if_it_is_cancelled(daemon: Daemon, reason: str) -> None:
    done = daemon.ended(daemon.turn(reason, background=True))
    cancelled = daemon.turn(reason, background=True)
    httpx.post(f"{daemon.url}/v1/responses/{cancelled['id']}/cancel").raise_for_status()
    for response in (done, cancelled):
        assert daemon.respond(input="Go on.", previous_response_id=response["id"])["updraft"]["tier"] == "local"
    assert daemon.cloud.requests == []


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("reason", ["flag", "instructions", "user"])
def test_a_turn_of_a_socket_stays_and_unrelated_turns_do_not(daemon: Daemon, reason: str, generate: bool) -> None:
    with connect(f"{daemon.url.replace('http', 'ws')}/v1/responses") as socket:

        def create(**fields: Any) -> dict[str, Any]:
            socket.send(json.dumps({"type": "response.create", "model": "auto", "store": False, **fields}))
            while True:
                event = json.loads(socket.recv(timeout=60))
                if event["type"] in ("response.completed", "response.failed", "error"):
                    return event["response"]

        first = create(input=SECRET, generate=generate, **PRIVATE[reason][0])
        second = create(input="Go on.", previous_response_id=first["id"])
        assert second["updraft"]["tier"] == "local" and daemon.cloud.requests == []
        assert create(input="Hello.")["updraft"]["tier"] == "cloud"


def test_the_cloud_by_name_is_refused(daemon: Daemon) -> None:
    response = daemon.turn("flag")
    for model in ("cloud", "pocket-large"):
        for path in ("/v1/responses", "/v1/responses/compact"):
            fields = {"model": model, "input": "Go on.", "previous_response_id": response["id"]}
            assert daemon.post(path, status=400, **fields)["error"]["code"] == "private"
    assert daemon.cloud.requests == []


def test_a_cached_answer_is_marked(cloud: FakeCloud, tmp_path: Path) -> None:
    config = RouterConfig(
        local="pocket", cloud_url=cloud.url, cloud_model="pocket-large", privacy=Privacy(builtin=("email",)),
        store=tmp_path / "answers.sqlite3", cache=CacheSettings(max_mb=1),
    )  # fmt: skip
    router = Router(config, tiers(ScriptedLocal(), config, ScriptedGates(before=True)))
    with serving(daemon_app(router), lifespan=True) as url:
        daemon = Daemon(url, cloud)
        responses = [daemon.turn("instructions", temperature=0) for _ in range(2)]
        assert responses[1]["updraft"]["route"] == "cache"
        daemon.respond(input="Go on.", previous_response_id=responses[1]["id"])
    assert cloud.requests == []


def test_other_turns_still_use_the_cloud_also_from_an_older_store(daemon: Daemon, tmp_path: Path) -> None:
    first = daemon.respond(input="Hello.")
    assert daemon.respond(input="Go on.", previous_response_id=first["id"])["updraft"]["tier"] == "cloud"
    with sqlite3.connect(tmp_path / "answers.sqlite3") as database:
        database.execute("DROP INDEX answers_private")
        database.execute("ALTER TABLE answers DROP COLUMN private")
    store = AnswerStore(tmp_path / "answers.sqlite3", days=30, most=100)
    try:
        stored = store.get("", "response", first["id"])
    finally:
        store.close()
    assert stored.private is False and stored.body["id"] == first["id"]
