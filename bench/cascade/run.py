"""Sends questions to the cascade through the real client, and computes figures from the graded replies."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ...classifier.grading.questions import Question
from ...protocol.errors import UpdraftError
from ...protocol.responses import UpdraftInfo
from ..shared.statistics import percentile, wilson

if TYPE_CHECKING:
    from ...sdk import AsyncOpenAI

Model = Literal["local", "cloud", "auto"]


@dataclass(frozen=True, slots=True)
class Reply:
    """One graded answer. On failure `error` replaces the text, and the reply counts as wrong."""

    question: Question
    text: str = ""
    right: bool = False
    latency_ms: float = 0.0
    info: UpdraftInfo | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a benchmark: questions for one model, of which at most `concurrency` are in flight."""

    name: str
    model: Model
    questions: Sequence[Question]
    concurrency: int = 1


@dataclass(slots=True)
class TaskOutcome:
    """Results of a stage; `replies` are in the order of the stage's questions."""

    stage: Stage
    replies: list[Reply] = field(default_factory=list[Reply])
    seconds: float = 0.0

    @property
    def failures(self) -> list[Reply]:
        return [reply for reply in self.replies if reply.error is not None]


async def run_stage(client: AsyncOpenAI, stage: Stage, on_reply: Callable[[Reply], None]) -> TaskOutcome:
    """Ask all questions; `on_reply` gets each reply as it arrives. A failed question never stops the others."""
    slots = asyncio.Semaphore(stage.concurrency)

    async def one(question: Question) -> Reply:
        async with slots:
            reply = await ask(client, question, stage.model)
        on_reply(reply)
        return reply

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(question)) for question in stage.questions]
    return TaskOutcome(stage, [task.result() for task in tasks], time.perf_counter() - started)


async def ask(client: AsyncOpenAI, question: Question, model: Model) -> Reply:
    """Ask one question through the client; client errors become a reply with `error`."""
    from openai import OpenAIError

    started = time.perf_counter()
    try:
        answer = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question.prompt}]
        )
    except (OpenAIError, UpdraftError) as error:
        body = getattr(error, "body", None)  # the server's error object
        message = body.get("message") if isinstance(body, dict) else None
        return Reply(question, error=f"{type(error).__name__}: {message or error}")
    latency_ms = (time.perf_counter() - started) * 1000
    text = answer.choices[0].message.content or ""
    info = msgspec.convert((answer.model_extra or {})["updraft"], UpdraftInfo)
    return Reply(question, text, question.grade(text), latency_ms, info)


def figures(outcome: TaskOutcome) -> dict[str, Any]:
    """Return accuracy with its interval, cost, tokens and routes of one stage."""
    replies = outcome.replies
    infos = router_infos(replies)
    right = sum(reply.right for reply in replies)
    answered = [reply for reply in replies if reply.error is None]
    return {
        "n": len(replies),
        "right": right,
        "accuracy": right / len(replies) if replies else 0.0,
        "accuracy_interval": list(wilson(right, len(replies))),
        "failures": len(replies) - len(answered),
        "fallbacks": sum(info.route == "fallback" for info in infos),
        "cloud_share": sum(info.cloud_tokens > 0 or info.tier == "cloud" for info in infos) / max(1, len(infos)),
        "tokens": {"local": sum(i.local_tokens for i in infos), "cloud": sum(i.cloud_tokens for i in infos)},
        "cost_usd": _cost(infos),
        "concurrency": outcome.stage.concurrency,
        "seconds": outcome.seconds,
        "latency_ms": latency(answered),
    }


def errors(outcomes: Iterable[TaskOutcome]) -> dict[str, Any]:
    """Summarise the failed questions: their number, the number by kind, and the first message."""
    messages = [str(reply.error) for outcome in outcomes for reply in outcome.failures]
    kinds = Counter(message.partition(":")[0] for message in messages)
    return {"count": len(messages), "by_kind": dict(kinds.most_common()), "first": messages[0] if messages else None}


def _cost(infos: Iterable[UpdraftInfo]) -> float | None:
    """Return the total cost; None if a model has no price."""
    costs = [info.cost_usd for info in infos]
    return None if None in costs else sum(cost for cost in costs if cost is not None)


def latency(replies: Iterable[Reply]) -> dict[str, float | None]:
    values = [reply.latency_ms for reply in replies]
    return {"p50": percentile(values, 50), "p95": percentile(values, 95)}


def draft_figures(outcome: TaskOutcome) -> dict[str, Any]:
    """Return the share of the local drafts that the cloud verified and kept, over the escalated requests."""
    infos = [info for info in router_infos(outcome.replies) if info.draft_proposed]
    proposed, accepted = sum(info.draft_proposed for info in infos), sum(info.draft_accepted for info in infos)
    share = accepted / proposed if proposed else None
    return {"requests": len(infos), "proposed": proposed, "accepted": accepted, "acceptance_rate": share}


def by_kind(outcomes: dict[str, TaskOutcome]) -> dict[str, dict[str, float]]:
    """Return the accuracy of each outcome by kind of question: `{"addition": {"n": 25, "local": 0.8, ...}}`."""
    table: dict[str, dict[str, float]] = {}
    for name, outcome in outcomes.items():
        for kind in sorted({reply.question.kind for reply in outcome.replies}):
            hits = [reply.right for reply in outcome.replies if reply.question.kind == kind]
            table.setdefault(kind, {"n": len(hits)})[name] = sum(hits) / len(hits)
    return table


def router_infos(replies: Iterable[Reply]) -> list[UpdraftInfo]:
    return [reply.info for reply in replies if reply.info is not None]
