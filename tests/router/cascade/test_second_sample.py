"""A second sample when gate 3 is undecided: through the real router, and with the packaged model through llama.cpp."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cascade_bench import run, text_of, updraft_of
from router_fakes import CLOUD_TEXT, LOCAL_TEXT, FakeCloud, FakeSignals, FakeToken, ScriptedGates, ScriptedLocal, tiers
from scipy.stats import beta
from second_samples import FIRST, OTHER, SAME, Draw, chance_of_same, opinion
from updraft.classifier.agreement import Said
from updraft.classifier.aim import Aim
from updraft.classifier.calibration_rows import pack_calibration
from updraft.classifier.graph_files import sha256
from updraft.classifier.operating_point import DELTA, operating_point
from updraft.classifier.second import TEMPERATURE
from updraft.classifier.thresholds import Thresholds
from updraft.embedded.pocket import policy_folder as pocket_policy_folder
from updraft.embedded.tasks import make_tasks
from updraft.protocol.errors import ConfigurationError, EngineError
from updraft.protocol.requests import Message
from updraft.protocol.wire import WireRequest
from updraft.router.cascade.second import SecondSampleGates
from updraft.router.config import RouterConfig
from updraft.router.factory import load_learning_gates
from updraft.router.gates.exploration import LearningGates
from updraft.router.gates.gates import Verdict
from updraft.router.gates.selection import Choice, load_gates
from updraft.router.router import Router
from updraft.router.settings_sources import load_config
from updraft.router.tiers.interfaces import LocalAnswer
from updraft.text.tool_calls import ToolSyntax
from updraft.text.tool_formats import ToolFormat

ASKED = [Message("user", "What is 5 + 7?")]
WORDS = len(LOCAL_TEXT.split())


class Undecided(ScriptedGates):
    """Gate 3 goes up unless a second answer says the same as the first."""

    def after(self, messages: Any, answer: LocalAnswer, quality: float | None, second: Said | None = None) -> Verdict:
        if second is None:
            return Verdict(3, True, "undecided", 0.2, 0.1, undecided=True)
        agrees = second.text == answer.text
        return Verdict(3, not agrees, f"a second sample that {'agrees' if agrees else 'disagrees'}", 0.05, 0.1)


# Through the router: a scripted device, a real cloud


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_agrees_keeps_the_first_answer(bench: Any, cloud: FakeCloud, stream: bool) -> None:
    async def test() -> None:
        async with bench(Undecided()) as b:
            if stream:
                _, events, _ = await b.stream(stream_options={"include_usage": True})
                text, info, usage = text_of(events), updraft_of(events), events[-1]["usage"]
            else:
                answer = await b.answer()
                text, info, usage = answer["choices"][0]["message"]["content"], answer["updraft"], answer["usage"]
            assert (text, info["route"], info["gate"]) == (LOCAL_TEXT, "local", 3)
            assert info["reason"] == "a second sample that agrees"
            assert usage["completion_tokens"] == WORDS, "the second is no part of the answer"
            assert info["local_tokens"] == 2 * WORDS, "but it was written"
            (row,) = b.rows()
            assert (row.local_tokens, row.local_prompt_tokens) == (2 * WORDS, 7), "its prompt was in the cache"
            judged = [(each["reason"], each["undecided"]) for each in json.loads(row.decisions)[-2:]]
            assert judged == [("undecided", True), ("a second sample that agrees", False)]
            first, second = (params for _, params, _ in b.local.seen)
            assert (first.temperature, second.temperature) == (None, TEMPERATURE)
            assert row.saved_usd == pytest.approx((7 * 0.5 + WORDS * 1.5) / 1e6), "against one answer of the cloud"
        assert not cloud.requests

    run(test())


def test_one_that_disagrees_sends_the_first_answer_up(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(Undecided()) as b:
            b.local.again = "something else"
            answer = await b.answer()
            assert answer["choices"][0]["message"]["content"] == CLOUD_TEXT
            assert answer["updraft"]["reason"] == "a second sample that disagrees"
            assert answer["updraft"]["route"] == "escalated"
        assert cloud.requests[0]["prediction"]["content"] == LOCAL_TEXT

    run(test())


def test_a_cloud_that_fails_leaves_the_first_answer(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        cloud.mode = "500"
        async with bench(Undecided()) as b:
            b.local.again = "something else"
            answer = await b.answer()
            assert (answer["choices"][0]["message"]["content"], answer["updraft"]["route"]) == (LOCAL_TEXT, "fallback")

    run(test())


def test_without_a_sample_an_undecided_answer_goes_where_no_target_breaks(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(Undecided()) as b:
            b.local.again = f"{LOCAL_TEXT} and on and on"
            b.local.fails_at, b.local.error = WORDS, EngineError("llama failed")
            answer = await b.answer()
            assert (answer["updraft"]["route"], answer["updraft"]["reason"]) == ("escalated", "undecided")
            assert answer["updraft"]["local_tokens"] == 2 * WORDS, "what was written before it failed counts"

    run(test())


def test_a_tight_deadline_leaves_no_time_for_one(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(Undecided()) as b:
            b.local.delay_s = 0.4 / WORDS
            answer = json.loads((await b.ask(timeout_s=0.75)).body)
            assert answer["updraft"]["reason"] == "undecided"
            assert b.local.started == 1, "half of what is left is for the cloud"
        async with bench(Undecided()) as b:
            b.local.delay_s = 0.4 / WORDS
            b.local.again = " ".join(["on"] * 200)
            answer = json.loads((await b.ask(timeout_s=1.6)).body)
            assert (answer["updraft"]["reason"], b.local.started) == ("undecided", 2), "begun, and stopped in time"

    run(test())


def test_no_second_call_of_tools_and_none_behind_a_live_stream(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        adds = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
        async with bench(Undecided()) as b:
            b.local.tool_format = ToolFormat("hermes", ToolSyntax("<tool_call>", "</tool_call>"), {})
            b.local.text = call
            assert (await b.answer(tools=[adds]))["updraft"]["reason"] == "undecided"
            assert b.local.started == 1
            b.local.text, b.local.again = "It is 3.", call
            told = (await b.answer(tools=[adds]))["updraft"]["reason"]
            assert told.endswith("disagrees"), "text may be sampled again"
            b.local.text = LOCAL_TEXT
            _, events, _ = await b.stream(updraft={"hold_tokens": 1})
            assert text_of(events) == LOCAL_TEXT and updraft_of(events)["route"] == "local"
            assert b.local.started == 4, "what was streamed stands"
            assert (await b.answer("local"))["updraft"]["gate"] == 0
            assert b.local.started == 5, "nor where only one tier may answer"

    run(test())


def test_who_leaves_ends_it(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        async with bench(Undecided()) as b:
            b.local.delay_s = 0.05
            task = asyncio.create_task(b.ask())
            await asyncio.sleep(0.05 * WORDS + 0.15)
            assert b.local.started == 2
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert b.local.running == 0
            (row,) = b.rows()
            assert row.status == 499 and row.local_tokens > WORDS
        assert not cloud.requests

    run(test())


def test_a_cloud_that_wins_the_race_meanwhile_answers(bench: Any, cloud: FakeCloud) -> None:
    async def test() -> None:
        cloud.delay_s = 1.2
        async with bench(Undecided(), race_above=0.0) as b:
            b.local.delay_s = 0.8 / WORDS
            b.local.again = " ".join(["on"] * 200)
            answer = await b.answer()
            assert answer["choices"][0]["message"]["content"] == CLOUD_TEXT
            assert answer["updraft"]["reason"] == "raced: the cloud answered first"
            assert b.local.started == 2
        assert len(cloud.requests) == 1

    run(test())


class Coin:
    """A random number generator that always, or never, draws."""

    def __init__(self, draws: bool) -> None:
        self.random = lambda: 0.0 if draws else 1.0


@pytest.mark.parametrize(("again", "propensity"), [(LOCAL_TEXT, 0.25), ("something else", 1.0)])
def test_what_a_coin_drew_is_sampled_as_its_like_is(
    cloud: FakeCloud, tmp_path: Path, again: str, propensity: float
) -> None:
    """Its like without the coin is graded if the second answer disagrees, so its own chance depends on that too."""
    from updraft.classifier.experience import Experience

    async def ask(drawn: bool) -> dict[str, Any]:
        config = RouterConfig(cloud_url=cloud.url, cloud_model="large", experience=tmp_path / "experience.sqlite3")
        local = ScriptedLocal()
        local.model_id, local.again = "scripted", again
        gates = LearningGates(Undecided(), exploration=0.25, rng=Coin(drawn))  # type: ignore[arg-type]
        router = Router(config, tiers(local, config, gates))
        await router.start()
        body = json.dumps({"model": "auto", "messages": [{"role": "user", "content": "2 + 2?"}]}).encode()
        response = await router.handle(WireRequest("POST", "/v1/chat/completions", body=body))
        await router.close()
        assert isinstance(response.body, bytes) and local.started == 2
        return json.loads(response.body)["updraft"]

    drawn, plain = asyncio.run(ask(True)), asyncio.run(ask(False))
    assert (drawn["tier"], plain["tier"]) == ("cloud", "local" if again == LOCAL_TEXT else "cloud")
    would = "stay" if again == LOCAL_TEXT else "go up"
    assert drawn["reason"].startswith(f"exploration: would {would}, a second sample that")
    experience = Experience(tmp_path / "experience.sqlite3")
    rows = experience.rows("scripted with large")
    experience.close()
    assert [row.propensity for row in rows if row.drawn] == [propensity]


# The gates


class Known:
    """A policy that gives out what it is told, with an opinion on second samples."""

    gate2_tokens, models, usual = 4, {"local": "small", "cloud": "large"}, None

    def __init__(self, second: Any, thresholds: Thresholds) -> None:
        self.second = second
        self.p_gain = 0.0
        self.asked: list[bool] = []
        self.thresholds = thresholds

    def before(self, _prompt: Any) -> float:
        return 0.0

    def during(self, _view: Any) -> float:
        return 0.0

    def after(self, _view: Any) -> float:
        return self.p_gain

    def read_ahead(self, _prompt: Any) -> None:
        pass

    def read_lines(self, _answer: str) -> None:
        pass

    def thresholds_for(self, _aim: Aim, *, second_sample: bool = False) -> Thresholds:
        self.asked.append(second_sample)
        return self.thresholds


def wrote(text: str) -> LocalAnswer:
    return LocalAnswer(5, [FakeToken(0, text, FakeSignals())], [FakeSignals()], text, "stop")


@pytest.fixture(scope="module")
def second() -> Any:
    fitted = Draw.of(3000, 0).fitted()
    assert fitted is not None
    return opinion(fitted)


def test_undecided_is_what_a_second_answer_could_turn(second: Any) -> None:
    policy = Known(second, Thresholds(1.0, 1.0, 0.2))
    for aim, up in ((Aim("quality", 0.9), True), (Aim("cloud_share", 0.3), False), (Aim("cost", 1.0), False)):
        gates = SecondSampleGates(policy, aim)
        policy.p_gain = 0.2
        verdict = gates.after(ASKED, wrote(FIRST), None)
        assert (verdict.undecided, verdict.escalate, verdict.p_gain) == (True, up, 0.2)
        way = f"{'goes up' if up else 'stays'} unless a second sample says otherwise"
        assert verdict.reason == f"P(gain) 0.200 after generation, undecided at 0.200: {way}"
        same, other = (gates.after(ASKED, wrote(FIRST), None, Said(text)) for text in (SAME, OTHER))
        assert (same.escalate, other.escalate) == (False, True)
        assert same.reason == f"P(gain) {same.p_gain:.3f} at most 0.200 after a second sample that agrees"
        assert other.reason == f"P(gain) {other.p_gain:.3f} above 0.200 after a second sample that disagrees"
        for decided in (0.01, 0.9):
            policy.p_gain = decided
            verdict = gates.after(ASKED, wrote(FIRST), None)
            assert (verdict.undecided, verdict.escalate) == (False, decided > 0.2)
    assert set(policy.asked) == {True}, "thresholds of a router that takes them"
    for p_gain, threshold in ((0.06, 0.7), (0.45, 0.02)):
        gates = SecondSampleGates(policy, Aim("quality", 0.9))
        policy.p_gain, policy.thresholds = p_gain, Thresholds(1.0, 1.0, threshold)
        settled = gates.after(ASKED, wrote(FIRST), None)
        assert (settled.undecided, settled.escalate, settled.p_gain) == (False, p_gain > threshold, p_gain)
        assert "after generation, whatever a second sample says" in settled.reason


def test_the_target_holds_for_the_router_as_it_runs() -> None:
    """The true risk of what the gates do, with samples and without, under thresholds of 100 calibrations."""
    alpha, draws, levels = 0.05, 100, beta.ppf((np.arange(200) + 0.5) / 200, 0.6, 2.0)
    risks, ups = [], []
    for seed in range(draws):
        draw = Draw.of(600, seed)
        fitted = draw.fitted()
        assert fitted is not None
        thresholds = operating_point(draw.rows(fitted).with_second_samples, Aim("quality", 1 - alpha), DELTA).thresholds
        policy = Known(opinion(fitted), thresholds)
        gates, rng = SecondSampleGates(policy, Aim("quality", 1 - alpha)), np.random.default_rng(seed)
        risk = up = 0.0
        for p_gain in levels:
            policy.p_gain = float(p_gain)
            verdict = gates.after(ASKED, wrote(FIRST), None)
            same = chance_of_same(p_gain)
            for text, chance, gain in ((SAME, same, 0.3 * p_gain / same), (OTHER, 1 - same, 0.7 * p_gain / (1 - same))):
                taken = verdict.undecided and rng.random() < 0.9
                goes_up = (gates.after(ASKED, wrote(FIRST), None, Said(text)) if taken else verdict).escalate
                risk += 0.0 if goes_up else chance * gain / len(levels)
                up += chance * goes_up / len(levels)
        risks.append(risk)
        ups.append(up)
    assert np.mean(np.array(risks) > alpha) <= DELTA + 2.5 * np.sqrt(DELTA * (1 - DELTA) / draws)
    assert np.mean(risks) > 0.3 * alpha, "it is used"
    assert np.mean(ups) < 0.6


def test_a_policy_that_knows_none_is_refused(tmp_path: Path) -> None:
    plain = shutil.copytree(pocket_policy_folder(), tmp_path / "plain")
    card = json.loads((plain / "policy.json").read_text()) | {"second": None}
    (plain / "policy.json").write_text(json.dumps(card))
    pocket = {"local": "pocket-small", "cloud": "pocket-large"}
    for choice in (
        Choice(str(plain), pocket, second_sample=True),
        Choice("none", pocket, second_sample=True),
        Choice("auto", pocket, second_sample=True),
        Choice("auto", pocket, general=plain, second_sample=True),
    ):
        with pytest.raises(ConfigurationError, match=r"updraft calibrate --live N --second-sample"):
            load_gates(choice)


# The packaged model


@pytest.fixture(scope="module")
def wavering_policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The packaged policy with an opinion on second samples, which it takes from a population of another kind."""
    from updraft.classifier.policy import Policy

    folder = shutil.copytree(pocket_policy_folder(), tmp_path_factory.mktemp("policy") / "policy")
    draw = Draw.of(3000, 0)
    fitted = draw.fitted()
    assert fitted is not None
    card = json.loads((folder / "policy.json").read_text())
    thresholds = Policy.load(pocket_policy_folder()).card.thresholds
    packed = pack_calibration(draw.rows(fitted))
    (folder / "again.onnx").write_bytes(fitted.graph)
    (folder / "calibration.npz").write_bytes(packed)
    card["files"] |= {"again.onnx": sha256(fitted.graph), "calibration.npz": sha256(packed)}
    card["second"] = json.loads(msgspec.json.encode(replace(fitted.card, thresholds=thresholds)))
    (folder / "policy.json").write_text(json.dumps(card))
    yield folder


def test_the_packaged_model_answers_twice_where_it_is_undecided(cloud: FakeCloud, wavering_policy: Path) -> None:
    pytest.importorskip("llama_cpp")
    tasks = make_tasks("test", 60, seed=3)

    async def ask(second_sample: bool) -> list[dict[str, Any]]:
        config = RouterConfig(
            cloud_url=cloud.url, policy=str(wavering_policy), second_sample=second_sample, quality=0.98
        )
        router = Router(config)
        await router.start()
        try:
            found = []
            for task in tasks:
                body = json.dumps({"model": "auto", "messages": [{"role": "user", "content": task.prompt}]}).encode()
                response = await router.handle(WireRequest("POST", "/v1/chat/completions", body=body))
                assert isinstance(response.body, bytes)
                answer = json.loads(response.body)
                found.append(answer["updraft"] | {"text": answer["choices"][0]["message"]["content"]})
            return found
        finally:
            await router.close()

    off, on, anew = (asyncio.run(ask(second_sample)) for second_sample in (False, True, True))
    told = ("reason", "p_gain", "text", "local_tokens")
    facts = [[[row[name] for name in told] for row in rows] for rows in (on, anew)]
    assert facts[0] == facts[1], "reproducible"
    taken = [i for i, row in enumerate(on) if "second sample that" in row["reason"]]
    assert 3 <= len(taken) < len(tasks) / 2
    assert {"agrees" in on[i]["reason"].split() for i in taken} == {True, False}
    assert all(on[i]["local_tokens"] > off[i]["local_tokens"] for i in taken)
    assert all(on[i]["local_tokens"] == off[i]["local_tokens"] for i in set(range(len(tasks))) - set(taken))
    stayed = [i for i in taken if on[i]["tier"] == off[i]["tier"] == "local"]
    assert all(on[i]["text"] == off[i]["text"] for i in stayed), "the answer is the first one"


def test_the_setting_reaches_the_gates(wavering_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPDRAFT_SECOND_SAMPLE", "true")
    config = load_config({"policy": str(wavering_policy)})
    assert config.second_sample
    assert isinstance(load_learning_gates(config, "pocket-small")._gates, SecondSampleGates)
    assert not isinstance(load_learning_gates(RouterConfig(), "pocket-small")._gates, SecondSampleGates)
