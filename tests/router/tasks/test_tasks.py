"""Tasks in use: a task moves to the device when its samples prove it, and only while they do."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from cascade_bench import Bench, run, text_of, updraft_of
from exposition import parse
from router_fakes import CLOUD_TEXT, FakeCloud, ScriptedGates, ScriptedLocal, tiers
from scripted_cloud import cloud_says
from updraft.protocol.http.wire import WireRequest
from updraft.router.accounting.prices import Prices
from updraft.router.config import CacheSettings, RouterConfig
from updraft.router.gates.exploration import ExplorationGates
from updraft.router.gates.gates import NoPolicyGates
from updraft.router.gates.rules import LatencyEstimates
from updraft.router.privacy.rules import Privacy
from updraft.router.router import Router
from updraft.router.tasks.report import TaskReport, stored_reports
from updraft.router.tasks.store import Pin, Sample, TaskStore

SYSTEM = {"role": "system", "content": "You greet people as the cloud does."}
ENOUGH = 50  # samples that license a task without errors for a quality of 0.9


class Tasks(Bench):
    """A router that learns tasks."""

    async def ask_task(self, number: int = 1, **fields: Any) -> list[dict[str, Any]]:
        """Ask in the task `number` times, each time after the last shadow, and return the `updraft` objects."""
        infos: list[dict[str, Any]] = []
        for _ in range(number):
            messages = [SYSTEM, {"role": "user", "content": f"hello {uuid4()}"}]
            infos.append((await self.answer(**{"messages": messages, **fields}))["updraft"])
            await self.learned()
        return infos

    async def learned(self) -> None:
        while shadows := self.router._learning.shadows:
            await asyncio.wait(shadows)

    async def catch_up(self) -> None:
        book = self.router._learning.tasks
        assert book is not None
        await book.refresh()

    @property
    def store(self) -> closing[TaskStore]:
        return closing(TaskStore(self.ledger.with_name("tasks.sqlite3")))

    def samples(self) -> list[Sample]:
        with self.store as store:
            return [sample for task in store.tasks() for sample in store.samples(task.id, store.newest_pair())]

    def report(self) -> TaskReport:
        with self.store as store:
            (report,) = stored_reports(store, 0.9, {})
        return report


@asynccontextmanager
async def learning(
    cloud: FakeCloud, folder: Path, text: str = CLOUD_TEXT, gates: ScriptedGates | None = None, **settings: Any
) -> AsyncIterator[Tasks]:
    config = RouterConfig(
        **{
            "cloud_url": cloud.url,
            "cloud_model": "pocket-large",
            "ledger": folder / "ledger.sqlite3",
            "learn": folder / "tasks.sqlite3",
            "quality": 0.9,
            "prices": Prices(cloud_input=0.5, cloud_output=1.5),
        }
        | settings
    )
    local = ScriptedLocal(text)
    router = Router(config, tiers(local, config, ExplorationGates(gates or NoPolicyGates())))
    random.seed(1)
    try:
        await router.start()
        yield Tasks(router, local, folder / "ledger.sqlite3")
    finally:
        await router.close()
        assert local.running == 0


def test_a_task_without_errors_moves_to_the_device(cloud: FakeCloud, tmp_path: Path) -> None:
    async def check() -> None:
        async with learning(cloud, tmp_path) as tasks:
            first, *_, last = await tasks.ask_task(ENOUGH)
            assert first["tier"] == "cloud" and "has no licence for the device yet" in first["reason"]
            later = await tasks.ask_task(50)
            local = [info for info in later if info["tier"] == "local"]
            assert len(local) > 35 and all("within the licence of task" in info["reason"] for info in local)
            sampled = [info for info in later if info["tier"] == "cloud"]
            assert all("keeps proving its licence" in info["reason"] for info in sampled)
            assert len({info["task"] for info in (first, last, *later)}) == 1
            rows = tasks.rows()
            assert {row.task for row in rows} == {first["task"]} and len(rows) == ENOUGH + 50
            report = tasks.report()
            assert (report.tier, report.missing, report.local_score, report.cloud_score) == ("device", 0, 1, 1)
            assert report.samples == report.graded == len(cloud.requests)
            metrics = parse(tasks.router.metrics())
            (licensed,) = metrics["updraft_tasks_licensed"].samples.values()
            (graded,) = metrics["updraft_tasks_graded_total"].samples.values()
            assert (licensed, graded) == (1, report.samples)
        async with learning(cloud, tmp_path) as tasks:  # the licence follows from the file
            (info,) = await tasks.ask_task()
            assert info["tier"] == "local" or "keeps proving" in info["reason"]

    run(check())


def test_a_task_with_wrong_answers_stays_in_the_cloud(cloud: FakeCloud, tmp_path: Path) -> None:
    async def check() -> None:
        async with learning(cloud, tmp_path, "something else") as tasks:
            infos = await tasks.ask_task(ENOUGH)
            assert {info["tier"] for info in infos} == {"cloud"}
            report = tasks.report()
            assert (report.tier, report.missing, report.local_score) == ("cloud", None, 0)

    run(check())


def test_a_task_that_turns_bad_returns_to_the_cloud(cloud: FakeCloud, tmp_path: Path) -> None:
    async def check() -> None:
        async with learning(cloud, tmp_path, exploration=0.5) as tasks:
            await tasks.ask_task(ENOUGH)
            tasks.local.text = "something else"
            later = await tasks.ask_task(40)
            assert [info["tier"] for info in later[-8:]] == ["cloud"] * 8
            assert tasks.report().revocations == 1

    run(check())


def test_the_caller_waits_for_no_shadow(cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("updraft.router.learning.CLOSE_S", 0.0)

    async def check() -> None:
        async with learning(cloud, tmp_path) as tasks:
            tasks.local.hangs_at = 0
            answer = await tasks.answer(messages=[SYSTEM, {"role": "user", "content": "hi"}])
            assert answer["choices"][0]["message"]["content"] == CLOUD_TEXT
            assert tasks.samples() == []  # the row waits for its grade
        monkeypatch.setattr("updraft.router.tasks.store.GRADED_WITHIN_S", 0.0)
        (sample,) = tasks.samples()  # a shadow that was stopped counts against the device
        assert (sample.grader, sample.row.local, sample.row.cloud) == ("", 0.0, 1.0)

    run(check())


def test_streams_teach_and_a_licence_judges_whole_streams(cloud: FakeCloud, tmp_path: Path) -> None:
    async def check() -> None:
        async with learning(cloud, tmp_path, hold_tokens=1, cloud_continues=True) as tasks:
            _, events, done = await tasks.stream(messages=[SYSTEM, {"role": "user", "content": "hi"}])
            assert done and text_of(events) == CLOUD_TEXT and updraft_of(events)["tier"] == "cloud"
            await tasks.learned()
            (sample,) = tasks.samples()
            assert (sample.local, sample.cloud, sample.grader, sample.fault) == (1, 1, "agreement", "")
            await tasks.ask_task(ENOUGH)
            tasks.local.text = ""  # an empty answer is a visible fault
            for _ in range(20):
                _, events, _ = await tasks.stream(messages=[SYSTEM, {"role": "user", "content": f"hi {uuid4()}"}])
                assert text_of(events) == CLOUD_TEXT
                await tasks.learned()
            reasons = {row.reason for row in tasks.rows()[:20] if row.gate == 3}
            assert reasons == {"the device gave an empty answer"}

    run(check())


@pytest.mark.parametrize("mode", ["500", "cut"])
def test_a_failed_cloud_leaves_no_sample(cloud: FakeCloud, tmp_path: Path, mode: str, short_waits: None) -> None:
    async def check() -> None:
        async with learning(cloud, tmp_path, fallback="any") as tasks:
            cloud.mode = mode
            if mode == "500":
                (info,) = await tasks.ask_task()
                assert info["route"] == "fallback"
            else:
                await tasks.stream(messages=[SYSTEM, {"role": "user", "content": "hi"}])
            await tasks.learned()
            await tasks.catch_up()
            with tasks.store as store:
                assert store.newest_pair() == ""

    run(check())


def test_what_is_no_free_choice_is_not_sampled(cloud: FakeCloud, tmp_path: Path) -> None:
    async def check() -> None:
        async with learning(cloud, tmp_path, privacy=Privacy(builtin=("email",))) as tasks:
            requests: list[dict[str, Any]] = [
                {"messages": [SYSTEM, {"role": "user", "content": "to ada@example.org"}]},
                {"messages": [{"role": "user", "content": "nothing tells the task"}]},
                {"updraft": {"private": True}},
                {"model": "local"},
                {"model": "cloud"},
                {"updraft": {"confidence": 0.5}},
                {"n": 2},
            ]
            for fields in requests:
                answer = await tasks.answer(**fields)
                assert "task" not in answer["updraft"], fields
            with tasks.store as store:
                assert store.tasks() == []

    run(check())


def test_a_policy_decides_until_the_task_is_licensed(cloud: FakeCloud, tmp_path: Path) -> None:
    async def check() -> None:
        async with learning(cloud, tmp_path, "something else", ScriptedGates(), exploration=0.2) as tasks:
            infos = await tasks.ask_task(60)
            sampled = [info["tier"] for info in infos if "both tiers answer" in info["reason"]]
            assert 2 <= len(sampled) <= 25 and set(sampled) == {"cloud"}
            assert {info["tier"] for info in infos if "both tiers answer" not in info["reason"]} == {"local"}

    run(check())


def test_pins_merges_and_grades_by_another_process(cloud: FakeCloud, tmp_path: Path) -> None:
    async def check() -> None:
        async with learning(cloud, tmp_path, "something else") as tasks:
            (info,) = await tasks.ask_task(metadata={"task": "greetings"})
            pins: list[tuple[Pin, str, str]] = [
                ("local", "local", "is pinned to the device"),
                ("cloud", "cloud", "is pinned to the cloud"),
                ("auto", "cloud", "no licence"),
            ]
            for pin, tier, reason in pins:
                with tasks.store as store:
                    store.set_pin(store.task("greetings").id, pin)
                await tasks.catch_up()
                (info,) = await tasks.ask_task(metadata={"task": "greetings"})
                assert info["tier"] == tier and reason in info["reason"]
            await tasks.ask_task(ENOUGH - 3, metadata={"task": "greetings"})
            with tasks.store as store:
                task = store.task("greetings")
                for sample in store.samples(task.id, store.newest_pair()):
                    store.correct(sample.request, 1.0, 1.0)
            await tasks.catch_up()
            assert "local" in {info["tier"] for info in await tasks.ask_task(5, metadata={"task": "greetings"})}
            (other,) = await tasks.ask_task(metadata={"task": "salutations"})
            assert other["task"] != info["task"]
            with tasks.store as store:
                store.join(store.task("salutations").id, store.task("greetings").id)
            await tasks.catch_up()
            (joined,) = await tasks.ask_task(metadata={"task": "salutations"})
            assert joined["task"] == info["task"]
            with tasks.store as store:
                store.forget(task.id)
            await tasks.catch_up()
            (info,) = await tasks.ask_task(metadata={"task": "greetings"})
            assert "no licence" in info["reason"]

    run(check())


def test_a_short_script_teaches_its_task(cloud: FakeCloud, tmp_path: Path) -> None:
    async def check() -> None:
        async with learning(cloud, tmp_path) as tasks:
            tasks.local.delay_s = 0.05
            await tasks.answer(messages=[SYSTEM, {"role": "user", "content": "hi"}])
        (sample,) = tasks.samples()
        assert sample.local == 1

    run(check())


def test_the_api_lists_and_pins_tasks(cloud: FakeCloud, tmp_path: Path) -> None:
    async def call(tasks: Tasks, method: str, path: str, **fields: Any) -> tuple[int, Any]:
        response = await tasks.handle(WireRequest(method, path, body=json.dumps(fields).encode()))
        assert isinstance(response.body, bytes)
        return response.status, json.loads(response.body)

    async def check() -> None:
        async with learning(cloud, tmp_path) as tasks:
            (info,) = await tasks.ask_task(metadata={"task": "greetings"})
            status, told = await call(tasks, "GET", "/updraft/tasks")
            (task,) = told["tasks"]
            assert (status, told["learns"], told["quality"]) == (200, True, 0.9)
            assert (task["label"], task["samples"], task["requests"], task["tier"]) == ("greetings", 1, 1, "cloud")
            status, told = await call(tasks, "POST", f"/updraft/tasks/{info['task']}", pin="local")
            assert status == 200 and told["tasks"][0]["tier"] == "device"
            (info,) = await tasks.ask_task(metadata={"task": "greetings"})
            assert info["tier"] == "local"
            assert (await call(tasks, "POST", "/updraft/tasks/unknown", pin="local"))[0] == 404
            assert (await call(tasks, "POST", f"/updraft/tasks/{info['task']}", pin="moon"))[0] == 400
        async with learning(cloud, tmp_path, learn=None, quality=None) as tasks:
            assert await call(tasks, "GET", "/updraft/tasks") == (200, {"learns": False, "quality": 0.95, "tasks": []})
            assert (await call(tasks, "POST", "/updraft/tasks/greetings", pin="local"))[0] == 404

    run(check())


def test_texts_are_stored_only_if_asked_for(cloud: FakeCloud, tmp_path: Path) -> None:
    async def check(folder: Path, *, keep: bool) -> None:
        async with learning(cloud, folder, experience_text=keep) as tasks:
            await tasks.ask_task()
        with tasks.store as store:
            (task,) = store.tasks()
            assert (task.label == SYSTEM["content"]) == keep

    for keep in (False, True):
        folder = tmp_path / str(keep)
        folder.mkdir()
        run(check(folder, keep=keep))
        raw = b"".join(path.read_bytes() for path in folder.glob("tasks.sqlite3*"))
        assert (b"greet people" in raw) == keep and b"hello" not in raw


def test_shadows_beyond_the_waiting_limit_are_not_sampled(
    cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("updraft.router.learning.CLOSE_S", 0.0)

    async def check() -> None:
        async with learning(cloud, tmp_path) as tasks:
            tasks.local.hangs_at = 0
            monkeypatch.setattr("updraft.router.tasks.book.MAX_WAITING", 8)
            asked = [[SYSTEM, {"role": "user", "content": f"hi {at}"}] for at in range(12)]
            answers = [await tasks.answer(messages=messages) for messages in asked]
            sampled = ["both tiers answer" in answer["updraft"]["reason"] for answer in answers]
            assert sampled == [True] * 8 + [False] * 4

    run(check())


def test_invented_names_are_bounded(cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("updraft.router.tasks.book.MAX_TASKS", 3)

    async def check() -> None:
        async with learning(cloud, tmp_path) as tasks:
            infos = [(await tasks.ask_task(metadata={"task": f"invented {at}"}))[0] for at in range(5)]
            assert ["both tiers answer" in info["reason"] for info in infos] == [True] * 3 + [False] * 2
            with tasks.store as store:
                assert len(store.tasks()) == 3

    run(check())


def test_a_licence_needs_time_to_judge(cloud: FakeCloud, tmp_path: Path) -> None:
    async def check() -> None:
        async with learning(cloud, tmp_path) as tasks:
            await tasks.ask_task(ENOUGH)
            assert "local" in {info["tier"] for info in await tasks.ask_task(5)}
            tasks.router._latency = LatencyEstimates()
            tasks.router._latency.observe("local", 60.0)
            tasks.router._latency.observe("cloud", 40.0)
            assert {info["tier"] for info in await tasks.ask_task(5, timeout_s=80.0)} == {"cloud"}

    run(check())


def test_a_request_that_is_sent_again_counts_once(cloud: FakeCloud, tmp_path: Path) -> None:
    """And its answer comes from the cache, if there is one."""

    async def check() -> None:
        async with learning(cloud, tmp_path, cache=CacheSettings(max_mb=1)) as tasks:
            asked = {"messages": [SYSTEM, {"role": "user", "content": "hi"}], "temperature": 0}
            infos = [(await tasks.ask_task(**asked))[0] for _ in range(4)]
            assert [info["route"] for info in infos] == ["cloud", "cloud", "cache", "cache"]
            assert len(tasks.samples()) == 1

    run(check())


def test_refusals_of_the_cloud_prove_nothing(cloud: FakeCloud, tmp_path: Path) -> None:
    async def check() -> None:
        async with learning(cloud, tmp_path) as tasks:
            cloud_says(cloud, {"role": "assistant", "content": "I'm sorry, but I cannot help with that."})
            infos = await tasks.ask_task(20)
            assert {info["tier"] for info in infos} == {"cloud"}
            assert {(sample.local, sample.grader) for sample in tasks.samples()} == {(None, "none")}
            cloud.says = None

    run(check())


def test_a_name_that_is_another_tasks_id_confuses_nothing(cloud: FakeCloud, tmp_path: Path) -> None:
    async def check() -> None:
        async with learning(cloud, tmp_path) as tasks:
            (info,) = await tasks.ask_task(metadata={"task": "greetings"})
            await tasks.ask_task(metadata={"task": info["task"]})
            await tasks.ask_task(2, metadata={"task": "greetings"})
            with tasks.store as store:
                assert store.task(info["task"]).name == "greetings"
                assert len(store.samples(info["task"], store.newest_pair())) == 3

    run(check())


def test_a_pin_precedes_the_conversation(cloud: FakeCloud, tmp_path: Path) -> None:
    async def check() -> None:
        async with learning(cloud, tmp_path) as tasks:
            first = [SYSTEM, {"role": "user", "content": "hi"}]
            (info,) = await tasks.ask_task(messages=first)
            book = tasks.router._learning.tasks
            assert book is not None
            await book.pin(info["task"], "local")
            more = [*first, {"role": "assistant", "content": CLOUD_TEXT}, {"role": "user", "content": "and?"}]
            (info,) = await tasks.ask_task(messages=more)
            assert info["tier"] == "local"

    run(check())


def test_a_new_target_applies_at_once(cloud: FakeCloud, tmp_path: Path) -> None:
    async def check() -> None:
        async with learning(cloud, tmp_path) as tasks:
            await tasks.ask_task(ENOUGH)
            assert "local" in {info["tier"] for info in await tasks.ask_task(5)}
            await tasks.router.reconfigure(replace(tasks.router.config, quality=0.99))
            assert {info["tier"] for info in await tasks.ask_task(5)} == {"cloud"}
            book = tasks.router._learning.tasks
            assert book is not None and book.rules.quality == 0.99

    run(check())


def test_an_odd_chunk_harms_no_stream(cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("delta")

    async def check() -> None:
        async with learning(cloud, tmp_path) as tasks:
            monkeypatch.setattr("updraft.router.learning.joined", broken)
            _, events, done = await tasks.stream(messages=[SYSTEM, {"role": "user", "content": "hi"}])
            assert done and text_of(events) == CLOUD_TEXT
            await tasks.learned()
        assert tasks.samples() == []

    run(check())


def test_a_preview_counts_nothing(cloud: FakeCloud, tmp_path: Path) -> None:
    async def check() -> None:
        async with learning(cloud, tmp_path) as tasks:
            request = {"model": "auto", "messages": [SYSTEM, {"role": "user", "content": "hello"}]}
            record, _ = await tasks.router.preview(WireRequest("POST", "/x", body=json.dumps(request).encode()))
            assert record.task
            with tasks.store as store:
                assert store.tasks() == []

    run(check())


def test_faulty_answers_are_noted(cloud: FakeCloud, tmp_path: Path) -> None:
    async def check() -> None:
        async with learning(cloud, tmp_path, "I'm sorry, I cannot help with that.") as tasks:
            await tasks.ask_task()
            tasks.local.too_long = True
            await tasks.ask_task()
            refused, failed = tasks.samples()
            assert refused.fault == "the device refused to answer" and (refused.local, refused.cloud) == (0, 1)
            assert failed.fault.startswith("the device failed: The prompt has 9000 tokens")
            assert failed.row.request.is_faulty

    run(check())
