"""Learning in use: labels of escalations, exploration, shadow and alarm, through the real router and over sockets."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exposition import parse
from router_fakes import CLOUD_TEXT, LOCAL_TEXT, FakeCloud, ScriptedGates, ScriptedLocal, tiers
from updraft.classifier.calibration.drift import DriftMonitor
from updraft.classifier.grading.agreement import ComparableAnswer
from updraft.classifier.online.experience import ExperienceStore, Observation
from updraft.classifier.policy.folders import policy_folder_of
from updraft.embedded.pocket import policy_folder as pocket_policy_folder
from updraft.protocol.http.wire import WireRequest
from updraft.protocol.requests import Message
from updraft.router.accounting.prices import Prices
from updraft.router.accounting.request_record import RequestRecord
from updraft.router.config import CacheSettings, CloudTierConfig, RouterConfig
from updraft.router.factory import load_learning_gates
from updraft.router.feedback.collector import MAX_WAITING, ExperienceCollector, JudgedRequest, LearningCounts
from updraft.router.gates.exploration import ExplorationGates
from updraft.router.gates.gates import GateDecision
from updraft.router.router import Router
from updraft.router.tiers.interfaces import LocalAnswer
from updraft.text.tool_calls import ToolSyntax
from updraft.text.tool_formats import ToolFormat

ASKED = [Message("user", "What is 2 + 2?")]
PAIR = "scripted with large"


def routed(
    cloud: FakeCloud,
    tmp_path: Path,
    gates: Any,
    n: int = 1,
    *,
    local: ScriptedLocal | None = None,
    asks: dict[str, Any] | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """The `updraft` objects of `n` requests through a router with experience. `asks`: what else is in their bodies."""

    async def run() -> list[dict[str, Any]]:
        config = RouterConfig(
            **{"cloud_url": cloud.url, "cloud_model": "large", "experience": tmp_path / "experience.sqlite3"} | settings
        )
        device = local or ScriptedLocal()
        device.model_id = "scripted"
        router = Router(config, tiers(device, config, gates))
        await router.start()
        replies: list[dict[str, Any]] = []
        try:
            for index in range(n):
                question = {"role": "user", "content": f"Question {index}: 2 + 2?"}
                body = {"model": "auto", "messages": [question], **(asks or {})}
                response = await router.chat(
                    WireRequest("POST", "/v1/chat/completions", body=json.dumps(body).encode())
                )
                if isinstance(response.body, bytes):
                    replies.append(json.loads(response.body)["updraft"])
                    continue
                events = b"".join([chunk async for chunk in response.body]).split(b"\n\n")
                replies += [json.loads(each[6:])["updraft"] for each in events if b'"updraft"' in each]
        finally:
            await router.close()
        return replies

    return asyncio.run(run())


def kept(tmp_path: Path) -> list[Observation]:
    experience = ExperienceStore(tmp_path / "experience.sqlite3")
    try:
        return experience.rows(PAIR)
    finally:
        experience.close()


def test_an_escalation_is_a_label_without_text(cloud: FakeCloud, tmp_path: Path) -> None:
    gates = ExplorationGates(ScriptedGates(after=True))
    (info,) = routed(cloud, tmp_path, gates)
    assert info["tier"] == "cloud"
    (row,) = kept(tmp_path)
    assert row.id == info["request_id"]
    assert (row.local, row.cloud, row.propensity, row.explored) == (0, 1, 1, 0), f"{LOCAL_TEXT!r} is not {CLOUD_TEXT!r}"
    assert (row.messages, row.answer) == (None, None)
    assert row.question
    raw = (tmp_path / "experience.sqlite3").read_bytes()
    wal = tmp_path / "experience.sqlite3-wal"
    raw += wal.read_bytes() if wal.exists() else b""
    assert b"Question" not in raw and b"two three" not in raw


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ADDS = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SAID = {"role": "assistant", "content": "It is 3."}


def calling(arguments: str) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("local", "message", "graded"),
    [
        (CALL, calling('{"b":2,"a":1}'), (1, 1)),
        (CALL, calling('{"a": 1, "b": 3}'), (0, 1)),
        ("It is 3.", calling('{"a": 1, "b": 2}'), (0, 1)),
        (CALL, SAID, (0, 1)),
        ("So it is 3.", SAID, (1, 1)),
        (CALL, {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "custom"}]}, None),
        (CALL, {"role": "assistant", "content": None, "audio": {"id": "1"}}, None),
    ],
)
def test_tool_calls_are_compared_by_function_and_arguments(
    cloud: FakeCloud, tmp_path: Path, local: str, message: dict[str, Any], graded: tuple[float, float] | None
) -> None:
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    cloud.says = (200, json.dumps({"choices": [choice]}).encode())
    device = ScriptedLocal(local)
    device.tool_format = ToolFormat("hermes", ToolSyntax("<tool_call>", "</tool_call>"), {})
    (info,) = routed(cloud, tmp_path, ExplorationGates(ScriptedGates(after=True)), local=device, asks={"tools": [ADDS]})
    assert info["tier"] == "cloud"
    (row,) = kept(tmp_path)
    assert row.pair_grades == graded


def test_a_whole_answer_of_another_form_has_no_grade_whatever_became_of_the_draft(
    cloud: FakeCloud, tmp_path: Path
) -> None:
    """The share of the draft that was taken over stands in for a stream, whose text is not kept."""
    message = {"role": "assistant", "content": [{"type": "text", "text": "4"}]}
    details = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 5}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4, "completion_tokens_details": details}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    cloud.says = (200, json.dumps({"choices": [choice], "usage": usage}).encode())
    (info,) = routed(cloud, tmp_path, ExplorationGates(ScriptedGates(after=True)))
    assert info["tier"] == "cloud"
    (row,) = kept(tmp_path)
    assert (row.pair_grades, row.accepted) == (None, 0.0)


class SlowDisk(ExperienceStore):
    """Experience that is kept when `spins` is set, and not before."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.spins = threading.Event()

    def add(self, *observations: Observation, busy_s: float = 5.0) -> None:
        assert self.spins.wait(30)
        super().add(*observations, busy_s=busy_s)


def judged(text: str = "4") -> JudgedRequest:
    """A local answer that gate 3 let stay."""
    record = RequestRecord(Prices(), "large")
    record.decide(GateDecision(3, escalate=False, reason="stays", p_gain=0.1, propensity=1.0))
    return JudgedRequest(record, ASKED, LocalAnswer(text=text, finish_reason="stop"))


def test_excess_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path / "experience.sqlite3")
    learner = ExperienceCollector(disk, PAIR, explored=1.0)
    try:
        for _ in range(MAX_WAITING + 3):
            learner.observe(judged())
        assert learner.counts == LearningCounts(waiting=MAX_WAITING, dropped=3)
    finally:
        disk.spins.set()
        asyncio.run(learner.close())
    assert learner.counts == LearningCounts(kept=MAX_WAITING, dropped=3)
    assert len(kept(tmp_path)) == MAX_WAITING


@pytest.mark.parametrize(("held_s", "counts"), [(60, LearningCounts(failed=12)), (0.3, LearningCounts(kept=12))])
def test_a_stop_waits_once_for_who_holds_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_s: float, counts: LearningCounts
) -> None:
    monkeypatch.setattr("updraft.router.feedback.collector.BUSY_S", 1.0 if counts.failed else 60.0)
    learner = ExperienceCollector(ExperienceStore(tmp_path / "experience.sqlite3"), PAIR)

    async def stop(other: sqlite3.Connection) -> tuple[float, int]:
        for _ in range(12):
            learner.observe(judged())
        looked, started = 0, time.monotonic()
        closed = asyncio.create_task(learner.close())
        while not closed.done():
            await asyncio.sleep(0.01)
            looked += 1
            if time.monotonic() - started > held_s and other.in_transaction:
                other.execute("COMMIT")
        await closed
        return time.monotonic() - started, looked

    with closing(sqlite3.connect(tmp_path / "experience.sqlite3", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        took_s, looked = asyncio.run(stop(other))
    assert learner.counts == counts
    assert took_s < 10, "one deadline for all of them"
    assert looked > 10, "the event loop is free"


def test_an_answer_that_cannot_be_kept_costs_no_other(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path / "experience.sqlite3")
    learner = ExperienceCollector(disk, PAIR, keep_text=True)
    for text in ("4", "\ud800 is no character", "5"):
        learner.observe(judged(text))
    disk.spins.set()
    asyncio.run(learner.close())
    assert learner.counts == LearningCounts(kept=2, failed=1)
    assert {row.answer for row in kept(tmp_path)} == {"4", "5"}


def test_a_disk_that_fails_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cloud: FakeCloud) -> None:
    def full(_: ExperienceStore, *__: Observation, busy_s: float) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(ExperienceStore, "add", full)
    snapshots: list[LearningCounts] = []
    close = ExperienceCollector.close

    async def closing(learner: ExperienceCollector) -> None:
        await close(learner)
        snapshots.append(learner.counts)

    monkeypatch.setattr(ExperienceCollector, "close", closing)
    (info,) = routed(cloud, tmp_path, ExplorationGates(ScriptedGates()))
    assert info["tier"] == "local", "the answer does not suffer"
    assert snapshots == [LearningCounts(failed=1)]


def test_the_counts_are_metrics(cloud: FakeCloud, tmp_path: Path) -> None:
    async def run() -> dict[str, float]:
        config = RouterConfig(
            local="pocket", cloud_url=cloud.url, cloud_model="large", experience=tmp_path / "e.sqlite3"
        )
        router = Router(config, tiers(ScriptedLocal(), config, ExplorationGates(ScriptedGates())))
        await router.start()
        try:
            body = json.dumps({"model": "auto", "messages": [{"role": "user", "content": "2 + 2?"}]}).encode()
            assert (await router.chat(WireRequest("POST", "/v1/chat/completions", body=body))).status == 200
            while True:
                families = parse(router.metrics())
                counts = {name: family.samples[name, ""] for name, family in families.items()}
                if counts["updraft_learning_waiting"] == 0:
                    return counts
                await asyncio.sleep(0.01)
        finally:
            await router.close()

    counts = asyncio.run(asyncio.wait_for(run(), 30))
    assert counts == {
        "updraft_learning_waiting": 0,
        "updraft_learning_kept_total": 1,
        "updraft_learning_dropped_total": 0,
        "updraft_learning_failed_total": 0,
    }


def test_a_middle_cloud_teaches_nothing_about_the_pair(cloud: FakeCloud, tmp_path: Path) -> None:
    gates = ExplorationGates(ScriptedGates(after=True))
    (info,) = routed(cloud, tmp_path, gates, middle_tiers=(CloudTierConfig(cloud.url, "medium"),))
    assert info["tier"] == "cloud"
    assert kept(tmp_path) == []


def test_invalid_file_stops_learning_only(cloud: FakeCloud, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "experience.sqlite3"
    path.write_bytes(b"garbage-garbage" * 100)
    replies = routed(cloud, tmp_path, ExplorationGates(ScriptedGates(after=True)), 3)
    assert [info["tier"] for info in replies] == ["cloud"] * 3
    (warnings,) = [record.getMessage() for record in caplog.records if record.name == "updraft.router"]
    assert warnings.startswith("no experience is stored") and str(path) in warnings and "move this one" in warnings
    assert path.read_bytes() == b"garbage-garbage" * 100


def test_text_is_kept_where_the_user_asks_for_it(cloud: FakeCloud, tmp_path: Path) -> None:
    routed(cloud, tmp_path, ExplorationGates(ScriptedGates()), experience_text=True)
    (row,) = kept(tmp_path)
    assert '"Question 0: 2 + 2?"' in (row.messages or "")
    assert row.answer == LOCAL_TEXT
    assert row.grades is None, "what stays local has no label"


def test_early_escalations_are_not_learned(cloud: FakeCloud, tmp_path: Path) -> None:
    routed(cloud, tmp_path, ExplorationGates(ScriptedGates(before=True)))
    routed(cloud, tmp_path, ExplorationGates(ScriptedGates(during_at=2)))
    assert kept(tmp_path) == []


def test_exploration_sends_its_share_up_and_says_so(cloud: FakeCloud, tmp_path: Path) -> None:
    gates = ExplorationGates(ScriptedGates(), exploration=0.25, rng=random.Random(3))
    rng = random.Random(3)
    replies = routed(cloud, tmp_path, gates, 40, exploration=0.25)
    explored = [info for info in replies if info["tier"] == "cloud"]
    assert [info in explored for info in replies] == [rng.random() < 0.25 for _ in replies]
    assert 4 <= len(explored) <= 18
    assert all(info["reason"] == "exploration: would answer on the device, gate 3" for info in explored)
    rows = kept(tmp_path)
    assert len(rows) == 40
    assert {row.propensity for row in rows} == {0.25}
    assert sum(row.grades is not None for row in rows) == len(explored)
    assert {row.id for row in rows if row.sampled} == {info["request_id"] for info in explored}


def test_random_escalations_are_not_repeated(cloud: FakeCloud, tmp_path: Path) -> None:
    gates = ExplorationGates(ScriptedGates(), exploration=0.25, rng=random.Random(1))  # draws the first, not the second
    same = {"messages": [{"role": "user", "content": "2 + 2?"}], "temperature": 0}
    replies = routed(cloud, tmp_path, gates, 4, exploration=0.25, cache=CacheSettings(max_mb=1), asks=same)
    assert [info["route"] for info in replies] == ["escalated", "local", "cache", "cache"]


@pytest.mark.parametrize("early", [{"before": True}, {"during_at": 2}, {"before": True, "during_at": 2}])
def test_exploration_sees_what_gates_1_and_2_send_up(cloud: FakeCloud, tmp_path: Path, early: dict[str, Any]) -> None:
    gates = ExplorationGates(ScriptedGates(**early), exploration=0.25, rng=random.Random(3))
    rng = random.Random(3)
    replies = routed(cloud, tmp_path, gates, 40, exploration=0.25)
    explored = [info for info in replies if info["reason"] == "exploration: would escalate, gate 3"]
    assert [info in explored for info in replies] == [rng.random() < 0.25 for _ in replies]
    assert {info["tier"] for info in replies} == {"cloud"}, "who asks loses no quality by it"
    rows = kept(tmp_path)
    assert {row.id for row in rows} == {info["request_id"] for info in explored}
    assert {(row.local, row.cloud, row.propensity, row.explored, row.sampled) for row in rows} == {
        (0, 1, 0.25, 0.25, 1)
    }


def test_the_draw_knows_nothing_of_the_request(cloud: FakeCloud, tmp_path: Path) -> None:
    """An escalation by gate 3 alone is a label like any other, and part of the sample only by the same chance."""
    gates = ExplorationGates(ScriptedGates(after=True), exploration=0.25, rng=random.Random(3))
    routed(cloud, tmp_path, gates, 40, exploration=0.25)
    rng = random.Random(3)
    rows = sorted(kept(tmp_path), key=lambda row: row.at)
    assert [row.sampled == 1 for row in rows] == [rng.random() < 0.25 for _ in range(40)]
    assert {row.propensity for row in rows} == {1}


@pytest.mark.parametrize(
    "unlearned",
    [
        {"middle_tiers": True},  # what goes to a smaller cloud is no label
        {"hold_tokens": 1, "cloud_continues": True, "asks": {"stream": True}},  # what is streamed before does not go up
    ],
)
def test_randomly_graded_rows_have_the_coins_probability(
    cloud: FakeCloud, tmp_path: Path, unlearned: dict[str, Any]
) -> None:
    medium = (CloudTierConfig(cloud.url, "medium"),)
    settings = {**unlearned, **({"middle_tiers": medium} if "middle_tiers" in unlearned else {})}
    gates = ExplorationGates(ScriptedGates(after=True), exploration=0.25, rng=random.Random(3))
    routed(cloud, tmp_path, gates, 40, exploration=0.25, **settings)
    rng = random.Random(3)
    rows = [row for row in kept(tmp_path) if row.grades is not None]
    assert len(rows) == sum(rng.random() < 0.25 for _ in range(40)) > 3
    assert {(row.sampled, row.propensity) for row in rows} == {(1, 0.25)}


@pytest.mark.parametrize(
    "learned",
    [
        {"middle_tiers": True},  # gate 3 is surer than what the smaller cloud is asked for
        {"hold_tokens": 7, "cloud_continues": True, "asks": {"stream": True}},  # the answer was at its end before
        {
            "hold_tokens": 1,
            "cloud_continues": True,
            "asks": {"stream": True, "response_format": {"type": "json_object"}},
            "local": ScriptedLocal('{"sum": 4}'),
        },  # it is held
    ],
)
def test_rows_graded_by_gate_3_have_probability_one(cloud: FakeCloud, tmp_path: Path, learned: dict[str, Any]) -> None:
    medium = (CloudTierConfig(cloud.url, "medium", skip_above=0.5),)
    settings = {**learned, **({"middle_tiers": medium} if "middle_tiers" in learned else {})}
    gates = ExplorationGates(ScriptedGates(after=True), exploration=0.25, rng=random.Random(3))
    routed(cloud, tmp_path, gates, 40, exploration=0.25, **settings)
    assert {(row.sampled, row.propensity) for row in kept(tmp_path)} == {(0, 1), (1, 1)}


@pytest.mark.parametrize("damaged", [False, True])
def test_nothing_is_explored_where_nothing_is_kept(
    cloud: FakeCloud, tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: bool
) -> None:
    path = tmp_path / "experience.sqlite3"
    path.write_bytes(b"garbage-garbage" * 100)
    settings: dict[str, Any] = {} if damaged else {"experience": None}
    replies = routed(
        cloud, tmp_path, ExplorationGates(ScriptedGates(), exploration=1.0), 2, exploration=1.0, **settings
    )
    assert [info["reason"] for info in replies] == ["gate 3"] * 2
    assert cloud.requests == []
    warnings = [record.getMessage() for record in caplog.records if record.name == "updraft.router"]
    assert warnings[-1].startswith("exploration is off, because no experience is stored")
    assert len(warnings) == 1 + damaged
    (info,) = routed(cloud, tmp_path, ExplorationGates(ScriptedGates(), shadow=True), shadow=True, **settings)
    shadowed = ("cloud", "shadow: would answer on the device, gate 3")
    assert (info["tier"], info["reason"]) == shadowed, "a shadow looks on all the same"


def test_drawn_requests_skip_races_and_middle_tiers(cloud: FakeCloud, tmp_path: Path) -> None:
    gates = ExplorationGates(ScriptedGates(), exploration=1.0)
    slow = ScriptedLocal(delay_s=0.02)
    replies = routed(
        cloud,
        tmp_path,
        gates,
        3,
        local=slow,
        exploration=1.0,
        race_above=0.0,
        middle_tiers=(CloudTierConfig(cloud.url, "medium"),),
    )
    assert [row.sampled for row in kept(tmp_path)] == [1, 1, 1]
    assert {info["route"] for info in replies} == {"escalated"}
    assert {body["model"] for body in cloud.requests} == {"large"}
    assert len(cloud.requests) == 3


def test_a_shadow_decides_and_does_not_act(cloud: FakeCloud, tmp_path: Path) -> None:
    for gates, reason in (
        (ScriptedGates(), "shadow: would answer on the device, gate 3"),
        (ScriptedGates(before=True, after=True), "shadow: would escalate, gate 3"),
        (ScriptedGates(before=True), "shadow: would escalate, gate 3"),
    ):
        (info,) = routed(cloud, tmp_path, ExplorationGates(gates, shadow=True), shadow=True)
        assert (info["tier"], info["reason"]) == ("cloud", reason)
    assert [(row.propensity, row.explored, row.sampled) for row in kept(tmp_path)] == [(1, 1, 1)] * 3


class Watching(ScriptedGates):
    """Gates that remember the qualities they were asked for."""

    quality = 0.9

    def __init__(self) -> None:
        super().__init__()
        self.asked_for: list[float | None] = []

    def judge(self, gate: int, messages: Any, answer: LocalAnswer, quality: float | None) -> GateDecision:
        if gate == 1:
            self.asked_for.append(quality)
        return super().judge(gate, messages, answer, quality)


def test_an_alarm_makes_the_gates_more_cautious_and_ends(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    monitor = DriftMonitor(rng.beta(1, 3, 500))
    inner = Watching()
    gates = ExplorationGates(inner, monitor=monitor)
    assert gates.judge(1, ASKED, LocalAnswer(), None).reason == "gate 1"
    for p_gain in rng.beta(6, 2, 300):
        monitor.observe(float(p_gain))
    decision = gates.judge(1, ASKED, LocalAnswer(), None)
    assert decision.reason.startswith("cautious, requests are unlike those of the calibration (distance 0.")
    gates.judge(1, ASKED, LocalAnswer(), 0.8)
    assert inner.asked_for == [None, pytest.approx(0.95), pytest.approx(0.9)]
    assert gates.judge(3, ASKED, LocalAnswer(), None).reason.startswith("cautious")
    for p_gain in rng.beta(1, 3, 600):
        monitor.observe(float(p_gain))
    assert monitor.alarm is None


@pytest.mark.parametrize(("truth", "alarmed"), [(lambda p: p, False), (lambda p: min(1.0, p + 0.25), True)])
def test_grades_that_contradict_the_gates_raise_the_alarm(truth: Callable[[float], float], alarmed: bool) -> None:
    rng = np.random.default_rng(1)
    monitor = DriftMonitor(np.full(500, 0.5))
    alarms = 0
    for p in rng.beta(1, 3, 3_000):
        propensity = 1.0 if p > 0.3 else 0.1
        if rng.random() < propensity:
            monitor.labelled(float(p), bool(rng.random() < truth(float(p))), propensity)
        alarms += monitor.alarm is not None
    assert (alarms > 0) is alarmed


def test_usual_requests_raise_no_alarm() -> None:
    rng = np.random.default_rng(2)
    monitor = DriftMonitor(rng.beta(1, 3, 1_000))
    for p in rng.beta(1, 3, 5_000):
        monitor.observe(float(p))
        assert monitor.alarm is None


def test_other_gates_go_on_with_the_drift_and_explore_for_a_learner_alone(tmp_path: Path) -> None:
    usual = np.linspace(0, 1, 500)
    before = ExplorationGates(Watching(), monitor=DriftMonitor(usual))
    same, other = (
        ExplorationGates(Watching(), exploration=1.0, monitor=DriftMonitor(each)) for each in (usual, usual / 2)
    )
    same.follow(before, learns=True)
    other.follow(before, learns=False)
    assert same.monitor is before.monitor is not other.monitor
    assert same.begin() is not same
    assert other.begin() is other
    learner = ExperienceCollector(ExperienceStore(tmp_path / "experience.sqlite3"), PAIR)
    for gates in (same, other, other):
        request = replace(judged(), cloud=ComparableAnswer("5"), monitor=gates.monitor)
        request.record.route = "escalated"
        learner.observe(request)
    asyncio.run(learner.close())
    assert [gates.monitor.report().graded for gates in (same, other) if gates.monitor] == [1, 2]


def test_a_folder_without_a_card_is_no_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path))
    folder = policy_folder_of({"local": "small", "cloud": "large"})
    folder.mkdir(parents=True)
    (folder / "gate1.onnx").write_bytes(b"the rest was never written")
    gates = load_learning_gates(RouterConfig(local="small.gguf", cloud_model="large"), "small")
    assert gates.judge(1, ASKED, LocalAnswer(), None).reason.startswith("no policy is calibrated for this pair")


@pytest.mark.parametrize("target", [{"quality": 0.9}, {"cloud_share": 0.3}, {"cost": 0.1}])
def test_a_policy_of_another_pair_has_no_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: dict[str, Any]
) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path))
    policy: dict[str, Any] = {"policy": str(pocket_policy_folder()), "allow_foreign_policy": True}
    target = {**target, "prices": Prices(cloud_input=0.5, cloud_output=1.5)}
    gates = load_learning_gates(RouterConfig(local="small.gguf", cloud_model="large", **policy, **target), "small")
    assert gates.judge(1, ASKED, LocalAnswer(), None).reason.startswith("uncalibrated for this pair")
    assert gates.monitor is None
    own = load_learning_gates(RouterConfig(local="pocket", cloud_model="pocket-large", **target), "pocket-small")
    assert own.monitor is not None and own.monitor.alarm is None


def test_a_stream_that_was_drawn_is_held_until_all_gates_have_seen_it(cloud: FakeCloud, tmp_path: Path) -> None:
    async def run(gates: ExplorationGates) -> bytes:
        file = tmp_path / "experience.sqlite3"
        config = RouterConfig(
            cloud_url=cloud.url, cloud_model="large", experience=file, hold_tokens=1, cloud_continues=True
        )
        router = Router(config, tiers(ScriptedLocal(), config, gates))
        body = {"model": "auto", "stream": True, "messages": [{"role": "user", "content": "2 + 2?"}]}
        try:
            response = await router.chat(WireRequest("POST", "/v1/chat/completions", body=json.dumps(body).encode()))
            assert not isinstance(response.body, bytes)
            return b"".join([chunk async for chunk in response.body])
        finally:
            await router.close()

    streamed = asyncio.run(run(ExplorationGates(ScriptedGates())))
    assert b'"tier":"local"' in streamed
    explored = asyncio.run(run(ExplorationGates(ScriptedGates(during_at=1), exploration=1.0)))
    assert b'"tier":"cloud"' in explored and b"exploration: would escalate, gate 3" in explored
    assert b'"content":"one"' in streamed and b'"content":"one"' not in explored
    assert cloud.requests[-1]["prediction"]["content"] == LOCAL_TEXT
