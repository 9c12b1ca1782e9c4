"""Sends each prompt to both tiers and grades the answers, for `updraft calibrate --live`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ...accounting.reported_usage import ReportedUsage
from ...classifier.arrays import Array
from ...classifier.graded_row import AnswerSignals, GradedRow, ModelStates
from ...classifier.grading.agreement import ComparableAnswer
from ...classifier.grading.judge import JudgementError, Messages
from ...protocol.errors import BudgetExceededError, UpdraftError, UpstreamError
from ...protocol.http.wire import WireRequest
from ...protocol.sampling import SamplingParams
from .saved_answers import AnsweredPair, SavedAnswers, prompt_key

if TYPE_CHECKING:
    from ...classifier.grading.grader import PairGrader
    from ...classifier.grading.questions import Prompt
    from ...router.config import RouterConfig
    from ...router.router import Router
    from ...router.tiers.interfaces import LocalTier
    from .spending import Spending

_REFUSALS = (401, 403, 404)  # wrong key or model name, so every prompt would fail
_BILLED_PERHAPS = (408, 504)  # timeouts: the cloud may have generated an answer
_ANSWER_BYTES = 4096  # assumed answer size in cost estimates


class RefusedError(UpstreamError):
    """The cloud refuses every request, because the key or the model name is wrong."""


@dataclass(frozen=True, slots=True)
class CloudModel:
    """A cloud model, called through a router of its own, so that budgets, privacy rules and the ledger apply."""

    name: str
    router: Router
    spending: Spending

    async def complete(self, messages: Messages) -> dict[str, Any]:
        """Return the completion. Raises BudgetExceededError before the request, UpstreamError if the request fails."""
        body = _body(messages)
        reserved = self.spending.reserve(self.name, body)
        usd = 0.0
        try:
            response = await self.router.chat(
                WireRequest("POST", "/v1/chat/completions", body=msgspec.json.encode(body))
            )
            answer = msgspec.json.decode(response.body if isinstance(response.body, bytes) else b"{}")
            if response.status != 200:
                usd = reserved if response.status in _BILLED_PERHAPS else 0.0
                failure = RefusedError if response.status in _REFUSALS else UpstreamError
                raise failure(str(answer["error"].get("message")))
            usage = ReportedUsage.of(answer)
            usd = reserved
            if usage is not None and usage.prompt_tokens:
                usd = self.spending.cost(self.name, usage.prompt_tokens, usage.completion_tokens)
            return answer
        finally:
            self.spending.settle(reserved, usd)

    async def verdict(self, messages: Messages) -> str:
        """Return the judge's reply. Raises RefusedError for a refused key, JudgementError for other failures."""
        try:
            answer = await self.complete(messages)
        except RefusedError as error:
            raise RefusedError(f"the judge {self.name}: {error.message}") from error
        except UpstreamError as error:
            raise JudgementError("unreachable", f"the judge {self.name}: {error.message}") from error
        return str(answer["choices"][0]["message"].get("content") or "")


@asynccontextmanager
async def cloud_model(config: RouterConfig, spending: Spending) -> AsyncIterator[CloudModel]:
    """Yield the cloud model of `config`; its router closes when the block ends."""
    from ...router.factory import open_cloud
    from ...router.router import Router
    from ...router.state import Tiers

    router = Router(config, Tiers(local=None, cloud=open_cloud(config), gates=None))
    try:
        await router.start()
        yield CloudModel(config.cloud_model, router, spending)
    finally:
        await router.close()


@dataclass(frozen=True, slots=True)
class LiveRows:
    """Graded rows of a live calibration, and the prompts without a row."""

    rows: list[GradedRow]
    # One line per failed prompt, with the prompt's id and the reason.
    failures: list[str]
    # Number of prompts that the budget left out, and the budget's error message.
    unasked: int = 0
    budget: str = ""


class TierPair:
    """Local model, cloud model and grader. A prompt that either model fails on is reported as a failure."""

    def __init__(self, local: LocalTier, cloud: CloudModel, grader: PairGrader, saved: SavedAnswers) -> None:
        self._local = local
        self._cloud = cloud
        self._grader = grader
        self._kept = saved
        self._budget = ""
        self._refused: RefusedError | None = None

    async def rows(
        self, prompts: Sequence[Prompt], on_done: Callable[[], None] = lambda: None, *, concurrency: int = 4
    ) -> LiveRows:
        """Send each prompt to both models, or reuse its kept answers, and return the graded rows.

        Raises RefusedError if the cloud or the judge refuses the key or the model.
        """
        slots = asyncio.Semaphore(concurrency)

        async def one(prompt: Prompt) -> GradedRow | str | None:
            async with slots:
                try:
                    row = await self._row(prompt)
                except BudgetExceededError as error:
                    self._budget = self._budget or error.message
                    return None
                except RefusedError as error:
                    self._refused = self._refused or error
                    return None
                except UpdraftError as error:
                    return f"{prompt.id}: {error.message}"
                on_done()
                return row

        results = await asyncio.gather(*(one(prompt) for prompt in prompts))
        if self._refused is not None:
            raise self._refused
        return LiveRows(
            [row for row in results if isinstance(row, GradedRow)],
            [failure for failure in results if isinstance(failure, str)],
            sum(result is None for result in results),
            self._budget,
        )

    async def _row(self, prompt: Prompt) -> GradedRow:
        key = prompt_key(prompt.body)
        pair = self._kept.pairs.get(key) or await self._answered(prompt, key)
        if self._refused is not None:
            raise self._refused
        local = ComparableAnswer(pair.local, pair.local_finish)
        weak, strong = await self._grader.grade(prompt, local, ComparableAnswer(pair.cloud, pair.cloud_finish))
        signals = (np.array(values, np.float32) for values in (pair.logprobs, pair.entropies, pair.margins))
        packed = (pair.prompt_logprobs, pair.prompt_hidden, pair.answer_hidden)
        states = (np.frombuffer(data, np.float32) for data in packed)
        return GradedRow(
            prompt=prompt.prompt,
            weak=weak,
            strong=strong,
            domain=prompt.kind,
            answer=pair.local,
            signals=AnswerSignals(*signals),
            states=ModelStates(*states, finish_reason=pair.local_finish) if pair.prompt_hidden else None,
            cloud_read=pair.cloud_read,
            cloud_written=pair.cloud_written,
            messages=tuple(prompt.messages),
        )

    async def _answered(self, prompt: Prompt, key: str) -> AnsweredPair:
        if self._refused is not None:
            raise self._refused
        if self._budget:
            raise BudgetExceededError(self._budget)
        spending = self._cloud.spending
        reserved = spending.likely(self._cloud.name, _body(prompt.body))
        for_judge = spending.hold(reserved + self._judge_costs(prompt)) - reserved
        spending.settle(reserved, 0.0)  # only checks the budget, since `complete` reserves again
        try:
            local, completion = await asyncio.gather(_run(self._local, prompt), self._cloud.complete(prompt.body))
        finally:
            spending.settle(for_judge, 0.0)
        choice, usage = completion["choices"][0], ReportedUsage.of(completion)
        local.key = key
        local.cloud = str(choice["message"].get("content") or "")
        local.cloud_finish = str(choice.get("finish_reason") or "stop")
        if usage is not None:
            local.cloud_read, local.cloud_written = usage.prompt_tokens, usage.completion_tokens
        self._kept.add(local)
        return local

    def _judge_costs(self, prompt: Prompt) -> float:
        """Return the highest likely cost, in US dollars, of asking the judge twice about a prompt."""
        judge = self._grader.judge
        if judge is None or prompt.grade is not None:
            return 0.0
        answers = {"role": "user", "content": "x" * (2 * _ANSWER_BYTES)}
        return 2 * self._cloud.spending.likely(judge.model, _body([*prompt.body, answers]))


def _body(messages: Messages) -> dict[str, Any]:
    """Return the body of a request that the router sends to the cloud model."""
    return {"model": "cloud", "messages": messages}


async def _run(local: LocalTier, prompt: Prompt) -> AnsweredPair:
    """Let the local model answer. Return its answer and signals; the cloud's fields stay empty."""
    run = await local.start(prompt.messages, SamplingParams())  # the defaults, as for a request without parameters
    try:
        async for _token in run:
            pass
        answer = run.answer
        signals = answer.signals
        return AnsweredPair(
            local=answer.text,
            local_finish=answer.finish_reason or "stop",
            logprobs=[float(signal.logprob) for signal in signals],
            entropies=[float(signal.entropy) for signal in signals],
            margins=[float(signal.margin) for signal in signals],
            prompt_logprobs=_packed(answer.prompt_logprobs),
            prompt_hidden=_packed(answer.prompt_hidden),
            answer_hidden=_packed(answer.answer_hidden),
        )
    finally:
        await run.aclose()


def _packed(values: Array | None) -> bytes:
    return b"" if values is None else np.asarray(values, np.float32).tobytes()
