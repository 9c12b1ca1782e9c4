"""Learning in use: labels of escalations, exploration, shadow and alarm, through the real router and over sockets."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exposition import parse
from router_fakes import CLOUD_TEXT, LOCAL_TEXT, FakeCloud, ScriptedGates, ScriptedLocal, tiers
from updraft.classifier.drift import DriftMonitor
from updraft.classifier.experience import Experience, Observation
from updraft.protocol.requests import Message
from updraft.protocol.wire import WireRequest
from updraft.router.config import Middle, RouterConfig
from updraft.router.gates import Verdict
from updraft.router.learning import MOST_WAITING, Learner, LearningCounts, LearningGates, Seen
from updraft.router.prices import Prices
from updraft.router.record import Record
from updraft.router.router import Router
from updraft.router.tiers import LocalAnswer

ASKED = [Message("user", "What is 2 + 2?")]
PAIR = "scripted with large"


def routed(cloud: FakeCloud, tmp_path: Path, gates: Any, n: int = 1, **settings: Any) -> list[dict[str, Any]]:
    """The `updraft` objects of `n` requests through a router with experience."""

    async def run() -> list[dict[str, Any]]:
        config = RouterConfig(
            cloud_url=cloud.url, cloud_model="large", experience=tmp_path / "experience.sqlite3", **settings
        )
        local = ScriptedLocal()
        local.model_id = "scripted"
        router = Router(config, tiers(local, config, gates))
        await router.start()
        found: list[dict[str, Any]] = []
        try:
            for index in range(n):
                body = {"model": "auto", "messages": [{"role": "user", "content": f"Question {index}: 2 + 2?"}]}
                response = await router.handle(
                    WireRequest("POST", "/v1/chat/completions", body=json.dumps(body).encode())
                )
                assert isinstance(response.body, bytes)
                found.append(json.loads(response.body)["updraft"])
        finally:
            await router.close()
        return found

    return asyncio.run(run())


def kept(tmp_path: Path) -> list[Observation]:
    experience = Experience(tmp_path / "experience.sqlite3")
    try:
        return experience.rows(PAIR)
    finally:
        experience.close()


def test_an_escalation_is_a_label_without_text(cloud: FakeCloud, tmp_path: Path) -> None:
    gates = LearningGates(ScriptedGates(after=True))
    (info,) = routed(cloud, tmp_path, gates)
    assert info["tier"] == "cloud"
    (row,) = kept(tmp_path)
    assert row.id == info["request_id"]
    assert (row.local, row.cloud, row.propensity, row.explored) == (0, 1, 1, 0), f"{LOCAL_TEXT!r} is not {CLOUD_TEXT!r}"
    assert (row.prompt, row.answer) == (None, None)
    raw = (tmp_path / "experience.sqlite3").read_bytes()
    wal = tmp_path / "experience.sqlite3-wal"
    raw += wal.read_bytes() if wal.exists() else b""
    assert b"Question" not in raw and b"two three" not in raw


class SlowDisk(Experience):
    """Experience that is kept when `spins` is set, and not before."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.spins = threading.Event()

    def add(self, observation: Observation) -> None:
        assert self.spins.wait(30)
        super().add(observation)


def test_what_comes_too_fast_is_dropped_and_counted(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path / "experience.sqlite3")
    learner = Learner(disk, PAIR, explored=1.0)
    try:
        for _ in range(MOST_WAITING + 3):
            record = Record(Prices(), "large")
            record.decide(Verdict(3, escalate=False, reason="stays", p_gain=0.1, propensity=1.0))
            learner.observe(Seen.of(record, ASKED, LocalAnswer(text="4", finish_reason="stop"), None))
        assert learner.counts == LearningCounts(waiting=MOST_WAITING, dropped=3)
    finally:
        disk.spins.set()
        learner.close()
    assert learner.counts == LearningCounts(kept=MOST_WAITING, dropped=3)
    assert len(kept(tmp_path)) == MOST_WAITING


def test_a_disk_that_fails_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cloud: FakeCloud) -> None:
    def full(_: Experience, __: Observation) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Experience, "add", full)
    seen: list[LearningCounts] = []
    close = Learner.close

    def closing(learner: Learner) -> None:
        close(learner)
        seen.append(learner.counts)

    monkeypatch.setattr(Learner, "close", closing)
    (info,) = routed(cloud, tmp_path, LearningGates(ScriptedGates()))
    assert info["tier"] == "local", "the answer does not suffer"
    assert seen == [LearningCounts(failed=1)]


def test_the_counts_are_metrics(cloud: FakeCloud, tmp_path: Path) -> None:
    async def run() -> dict[str, float]:
        config = RouterConfig(cloud_url=cloud.url, cloud_model="large", experience=tmp_path / "e.sqlite3")
        router = Router(config, tiers(ScriptedLocal(), config, LearningGates(ScriptedGates())))
        await router.start()
        try:
            body = json.dumps({"model": "auto", "messages": [{"role": "user", "content": "2 + 2?"}]}).encode()
            assert (await router.handle(WireRequest("POST", "/v1/chat/completions", body=body))).status == 200
            while True:
                response = await router.handle(WireRequest("GET", "/metrics"))
                assert isinstance(response.body, bytes)
                families = parse(response.body.decode())
                found = {name: family.samples[name, ""] for name, family in families.items()}
                if found["updraft_learning_waiting"] == 0:
                    return found
                await asyncio.sleep(0.01)
        finally:
            await router.close()

    found = asyncio.run(asyncio.wait_for(run(), 30))
    assert found == {
        "updraft_learning_waiting": 0,
        "updraft_learning_kept_total": 1,
        "updraft_learning_dropped_total": 0,
        "updraft_learning_failed_total": 0,
    }


def test_a_middle_cloud_teaches_nothing_about_the_pair(cloud: FakeCloud, tmp_path: Path) -> None:
    gates = LearningGates(ScriptedGates(after=True))
    (info,) = routed(cloud, tmp_path, gates, middle=(Middle(cloud.url, "medium"),))
    assert info["tier"] == "cloud"
    assert kept(tmp_path) == []


def test_text_is_kept_where_the_user_asks_for_it(cloud: FakeCloud, tmp_path: Path) -> None:
    routed(cloud, tmp_path, LearningGates(ScriptedGates()), experience_text=True)
    (row,) = kept(tmp_path)
    assert (row.prompt, row.answer) == ("Question 0: 2 + 2?", LOCAL_TEXT)
    assert row.grades is None, "what stays local has no label"


def test_what_goes_up_at_once_or_stops_early_teaches_nothing(cloud: FakeCloud, tmp_path: Path) -> None:
    routed(cloud, tmp_path, LearningGates(ScriptedGates(before=True)))
    routed(cloud, tmp_path, LearningGates(ScriptedGates(during_at=2)))
    assert kept(tmp_path) == []


def test_exploration_sends_its_share_up_and_says_so(cloud: FakeCloud, tmp_path: Path) -> None:
    gates = LearningGates(ScriptedGates(), exploration=0.25, rng=random.Random(3))
    coins = random.Random(3)
    found = routed(cloud, tmp_path, gates, 40, exploration=0.25)
    explored = [info for info in found if info["tier"] == "cloud"]
    assert [info in explored for info in found] == [coins.random() < 0.25 for _ in found]
    assert 4 <= len(explored) <= 18
    assert all(info["reason"].startswith("exploration: ") for info in explored)
    rows = kept(tmp_path)
    assert len(rows) == 40
    assert {row.propensity for row in rows} == {0.25}
    assert sum(row.grades is not None for row in rows) == len(explored)


def test_a_shadow_decides_and_does_not_act(cloud: FakeCloud, tmp_path: Path) -> None:
    for gates, reason in (
        (ScriptedGates(), "shadow: would stay, gate 3"),
        (ScriptedGates(before=True, after=True), "shadow: would go up, gate 3"),
    ):
        (info,) = routed(cloud, tmp_path, LearningGates(gates, shadow=True), shadow=True)
        assert (info["tier"], info["reason"]) == ("cloud", reason)
    assert [(row.propensity, row.explored) for row in kept(tmp_path)] == [(1, 1), (1, 1)]


class Watching(ScriptedGates):
    """Gates that remember the qualities they were asked for."""

    quality = 0.9

    def __init__(self) -> None:
        super().__init__()
        self.asked_for: list[float | None] = []

    def before(self, messages: Any, quality: float | None) -> Verdict:
        self.asked_for.append(quality)
        return super().before(messages, quality)


def test_an_alarm_makes_the_gates_more_cautious_and_ends(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    monitor = DriftMonitor(rng.beta(1, 3, 500))
    inner = Watching()
    gates = LearningGates(inner, monitor=monitor)
    assert gates.before(ASKED, None).reason == "gate 1"
    for p_gain in rng.beta(6, 2, 300):
        monitor.asked(float(p_gain))
    told = gates.before(ASKED, None)
    assert told.reason.startswith("cautious, requests are unlike those of the calibration (distance 0.")
    gates.before(ASKED, 0.8)
    assert inner.asked_for == [None, pytest.approx(0.95), pytest.approx(0.9)]
    assert gates.after(ASKED, LocalAnswer(), None).reason.startswith("cautious")
    for p_gain in rng.beta(1, 3, 600):
        monitor.asked(float(p_gain))
    assert monitor.alarm is None


@pytest.mark.parametrize(("truth", "alarmed"), [(lambda p: p, False), (lambda p: min(1.0, p + 0.25), True)])
def test_grades_that_contradict_the_gates_raise_the_alarm(truth: Callable[[float], float], alarmed: bool) -> None:
    rng = np.random.default_rng(1)
    monitor = DriftMonitor(None)
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
        monitor.asked(float(p))
        assert monitor.alarm is None
