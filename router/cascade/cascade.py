"""The cascade: the path of one request through the gates, as a state machine.

    RULES -> BEFORE -> LOCAL -> AFTER -> DONE          each gate may send the request to CLOUD
        CLOUD -> DONE                                      or FALLBACK -> DONE, with a local answer, if the cloud fails

RULES may also allow only one tier: LOCAL -> DONE without further gates, or CLOUD without a fallback.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from ...protocol.errors import EngineError, UpdraftError
from ...protocol.requests import ChatRequest, Message
from ...protocol.safety.redaction import paired
from ...protocol.sampling import SamplingParams
from ...text.templates.reasoning import ReasoningStyle
from ...text.tool_stream import AnswerParser, AnswerSyntax, OfferedTools
from ..accounting.request_record import RequestRecord
from ..conversations import ConversationDigests
from ..gates.answer_faults import fault_of
from ..gates.exploration import by_confidence
from ..gates.gates import GateDecision, Gates, NoPolicyGates, check_quality
from ..gates.rules import DeadlinePlan, Ruling, plan
from ..request.chat_request import RoutingRequest
from ..state import RouterState
from ..tasks.gates import TaskGates, cloud_decision, gates_of
from ..tiers.failures import CloudFailure
from ..tiers.interfaces import LocalAnswer, LocalGeneration, LocalTier
from .cloud_call import work_of
from .escalation import CloudReply, CloudStreamReply, Escalation

_LONG = 2**12  # length of question plus answer, in characters, above which the gates read them in a thread
_LINE_BEGUN = 16  # number of characters at the end of the answer in which to look for the end of a line
T = TypeVar("T")
_AT_ONCE = 8  # answers of one request
_PLACES = 8  # answers that the device generates at once, unless the settings say otherwise


class State(StrEnum):
    """States of a request, with the names of their trace spans."""

    RULES = "gate rules"
    BEFORE = "gate before"
    LOCAL = "generate local"
    AFTER = "gate after"
    CLOUD = "escalate"
    FALLBACK = "fall back"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class LocalReply:
    """A complete local answer. `further_answers`: other answers if the request asks for several."""

    answer: LocalAnswer
    further_answers: tuple[LocalAnswer, ...] = ()


@dataclass(frozen=True, slots=True)
class LiveReply:
    """A local answer that is streamed while it is generated."""

    run: LocalGeneration


Reply = LocalReply | LiveReply | CloudReply | CloudStreamReply


class Cascade:
    """Cascade of one request. Call `run()` once for the reply, and `aclose()` when the answer is delivered or dropped.

    Raises UpdraftError or CloudFailure only if no answer is possible.
    """

    def __init__(self, job: RoutingRequest, router_state: RouterState, record: RequestRecord) -> None:
        self.job = job
        self.router_state = router_state
        self.tiers = router_state.tiers
        self.record = record
        self.ruling = Ruling(local=False, cloud=False, reason="")
        self._gates = router_state.tiers.gates
        self._conversation: ConversationDigests | None = None
        self._task_gates: TaskGates | None = None  # gates that the request's task prescribes
        self._plan = DeadlinePlan("both")
        self._answer: LocalAnswer | None = None
        self._failure: CloudFailure | None = None
        self._reply: Reply | None = None
        self._run: LocalGeneration | None = None
        self._run_began = 0.0
        self._turns = 1  # runs that the local run waits for, and itself, one after the other
        self.reasoning: ReasoningStyle | None = None  # reasoning style of the local run
        self.escalation = Escalation(job, router_state, record)
        self._steps: dict[State, Callable[[], Awaitable[State]]] = {
            State.RULES: self._rules,
            State.BEFORE: self._before,
            State.LOCAL: self._local,
            State.AFTER: self._after,
            State.CLOUD: self._cloud,
            State.FALLBACK: self._fallback,
        }

    async def run(self) -> Reply:
        state = State.RULES
        while state is not State.DONE:
            with self.record.span.child(state.value):
                state = await self._steps[state]()
        if isinstance(self._reply, LocalReply | LiveReply):
            run = self._reply if isinstance(self._reply, LocalReply) else self._reply.run
            await self.escalation.stop_race(run.answer, "the cloud lost the race")
        if self._reply is None:
            raise EngineError("The cascade ended without a reply.")
        self.answered()
        return self._reply

    async def decide_only(self, *, generates: bool = True) -> State:
        """Run until a cloud would be called or the local answer is accepted, and return that state. Call this instead
        of `run()`. `generates`: False stops before the device generates an answer."""
        state, ends = State.RULES, (State.CLOUD, State.DONE, *(() if generates else (State.LOCAL,)))
        while state not in ends:
            state = await self._steps[state]()
        return state

    async def aclose(self) -> None:
        """Stop everything that still runs for this request. Idempotent."""
        try:
            await self.stop_local()
        finally:
            await self.escalation.aclose()

    # Handlers of the states, which return the next state

    async def _rules(self) -> State:
        await self._check_targets()
        if self.job.chat is not None and self.tiers.local is not None and self.tiers.cloud is not None:
            body, caller = self.job.body, self.record.caller
            self._conversation = await self.read(lambda: ConversationDigests(body, caller))
        self.ruling = await self.escalation.ruling()
        self.decide(GateDecision(0, escalate=not self.ruling.local, reason=self.ruling.reason))
        if not self.ruling.local:
            return State.CLOUD
        return self._plan_for_deadline() if self.ruling.open else State.LOCAL

    async def _before(self) -> State:
        if (decision := await self._of_task() or self._of_conversation()) is not None:
            self.decide(decision)
            return State.CLOUD
        # `begin` may sample the request, which then needs time for both tiers.
        if self._plan.tiers == "both" and self._task_gates is None:
            self._gates = self.gates.begin()
        messages, quality = self.chat.messages, self.job.quality
        decision = await self.read(lambda: self.gates.judge(1, messages, LocalAnswer(), quality))
        if self._plan.tiers == "one":
            decision = replace(decision, reason=f"{decision.reason}; {self._plan.reason}")
            self.ruling = self.ruling if decision.escalate else Ruling(True, False, self._plan.reason)
        self.decide(decision)
        if decision.escalate:
            return State.CLOUD
        above = self.router_state.config.race_above
        races = above is not None and (decision.p_gain or 0.0) >= above and not decision.exploration_chance
        if self.ruling.open and races:
            self.escalation.race(self.cloud_time_left_s)
        return State.LOCAL

    async def _local(self) -> State:
        try:
            if self.chat.num_answers > 1:
                return await self._answer_several()
            run = await self.start_local()
            if self.ruling.open:
                await self.read(lambda: self.gates.read_ahead(self.chat.messages))
            while await self.escalation.until_race_won(anext(run, None)) is not None:
                if self.ruling.open and "\n" in run.answer.text[-_LINE_BEGUN:]:
                    self.gates.read_lines(run.answer.text)
                if await self._stops_early(run.answer):
                    await self.stop_local()
                    return State.CLOUD
                if self._may_stream(run.answer):
                    return self._done(LiveReply(run))
            await self.stop_local()
            if self.escalation.has_won and run.answer.finish_reason is None:
                self.decide(GateDecision(1, escalate=True, reason="raced: the cloud answered first"))
                return State.CLOUD
            self.router_state.latency.observe("local", (time.monotonic() - self._run_began) / self._turns)
        except UpdraftError as error:  # the prompt is too long, the chat template refuses it, or the engine failed
            await self.stop_local()
            if not (self.ruling.cloud or (self._plan.tiers in ("one", "local") and self._failure is None)):
                raise
            self.ruling = Ruling(local=False, cloud=True, reason=error.message)
            self.decide(GateDecision(0, escalate=True, reason=f"beyond the device: {error.message}"))
            return State.CLOUD
        return State.AFTER if self.ruling.open else self._done(LocalReply(run.answer))

    async def _answer_several(self) -> State:
        """Generate several answers without gates, each in a separate run."""
        if self.job.stream:
            run = await self.start_local()
            await anext(run, None)  # wait for the first token, so that an early failure becomes the request's error
            return self._done(LiveReply(run))

        async def one(index: int) -> LocalAnswer:
            began = time.monotonic()
            run = await self.begin_local(index)
            try:
                async for _ in run:
                    pass
            finally:
                self.record.count_local(run.answer, time.monotonic() - began)
                await run.aclose()
            return run.answer

        first, *further_answers = await run_concurrently(self.chat.num_answers, one)
        return self._done(LocalReply(first, tuple(further_answers)))

    async def _after(self) -> State:
        answer = self._answer
        if answer is None:
            raise EngineError("Gate 3 has no answer to judge.")
        decision = await self.read(lambda: self._judged(answer), answer)
        self.decide(decision)
        return State.CLOUD if decision.escalate else self._done(LocalReply(answer))

    async def _cloud(self) -> State:
        if self.escalation.races_excluded_cloud:
            await self.escalation.stop_race(self._answer or LocalAnswer(), "the gates ruled out the raced cloud")
        # Send no draft if there are tools: OpenAI refuses it, and other models use other formats for tool calls.
        draft = "" if self._answer is None or self.tools is not None else paired(self._answer.text)
        try:
            if self.escalation.racing:  # the cloud has been generating since gate 1 and needs no draft
                reply = await self.escalation.race_outcome()
            else:
                reply = await self.escalation.ask(self.cloud_time_left_s, draft=draft)
        except CloudFailure as failure:
            self._failure = failure
            return State.FALLBACK
        self.record.route = "escalated" if self.escalation.took_draft else "cloud"
        return self._done(reply)

    async def _fallback(self) -> State:
        failure = self._failure
        if failure is None or not self.ruling.local or not self.may_fall_back(failure):
            raise failure or EngineError("The cascade fell back to the device without a failure of the cloud.")
        self.record.fell_back(failure)
        self.ruling = Ruling(local=True, cloud=False, reason=self.record.note)
        if self._answer is not None and self._answer.finish_reason is not None:
            return self._done(LocalReply(self._answer))
        try:
            return await self._local()
        except UpdraftError as error:
            self.record.route = None
            raise failure from error

    # Methods that the states above and the live stream share

    @property
    def gates(self) -> Gates:
        if self._gates is None:
            raise EngineError("The router has a local tier but no gates.")
        return self._gates

    @property
    def follows_task(self) -> bool:
        """Return whether the request's task prescribes the gates."""
        return self._task_gates is not None

    @property
    def judged(self) -> LocalAnswer | None:
        """Local answer that the gates can judge, or None if it is incomplete or there are no gates."""
        whole = self._answer is not None and self._answer.finish_reason is not None
        return self._answer if whole and self.job.chat is not None and self.tiers.gates is not None else None

    @property
    def local_text(self) -> str:
        """Text that the device has generated."""
        return "" if self._answer is None else self._answer.text

    @property
    def chat(self) -> ChatRequest:
        if self.job.chat is None:
            raise EngineError("The local tier cannot read this request.")
        return self.job.chat

    @property
    def local(self) -> LocalTier:
        if self.tiers.local is None:
            raise EngineError("The router has no local tier.")
        return self.tiers.local

    @property
    def tools(self) -> OfferedTools | None:
        """Tools that the local answer may call, if any."""
        use = None if self.job.chat is None else self.job.chat.tool_use
        form = None if use is None or self.tiers.local is None else self.local.tool_format
        return None if use is None or form is None else OfferedTools(form, use)

    def decide(self, decision: GateDecision) -> None:
        self.record.decide(decision)
        self.record.route = "cloud" if decision.escalate else "local"

    async def start_local(self, index: int = 0) -> LocalGeneration:
        """Start the local run of answer number `index`. `stop_local()` ends the run."""
        self._run_began = time.monotonic()
        return await self._started(self.begin_local(index))

    async def _started(self, start: Awaitable[LocalGeneration]) -> LocalGeneration:
        """Return the started local run, which counts as a load of the device until `stop_local()`."""
        latency = self.router_state.latency
        self._turns = latency.turns(self._places)
        latency.on_device += 1
        try:
            self._run = await start
        except BaseException:
            latency.on_device -= 1
            raise
        return self._run

    async def begin_local(self, index: int) -> LocalGeneration:
        """Start a local run whose seed is the request's seed plus `index`. The caller closes the run."""
        params = self.chat.sampling()
        if params.seed is not None:
            params = replace(params, seed=params.seed + index)
        chat, use, tools = self.chat, self.chat.tool_use, self.tools
        constraint = chat.constraint()
        if tools is not None:
            constraint = tools.format.constraint(tools.use, constraint)
        self.record.notes = () if constraint is None else constraint.notes
        effort, field = chat.effort
        run = await self.local.start(
            chat.messages,
            params,
            continue_final_message=chat.continue_final_message,
            tools=use,
            constraint=constraint,
            template_options=chat.chat_template_kwargs,
            effort=effort,
        )
        if run.answer.ignores_effort and effort not in (None, "none"):
            field = self.job.names.get("reasoning_effort", field)
            self.record.notes += (f"{field}: no effect, the local model has no setting for reasoning",)
        self.reasoning = None if constraint is not None else run.answer.reasoning
        left = self.local.context_length - run.answer.prompt_tokens
        if params.max_tokens is not None and params.max_tokens > left:
            self.record.notes += (f"max_tokens: the local model's context has {left} tokens left",)
        return run

    def reader(self) -> AnswerParser | None:
        """Return a parser for a local answer, or None if the answer is plain text."""
        return AnswerSyntax(self.tools, self.reasoning).parser()

    async def continue_local(self, messages: Sequence[Message], params: SamplingParams) -> LocalGeneration:
        """Start a local run that continues the last message. `stop_local()` ends the run and records its tokens."""
        self._run_began = time.monotonic()
        options, (effort, _) = self.chat.chat_template_kwargs, self.chat.effort
        start = self.local.start(messages, params, continue_final_message=True, template_options=options, effort=effort)
        return await self._started(start)

    async def stop_local(self) -> None:
        """Stop the local run, if any, and keep its answer. Idempotent."""
        run, self._run = self._run, None
        if run is not None:
            self._answer = run.answer
            self.router_state.latency.on_device -= 1
            self.record.count_local(run.answer, time.monotonic() - self._run_began)
            await run.aclose()

    def may_fall_back(self, failure: CloudFailure) -> bool:
        """Return whether the settings allow a local answer after this failure."""
        return failure.allows(self.router_state.config.fallback)

    def cloud_time_left_s(self) -> float:
        """Return the seconds to wait for the cloud, so that time for a local fallback remains before the deadline: 10 %
        of the remaining time if the local answer is finished, or half if both tiers fit into the deadline."""
        remaining = self.job.remaining_s
        if self.ruling.local and self._answer is not None and self._answer.finish_reason is not None:
            remaining *= 0.9
        elif self.ruling.local and self._plan.tiers == "both":
            remaining *= 0.5
        return max(0.001, min(self.router_state.config.cloud_timeout_s, remaining))

    async def read(self, look: Callable[[], T], answer: LocalAnswer | None = None) -> T:
        """Return the result of `look`, which reads the question and `answer`. Long texts are read in a thread."""
        written = 0 if answer is None else len(answer.text)
        long = written + sum(len(message.text) for message in self.chat.messages) > _LONG
        return await asyncio.to_thread(look) if long else look()

    # Helpers

    async def _of_task(self) -> GateDecision | None:
        """Let the request's task choose the gates, and return its decision if it needs no gate. A request with its own
        target keeps the router's gates."""
        book, job, record = self.router_state.tasks, self.job, self.record
        if book is None or job.requested_tier != "auto" or (job.quality or job.confidence) is not None:
            return None
        shapes, key, header = book.shapes, record.caller.key, job.task_header
        shape = await self.read(lambda: shapes.of(job.body, record.model, key, header))
        if shape is None or self._conversation is None:
            return None
        turn = book.turn(shape, self._conversation.now, counts=self.router_state.is_observed)
        record.task = turn.task
        if turn.is_sampled:
            book.begin(turn, record.request_id)
        # A licence needs the whole answer to be judged, for which a request in a hurry has no time.
        self._task_gates = gates_of(turn) if self._plan.tiers == "both" or turn.pin == "local" else None
        self._gates = self._task_gates or self._gates
        return cloud_decision(turn)

    def _of_conversation(self) -> GateDecision | None:
        """Return the decision for the cloud if it has answered earlier in this conversation, else None."""
        conversation, pinned = self._conversation, self._task_gates is not None and self._task_gates.is_pin
        if conversation is None or pinned or self.router_state.conversations.earlier(conversation) != "cloud":
            return None
        return GateDecision(0, escalate=True, reason="the cloud answered earlier in this conversation")

    def answered(self) -> None:
        """Note the tier of the answer for the conversation's next request."""
        if self._conversation is not None and self.router_state.is_observed:
            self.router_state.conversations.answered(self._conversation, self.record.tier)

    async def _check_targets(self) -> None:
        """Check and apply the quality or confidence that a request with `auto` states. Raises InvalidRequestError."""
        job, missing = self.job, self.tiers.local_missing
        if job.requested_tier != "auto":
            return
        if job.confidence is not None and self._gates is not None:
            signal = job.confidence_signal or self.router_state.config.confidence_signal
            self._gates = by_confidence(self._gates, job.confidence, signal)
        if job.quality is not None and missing is None:
            check_quality(self._gates or NoPolicyGates(), job.quality)

    @property
    def _places(self) -> int:
        """Number of answers that the device generates at once."""
        return self.router_state.config.local_options.max_num_seqs or _PLACES

    def _plan_for_deadline(self) -> State:
        """Choose one tier if the deadline leaves no time for both in sequence."""
        latency, work = self.router_state.latency, work_of(self.job.body)
        local_s = latency.local_s(self._places)
        self._plan = plan(self.job.remaining_s, local_s, latency.expected_s(work))
        tiers, reason = self._plan.tiers, self._plan.reason
        self.record.time_dependent |= tiers != "both"
        if tiers in ("both", "one"):
            return State.BEFORE
        self.decide(GateDecision(0, escalate=tiers == "cloud", reason=reason))
        if tiers == "cloud":
            return State.CLOUD
        self.ruling = Ruling(local=True, cloud=False, reason=reason)
        return State.LOCAL

    @property
    def _hold(self) -> int | None:
        """Number of tokens to generate before a stream starts. None: streams wait for gate 3."""
        if self._task_gates is not None:
            return None
        return self.job.hold_tokens if self.escalation.can_continue_stream else None

    def _judged(self, answer: LocalAnswer) -> GateDecision:
        """Return gate 3's decision on the finished answer. Answers with a visible fault escalate without a score."""
        if (fault := fault_of(answer, self.chat, self.tools)) is not None:
            return GateDecision(3, escalate=True, reason=fault)
        decision = self.gates.judge(3, self.chat.messages, answer, self.job.quality)
        if decision.exploration_chance and not self._is_graded_anyway(answer, decision):
            decision = replace(decision, propensity=decision.exploration_chance)
        return decision

    async def _stops_early(self, answer: LocalAnswer) -> bool:
        """Return whether gate 2 escalates. It judges once: after `gates.tokens` tokens, or at the start of a stream."""
        if not self.ruling.open:
            return False
        at = self.gates.tokens
        if self.job.stream and self._hold is not None:
            at = min(at, self._hold)
        if len(answer.tokens) != at or answer.finish_reason is not None:
            return False
        if self.chat.sampling().max_tokens == at:  # the answer ends at this token anyway, so only gate 3 judges it
            return False
        decision = await self.read(lambda: self.gates.judge(2, self.chat.messages, answer, self.job.quality), answer)
        if decision.escalate or self._hold is not None:
            self.decide(decision)
        else:
            self.record.judged(decision)
        return decision.escalate

    def _may_stream(self, answer: LocalAnswer) -> bool:
        """Return whether to start the stream: at once if no gates follow, else after `hold_tokens` tokens. A request
        sampled for exploration waits for all gates, because a stream that has begun cannot escalate."""
        if not self.ruling.open:
            return self.job.stream
        return self._is_past_hold(answer) and not self.record.decision.exploration_chance

    def _is_past_hold(self, answer: LocalAnswer) -> bool:
        """Return whether the answer is long enough to be streamed before gate 3, and more than white space. A
        structured answer waits for all gates, because no cloud could continue in the middle of it."""
        hold = self._hold
        is_long = hold is not None and len(answer.tokens) >= hold and bool(answer.text.strip())
        return self.job.stream and not self.job.structured and is_long

    def _is_graded_anyway(self, answer: LocalAnswer, decision: GateDecision) -> bool:
        """Return whether an escalation by gate 3 leads to a grade of the local answer even without sampling: no stream
        has begun by then, and no smaller cloud may answer instead of the best cloud, which grades."""
        smaller = any(candidate.may_answer(decision.p_gain) for candidate in self.tiers.middle_tiers)
        return not smaller and not self._is_past_hold(answer)

    def _done(self, reply: Reply) -> State:
        self._reply = reply
        return State.DONE


async def run_concurrently(count: int, one: Callable[[int], Awaitable[T]]) -> list[T]:
    """Return the results of `one(0)` to `one(count - 1)`, a few at once. If one fails, the others are cancelled."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def placed(index: int) -> T:
        async with places:
            return await one(index)

    tasks = [asyncio.create_task(placed(index)) for index in range(count)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
