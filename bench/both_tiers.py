"""Puts prompts to both tiers, each alone, and grades what they say: rows for `updraft calibrate --live`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..classifier.graded_row import AnswerSignals, GradedRow
from ..classifier.grading.agreement import GRADING, ComparableAnswer, grades
from ..protocol.errors import UpdraftError, UpstreamError
from ..protocol.http.wire import WireRequest
from ..protocol.requests import Message
from ..protocol.sampling import SamplingParams
from ..router.tiers.interfaces import CloudUsage
from .questions import Prompt

if TYPE_CHECKING:
    from ..classifier.features.gate_inputs import RunView
    from ..local_engine.engine import LocalEngine
    from ..router.config import RouterConfig
    from ..router.router import Router

__all__ = ["BY_ANSWER", "BY_BOTH", "GRADING", "Live", "ask_both", "grading_of"]

BY_ANSWER = "reference answers of the file"
BY_BOTH = f"reference answers where the file has them, else {GRADING}"


@dataclass(frozen=True, slots=True)
class Live:
    """`rows`: what was graded. `failures`: why a prompt has no row, one line each."""

    rows: list[GradedRow]
    failures: list[str]


def grading_of(questions: Sequence[Prompt]) -> str:
    referenced = sum(question.grade is not None for question in questions)
    return BY_ANSWER if referenced == len(questions) else BY_BOTH if referenced else GRADING


async def ask_both(
    config: RouterConfig,
    engine: LocalEngine,
    questions: Sequence[Prompt],
    on_done: Callable[[], None] = lambda: None,
    *,
    concurrency: int = 4,
) -> Live:
    """Each prompt once to the device and once to the cloud. A prompt that one of them fails on becomes a failure.

    The cloud is asked through a router: within budgets and privacy rules, and with a row in the ledger.
    """
    from ..router.factory import open_cloud
    from ..router.router import Router
    from ..router.state import Tiers

    router = Router(config, Tiers(local=None, cloud=open_cloud(config), gates=None))
    slots = asyncio.Semaphore(concurrency)

    async def one(question: Prompt) -> GradedRow | str:
        async with slots:
            try:
                local, completion = await asyncio.gather(
                    asyncio.to_thread(_run, engine, question.prompt), _from_cloud(router, question.prompt)
                )
            except UpdraftError as error:
                return f"{question.id}: {error.message}"
            on_done()
            return _graded(question, local, completion)

    try:
        await router.start()
        found = await asyncio.gather(*(one(question) for question in questions))
    finally:
        await router.close()
    return Live(
        [row for row in found if isinstance(row, GradedRow)], [failure for failure in found if isinstance(failure, str)]
    )


def _run(engine: LocalEngine, prompt: str) -> RunView:
    from ..classifier.features.gate_inputs import RunView

    messages = [Message("user", prompt)]
    run = engine.start(messages, SamplingParams())  # sampled as it will be where a request says nothing
    try:
        for _token in run:
            pass
        return RunView.of(messages, run, run.signals)
    finally:
        run.close()


async def _from_cloud(router: Router, prompt: str) -> dict[str, Any]:
    """The completion. Raises UpstreamError for whatever there is instead of one."""
    body = msgspec.json.encode({"model": "cloud", "messages": [{"role": "user", "content": prompt}]})
    response = await router.handle(WireRequest("POST", "/v1/chat/completions", body=body))
    answer = msgspec.json.decode(response.body if isinstance(response.body, bytes) else b"{}")
    if response.status != 200:
        raise UpstreamError(str(answer["error"].get("message")))
    return answer


def _graded(question: Prompt, local: RunView, completion: dict[str, Any]) -> GradedRow:
    choice = completion["choices"][0]
    answer = ComparableAnswer(str(choice["message"].get("content") or ""), str(choice.get("finish_reason") or "stop"))
    if question.grade is None:
        weak, strong = grades(ComparableAnswer(local.answer, local.finish_reason), answer)
    else:
        weak, strong = float(question.grade(local.answer)), float(question.grade(answer.text))
    usage = CloudUsage.of(completion)
    return GradedRow(
        prompt=question.prompt,
        weak=weak,
        strong=strong,
        domain=question.kind,
        answer=local.answer,
        signals=AnswerSignals(local.logprobs, local.entropies, local.margins),
        cloud_read=None if usage is None else usage.prompt_tokens,
        cloud_written=None if usage is None else usage.completion_tokens,
    )
