"""`updraft bench escalation`: time until the cloud's complete answer with the local answer as a draft, and without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ...accounting.reported_usage import ReportedUsage
from ...classifier.grading.questions import Question
from ...protocol.errors import EngineError
from ...protocol.http.forwarding import NOTHING, Forwarding
from ...protocol.http.wire import WireRequest
from ...router.config import RouterConfig
from ...router.factory import endpoint_of, load_tiers
from ...router.router import Router
from ...router.tiers.cloud import HttpCloudTier
from ...router.tiers.connection import CloudEndpoint

Say = Callable[[str], None]
_ARMS = ("draft", "none", "useless")
_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class DraftedQuestion:
    """The cloud's reply to one request: time in seconds until the reply's end, text and usage."""

    seconds: float
    text: str
    usage: ReportedUsage


@dataclass(slots=True)
class EscalationFigures:
    """Replies to one escalated question by arm (`draft`, `none` or `useless`); each arm has one reply per round."""

    questions: dict[str, list[DraftedQuestion]] = field(default_factory=lambda: {arm: [] for arm in _ARMS})

    def seconds(self, arm: str) -> float:
        return statistics.median(one.seconds for one in self.questions[arm])

    @property
    def agree(self) -> bool:
        return len({one.text for arm in self.questions.values() for one in arm}) == 1


class ComparisonTier(HttpCloudTier):
    """A cloud tier that repeats requests with a draft, once per arm and round, and returns the last reply.

    Arm `useless` sends the reversed draft. Every request has its own cache salt, so that no prefix cache is hit.
    """

    def __init__(self, endpoint: CloudEndpoint, rounds: int) -> None:
        super().__init__(endpoint)
        self.continues = False
        self.escalations: list[EscalationFigures] = []
        self._rounds = rounds
        self._sent = 0

    async def complete(
        self, path: str, body: dict[str, Any], *, timeout_s: float, forwarded: Forwarding = NOTHING
    ) -> dict[str, Any]:
        if "prediction" not in body:
            return await super().complete(path, body, timeout_s=timeout_s, forwarded=forwarded)
        escalation, answer = EscalationFigures(), {}
        for turn in range(self._rounds):
            for place in range(len(_ARMS)):
                arm = _ARMS[(turn + place + len(self.escalations)) % len(_ARMS)]
                self._sent += 1
                sent = {**_arm_body(arm, body), "cache_salt": str(self._sent)}
                began = time.perf_counter()
                answer = await super().complete(path, sent, timeout_s=timeout_s, forwarded=forwarded)
                took = time.perf_counter() - began
                text = answer["choices"][0]["message"]["content"] or ""
                usage = ReportedUsage.of(answer) or ReportedUsage()
                escalation.questions[arm].append(DraftedQuestion(took, text, usage))
        self.escalations.append(escalation)
        return answer

    async def takes_drafts(self, model: str, *, timeout_s: float, forwarded: Forwarding = NOTHING) -> bool:  # noqa: ARG002
        return True

    def refuse_drafts(self) -> None:
        """Do nothing: drafts stay enabled during the measurement."""


async def measure(config: RouterConfig, questions: Sequence[Question], rounds: int, say: Say) -> dict[str, float]:
    """Ask the questions greedily, one at a time. Return figures over the questions that are escalated with a draft.

    Raises EngineError if no question was escalated with a draft.
    """
    tiers = await load_tiers(config)
    if tiers.cloud is None or config.cloud_url is None:
        raise EngineError("There is no cloud to escalate to: configure one.")
    comparison = ComparisonTier(endpoint_of(config, config.cloud_url), rounds)
    router = Router(config, replace(tiers, cloud=comparison))
    try:
        for number, question in enumerate(questions, 1):
            await _ask(router, question)
            if number % 50 == 0:
                say(f"{number} questions, {len(comparison.escalations)} escalated with a draft")
    finally:
        await router.close()
        await tiers.cloud.aclose()
    return figures(comparison.escalations[_WARM_UP:])


def figures(escalations: Sequence[EscalationFigures]) -> dict[str, float]:
    """Return figures by name. Names in `_over_none`: median seconds of an arm over the median seconds without a draft.

    Raises EngineError if there are no escalations.
    """
    if not escalations:
        raise EngineError("Too few questions were escalated with a draft: ask more.")
    median = {arm: statistics.median(one.seconds(arm) for one in escalations) for arm in _ARMS}
    usages = [question.usage for one in escalations for question in one.questions["draft"]]
    accepted, rejected = sum(usage.accepted for usage in usages), sum(usage.rejected for usage in usages)
    return {
        "escalations": len(escalations),
        "draft_over_none": median["draft"] / median["none"],
        "useless_over_none": median["useless"] / median["none"],
        "accepted_share": accepted / max(1, accepted + rejected),
        "different_answers": sum(not one.agree for one in escalations),
        "draft_ms": median["draft"] * 1e3,
        "none_ms": median["none"] * 1e3,
        "useless_ms": median["useless"] * 1e3,
        "answer_tokens": statistics.median(usage.completion_tokens for usage in usages),
    }


def _arm_body(arm: str, body: dict[str, Any]) -> dict[str, Any]:
    if arm == "none":
        return {name: value for name, value in body.items() if name != "prediction"}
    if arm == "useless":
        return {**body, "prediction": {**body["prediction"], "content": body["prediction"]["content"][::-1]}}
    return body


async def _ask(router: Router, question: Question) -> None:
    body = {"model": "auto", "messages": [{"role": "user", "content": question.prompt}], "temperature": 0}
    response = await router.chat(WireRequest("POST", "/v1/chat/completions", body=msgspec.json.encode(body)))
    if response.status != 200:
        raise EngineError(f"The router failed on a question: {response.body!r}")
