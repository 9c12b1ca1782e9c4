"""`calibrate --live` asks the cloud as everybody does: within budgets and privacy rules, and in the ledger."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from cloud_fixture import cloud, cloud_server
from router_fakes import FakeCloud
from updraft.accounting.token_estimate import answer_size, prompt_tokens
from updraft.classifier.grading.grader import PairGrader
from updraft.classifier.grading.questions import Prompt
from updraft.cli.calibrate.live_rows import LiveRows, RefusedError, TierPair, cloud_model
from updraft.cli.calibrate.saved_answers import SavedAnswers
from updraft.cli.calibrate.spending import Spending
from updraft.protocol.errors import ConfigurationError
from updraft.router.accounting.budget import BudgetLimits
from updraft.router.accounting.ledger import Ledger
from updraft.router.accounting.prices import Prices
from updraft.router.config import RouterConfig
from updraft.router.factory import open_local_tier
from updraft.router.privacy.rules import Privacy

__all__ = ["cloud", "cloud_server"]

SAID = ("What is 2 + 2?", "Write to me@example.org.", "What is 3 + 3?", "What is 4 + 4?")


def configured(cloud: FakeCloud, tmp_path: Path, **settings: object) -> RouterConfig:
    pytest.importorskip("llama_cpp")
    ledger = tmp_path / "ledger.sqlite3"
    return RouterConfig(local="pocket", cloud_url=cloud.url, cloud_model="pocket-large", ledger=ledger, **settings)  # type: ignore[arg-type]


def ask(config: RouterConfig, kept: SavedAnswers, texts: Sequence[Prompt], budget: float | None = None) -> LiveRows:
    async def run() -> LiveRows:
        spending = Spending(config.prices, budget, ["pocket-large"], spent=kept.spent, on_spent=kept.spend)
        local = await open_local_tier(config)
        try:
            async with cloud_model(config, spending) as model:
                return await TierPair(local, model, PairGrader(), kept).rows(texts, concurrency=1)
        finally:
            await local.aclose()

    return asyncio.run(run())


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(f"p{number}", "file", text) for number, text in enumerate(texts)]


def test_the_cloud_is_asked_within_the_limits_and_on_the_books(cloud: FakeCloud, tmp_path: Path) -> None:
    """An answer takes 15 tokens: the budget covers the second answer, and not the third."""
    body = {"model": "pocket-large", "messages": [{"role": "user", "content": SAID[0]}]}
    most = prompt_tokens(json.dumps(body).encode(), bytes_per_token=1) + answer_size(body, "chat/completions").least
    limits = BudgetLimits(cloud_tokens=most + 20)
    config = configured(cloud, tmp_path, budget=limits, privacy=Privacy(builtin=("email",)))
    live = ask(config, SavedAnswers(tmp_path / "kept.jsonl"), prompts(*SAID))
    assert [row.prompt for row in live.rows] == [SAID[0], SAID[2]]
    assert [body["messages"][0]["content"] for body in cloud.requests] == [SAID[0], SAID[2]]
    assert [failure.partition(": ")[0] for failure in live.failures] == ["p1", "p3"]
    assert "privacy rule 'email'" in live.failures[0]
    assert "budget spent" in live.failures[1]
    ledger = Ledger(tmp_path / "ledger.sqlite3")
    assert sorted((row.status, row.cloud_tokens) for row in ledger.rows()) == [(200, 4), (200, 4), (400, 0), (429, 0)]
    ledger.close()


def test_counts_that_cannot_be_are_not_in_the_rows(cloud: FakeCloud, tmp_path: Path) -> None:
    """A policy for a cost would count with them."""
    message = '{"index": 0, "message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}'
    usage = '{"prompt_tokens": 1e308, "completion_tokens": 1e308}'
    cloud.says = (200, f'{{"choices": [{message}], "usage": {usage}}}'.encode())
    live = ask(configured(cloud, tmp_path), SavedAnswers(tmp_path / "kept.jsonl"), prompts(SAID[0]))
    assert [(row.cloud_read, row.cloud_written) for row in live.rows] == [(None, None)]


def test_the_budget_of_a_calibration_is_never_passed_and_counts_earlier_runs(cloud: FakeCloud, tmp_path: Path) -> None:
    config = configured(cloud, tmp_path, prices=Prices(cloud_input=100.0, cloud_output=100.0))
    likely = Spending(config.prices, None, ["pocket-large"]).likely(
        "pocket-large", {"model": "cloud", "messages": prompts(SAID[0])[0].body}
    )
    kept = SavedAnswers(tmp_path / "kept.jsonl")
    first = ask(config, kept, prompts(*SAID), budget=likely * 1.005)
    assert [row.prompt for row in first.rows] == [SAID[0]], "what is left is less than the next may cost"
    assert (first.unasked, len(cloud.requests)) == (3, 1)
    assert f"the budget of ${likely * 1.005:g}" in first.budget
    spent = kept.spent
    assert 0 < spent < likely
    kept.close()
    kept = SavedAnswers(tmp_path / "kept.jsonl")
    assert kept.spent == pytest.approx(spent)
    second = ask(config, kept, prompts(*SAID), budget=likely * 1.005)
    assert (len(second.rows), second.unasked, len(cloud.requests)) == (1, 3, 1), "the first is known, and was paid"
    third = ask(config, kept, prompts(*SAID))
    assert (len(third.rows), len(cloud.requests)) == (4, 4)


def test_a_budget_needs_prices(cloud: FakeCloud, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs the price of pocket-large"):
        ask(configured(cloud, tmp_path), SavedAnswers(tmp_path / "kept.jsonl"), prompts(SAID[0]), budget=1.0)


def test_a_wrong_key_ends_it_at_once(cloud: FakeCloud, tmp_path: Path) -> None:
    cloud.says = (401, b'{"error": {"message": "no such key", "type": "x", "code": "invalid_api_key"}}')
    kept = SavedAnswers(tmp_path / "kept.jsonl")
    with pytest.raises(RefusedError, match="no such key"):
        ask(configured(cloud, tmp_path), kept, prompts(*SAID * 10))
    assert len(cloud.requests) == 1


def test_a_conversation_is_asked_whole(cloud: FakeCloud, tmp_path: Path) -> None:
    texts = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 3 more?"},
    )
    talk = Prompt("t", "file", "And 3 more?", None, texts)
    live = ask(configured(cloud, tmp_path), SavedAnswers(tmp_path / "kept.jsonl"), [talk])
    assert [body["messages"] for body in cloud.requests] == [list(texts)]
    assert [(row.prompt, row.messages) for row in live.rows] == [("And 3 more?", tuple(talk.messages))]


def test_one_calibration_of_a_pair_at_a_time(tmp_path: Path) -> None:
    kept = SavedAnswers(tmp_path / "kept.jsonl")
    with pytest.raises(ConfigurationError, match="Another calibration of this pair is running"):
        SavedAnswers(tmp_path / "kept.jsonl")
    kept.close()
    assert not (tmp_path / "kept.jsonl").exists(), "there was nothing in it"
