"""The examples that end a measurement show every route and kind; names of others are texts in every table."""

from __future__ import annotations

from io import StringIO
from typing import Literal

from rich.table import Table
from updraft.bench.cascade.run import Reply, Stage, TaskOutcome
from updraft.classifier.grading.questions import Question
from updraft.cli.shared.console import Console
from updraft.cli.shared.tables import examples_of, kinds_table
from updraft.cli.top import _table as nodes_table  # pyright: ignore[reportPrivateUsage]
from updraft.protocol.responses import UpdraftInfo


def reply(number: int, kind: str, route: Literal["local", "cloud", "escalated", "fallback"]) -> Reply:
    info = UpdraftInfo(request_id=str(number), tier="local", route=route, reason="", gate=0)
    return Reply(Question(str(number), kind, "?" * number, "", lambda _: True), info=info)


def outcome(replies: list[Reply]) -> TaskOutcome:
    return TaskOutcome(Stage("routed", "auto", []), replies)


def test_every_route_is_shown_and_no_kind_twice_while_there_are_others() -> None:
    replies = [reply(i, f"kind {i % 4}", "local") for i in range(12)]
    replies += [reply(20, "kind 0", "escalated"), reply(21, "kind 9", "fallback")]
    chosen = examples_of(outcome(replies))
    routes = [shown.info.route for shown in chosen if shown.info]
    assert sorted(routes) == ["escalated", "fallback", "local", "local", "local"]
    assert len({shown.question.kind for shown in chosen}) == 5


def test_few_replies_are_all_shown_and_unanswered_ones_never() -> None:
    replies = [reply(1, "kind", "local"), reply(2, "kind", "local")]
    unanswered = Reply(Question("3", "kind", "?", "", lambda _: True), error="refused")
    assert len(examples_of(outcome([*replies, unanswered]))) == 2
    assert examples_of(outcome([unanswered])) == []


NAME = "[/bold][red]x\x1b[2J"


def shown(table: Table) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_names_are_neither_styles_nor_commands_to_the_terminal() -> None:
    assert "[/bold][red]x" in shown(kinds_table({NAME: {"n": 1, "local": 1.0}}, ["local"]))
    figures = ("requests_per_s", "completion_tokens_per_s", "mean_ttft_s", "mean_tpot_s", "slo_share")
    node = {"url": NAME, "healthy": False, "reason": NAME, "models": [NAME], "in_flight": 0, "breaker_trips": 0}
    facts_of = {**dict.fromkeys(figures), "waiting": 0, "refused": 0, "cost_usd": 0.0, "nodes": [node]}
    text = shown(nodes_table(facts_of))
    assert text.count("[/bold][red]x") == 3
    assert "\x1b" not in text
