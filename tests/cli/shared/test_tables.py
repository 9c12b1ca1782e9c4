"""The examples that end a measurement show every route and different kinds of questions."""

from __future__ import annotations

from typing import Literal

from updraft.bench.cascade.run import Leg, Reply, TaskOutcome
from updraft.classifier.grading.questions import Question
from updraft.cli.shared.tables import examples_of
from updraft.protocol.responses import UpdraftInfo


def reply(number: int, kind: str, route: Literal["local", "cloud", "escalated", "fallback"]) -> Reply:
    info = UpdraftInfo(request_id=str(number), tier="local", route=route, reason="", gate=0)
    return Reply(Question(str(number), kind, "?" * number, "", lambda _: True), info=info)


def outcome(replies: list[Reply]) -> TaskOutcome:
    return TaskOutcome(Leg("routed", "auto", []), replies)


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
