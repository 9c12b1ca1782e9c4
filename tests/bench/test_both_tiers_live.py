"""`calibrate --live` asks the cloud as everybody does: within budgets and privacy rules, and on the books."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cloud_fixture import cloud, cloud_server
from router_fakes import FakeCloud
from updraft.bench.both_tiers import ask_both
from updraft.bench.questions import Prompt
from updraft.router.accounting.budget import BudgetLimits, expected_tokens
from updraft.router.accounting.ledger import Ledger
from updraft.router.config import RouterConfig
from updraft.router.factory import open_local
from updraft.router.privacy.rules import Privacy

__all__ = ["cloud", "cloud_server"]

SAID = ("What is 2 + 2?", "Write to me@example.org.", "What is 3 + 3?", "What is 4 + 4?")


def test_the_cloud_is_asked_within_the_limits_and_on_the_books(cloud: FakeCloud, tmp_path: Path) -> None:
    """An answer takes 15 tokens: there is room for what the second may take, and not for what the third may."""
    most = sum(expected_tokens({"model": "pocket-large", "messages": [{"role": "user", "content": SAID[0]}]}))
    pytest.importorskip("llama_cpp")
    config = RouterConfig(
        local="pocket",
        cloud_url=cloud.url,
        cloud_model="pocket-large",
        ledger=tmp_path / "ledger.sqlite3",
        budget=BudgetLimits(cloud_tokens=most + 20),
        privacy=Privacy(builtin=("email",)),
    )
    prompts = [Prompt(f"p{number}", "file", text) for number, text in enumerate(SAID)]
    with open_local(config) as engine:
        live = asyncio.run(ask_both(config, engine, prompts, concurrency=1))
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
    pytest.importorskip("llama_cpp")
    message = '{"index": 0, "message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}'
    usage = '{"prompt_tokens": 1e308, "completion_tokens": 1e308}'
    cloud.says = (200, f'{{"choices": [{message}], "usage": {usage}}}'.encode())
    config = RouterConfig(
        local="pocket", cloud_url=cloud.url, cloud_model="pocket-large", ledger=tmp_path / "ledger.sqlite3"
    )
    with open_local(config) as engine:
        live = asyncio.run(ask_both(config, engine, [Prompt("p", "file", SAID[0])], concurrency=1))
    assert [(row.cloud_read, row.cloud_written) for row in live.rows] == [(None, None)]
