"""Recorded steps: a fresh scheduler makes the same plans from the file, which holds no prompt and no answer."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.kv.kv_cache_manager import KVCacheManager, Window
from updraft.cloud_engine.engine.output.output_processor import OutputProcessor
from updraft.cloud_engine.engine.scheduling import step_record
from updraft.cloud_engine.engine.scheduling.scheduler import Scheduler
from updraft.cloud_engine.engine.scheduling.step_record import Arrival, RecordHeader, StepRecord, plan_hash
from updraft.cloud_engine.engine.step import StepResult
from updraft.cloud_engine.engine.types.outputs import PromptLogprob
from updraft.cloud_engine.engine.types.prediction import PredictionCursor
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.types.request_state import RequestState, ScheduledRequest
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.sampling import ResolvedParams, SamplingParams

END = 2**32 - 1  # the only token that ends an answer in a replay; blocks hold smaller ones


class Recorded:
    """A `Speculator` that grants the recorded drafts."""

    def __init__(self) -> None:
        self.step = StepRecord([], False, 0.0)
        self.draft_tokens = 0

    def grant(self, decodes: Any, other_items: Any, budget: int, grow: Any) -> list[ScheduledRequest]:
        items = {(item.state.request_id, item.state.index): item for item in [*decodes, *other_items]}
        granted: list[ScheduledRequest] = []
        for (request, index, drafter, number), planned in zip(self.step.drafts, self.step.planned, strict=True):
            item = items[request, index]
            assert grow(item.state, item.start + item.num_tokens + number)
            if drafter is None:
                item.draft_ids = [0] * planned
            else:
                drafting = item if item.state.decode is None else ScheduledRequest(item.state, item.num_tokens)
                drafting.drafter, drafting.num_drafts = drafter, number
                granted.append(drafting)
        return granted

    def record(self, *_: object, **__: object) -> None: ...

    def settle(self, *_: object) -> None: ...


class Endless:
    """A grammar that allows everything."""

    error, complete = None, False

    def advance(self, tokens: Sequence[int]) -> int:
        return len(tokens)


class Replay:
    """A fresh scheduler for the steps of a file. Tokens are made up so that equal block hashes mean equal blocks."""

    def __init__(self, path: Path) -> None:
        header, *lines = path.read_bytes().splitlines()
        self.header = msgspec.json.decode(header, type=RecordHeader)
        self.steps = [msgspec.json.decode(line, type=StepRecord) for line in lines]
        self.blocks = {(request, index): hashes for step in self.steps for request, index, hashes in step.blocks}
        self.fillers = count(2**31)
        self.reset()

    def reset(self) -> None:
        config, window = self.header.config, self.header.window
        self.cache = KVCacheManager(
            self.header.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            window=None if window is None else Window(*window),
        )
        self.drafts: Any = Recorded()
        self.unread: deque[tuple[list[ScheduledRequest], list[tuple[int, int]], int]] = deque()
        self.scheduler = Scheduler(config, self.cache, self.drafts, fixed_rows=self.header.fixed_rows)
        self.outputs = OutputProcessor(self.scheduler, self.cache, self.drafts)

    def tokens(self, request: str, index: int, start: int, number: int) -> list[int]:
        size, blocks = self.header.config.block_size, self.blocks.get((request, index), [])
        return [
            (int(blocks[at // size][:8], 16) + at % size) % 2**31 if at // size < len(blocks) else next(self.fillers)
            for at in range(start, start + number)
        ]

    def arrive(self, event: Arrival) -> None:
        params = SamplingParams(
            max_tokens=event.max_tokens or None,
            logprobs=0 if event.has_logprobs else None,
            prompt_logprobs=0 if event.scores_prompt else None,
        )
        resolved = ResolvedParams(temperature=0.0, repetition_detection=event.detects_repetition)
        request = GenerationRequest(
            event.request,
            self.tokens(event.request, 0, 0, event.num_prompt_tokens),
            params,
            [0] * event.num_predicted,
            n=event.n,
            priority=event.priority,
            tenant=event.tenant,
            weight=event.weight,
            embed=event.embed,
        )
        grammar: Any = Endless() if event.is_constrained else None
        states = [
            RequestState(
                request,
                event.max_tokens,
                resolved,
                0,
                frozenset([END]),
                list(request.prompt_ids),
                PredictionCursor(request.draft_ids),
                index=index,
                arrived=event.clock,
                grammar=grammar,
            )
            for index in event.resumed or range(event.n)
        ]
        for state in states:
            number = event.resumed.get(state.index, 0)
            state.resume(self.tokens(event.request, state.index, event.num_prompt_tokens, number), 0)
        self.outputs.begin(states)

    def plan(self, step: StepRecord) -> None:
        """Schedule and plan the recorded step, which has another plan if this scheduler works differently."""
        self.drafts.step = step
        batch = self.scheduler.schedule()
        assert [len(item.state.token_ids) for item in batch] == step.lengths
        rows = [(item.start, item.num_tokens) for item in batch]
        assert plan_hash(self.scheduler.plan(batch)) == step.plan
        self.unread.append((batch, rows, self.scheduler.prompt_tokens))

    def run(self, step: StepRecord, following: StepRecord | None) -> None:
        """Replay a step, and the plan of the `following` one if it was made before this step's result was read."""
        if step.reset:
            self.reset()
        for event in step.events:
            if isinstance(event, Arrival):
                self.arrive(event)
            else:
                self.outputs.drop(event.request, event.index)
        if not self.unread:
            self.plan(step)
        if step.overlaps and following is not None and not following.reset:
            self.plan(following)
        if step.is_alone:
            assert not self.scheduler.schedule()
        batch, rows, prompt_tokens = self.unread.popleft()
        self.outputs.process(batch, self.result(step, batch, rows))
        lengths = self.scheduler._lengths.latest  # made-up answers end a token earlier
        for _ in step.final_lengths:
            lengths.pop()
        lengths.extend(step.final_lengths)
        self.scheduler.observe(len(batch), step.step_s, (prompt_tokens, step.num_draft_tokens))

    def result(
        self, step: StepRecord, batch: Sequence[ScheduledRequest], rows: Sequence[tuple[int, int]]
    ) -> StepResult:
        counts: list[int] = []
        tokens: list[int] = []
        scores: dict[int, list[PromptLogprob]] = {}
        embeddings: dict[int, list[float]] = {}
        for index, (item, number, (start, num_tokens)) in enumerate(zip(batch, step.counts, rows, strict=True)):
            state = item.state
            new = self.tokens(state.request_id, state.index, len(state.token_ids), number)
            if index in step.ended and state.request.embed:
                embeddings[state.slot] = [1.0]
            elif index in step.ended:
                new.append(END)
            if state.scores_prompt:
                first = max(start, len(state.prompt_logprobs))
                scored = min(start + num_tokens, state.num_prompt_tokens - 1) - first
                scores[state.slot] = [PromptLogprob(0.0)] * max(0, scored)
            counts.append(len(new))
            tokens += new
        return StepResult(0, counts, tokens, {}, scores, embeddings, dict(step.draft_computed))


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 48},
        {"scheduling_policy": "shortest-prefill", "max_step_ms": 1, "max_num_seqs": 5},
        {"scheduling_policy": "priority", "max_num_seqs": 3},
        {"enable_prefix_caching": False},
    ],
    ids=["default", "preemptions", "pace", "priority", "no cache"],
)
def test_a_fresh_scheduler_makes_the_recorded_plans(
    options: dict[str, Any],
    runs_ahead: bool,
    tmp_path: Path,
    make_engine: Any,
    make_prompts: Any,
    ask: Any,
    draft: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With prefix hits, drafts of all kinds, aborts, several answers, scored prompts, embeddings, and a reset."""
    path = tmp_path / "steps"
    drafting = {"ngram": True, "draft_length": "fixed"} | ({} if runs_ahead else {"draft": draft})
    engine = make_engine(record_steps=str(path), block_size=8, eos=(3,), **drafting, **options)
    monkeypatch.setattr(Runner, "runs_ahead", runs_ahead)
    prompts = make_prompts(24, seed=4)
    requests = ask([prompts[number % 16] if number % 3 else prompts[number] for number in range(24)], max_tokens=30)
    requests = [replace(request, request_id=f"r{number}") for number, request in enumerate(requests)]
    requests[3] = replace(requests[3], n=3, params=replace(requests[3].params, temperature=1.0))
    requests[5] = replace(requests[5], draft_ids=[*prompts[5], *range(20)])
    requests[7] = replace(requests[7], params=replace(requests[7].params, prompt_logprobs=1, logprobs=1))
    requests[8] = replace(requests[8], embed=True)
    if options.get("scheduling_policy") == "priority":
        requests = [replace(request, priority=number % 3) for number, request in enumerate(requests)]
    for steps in range(2000):
        if requests and steps % 3 == 0:
            engine.add_request(requests.pop(0))
        for output in engine.step():
            if output.finish_reason and output.request_id == "r2":  # a second turn, which begins with the first
                turn = replace(ask([prompts[2] + list(range(40))], max_tokens=5)[0], request_id="turn")
                requests.insert(0, turn)
        if steps == 12:
            engine.abort("r1")
            engine.abort("r3", 1)
        if steps == 50:
            engine.reset()
        if not (requests or engine.has_work):
            break
    assert options.get("num_gpu_blocks_override") is None or engine.stats().preemptions > 0
    replay = Replay(path)
    assert len(replay.steps) == engine.stats().steps > 60
    assert any(step.overlaps for step in replay.steps) == runs_ahead
    assert any(step.drafts for step in replay.steps)
    for step, following in zip(replay.steps, [*replay.steps[1:], None], strict=True):
        replay.run(step, following)


def test_the_file_keeps_the_latest_steps_and_no_tokens(
    tmp_path: Path, make_engine: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_record, "RECORDED_STEPS", 20)
    path = tmp_path / "steps"
    engine = make_engine(record_steps=str(path))
    for request in ask([[71, 72, 73] * 11], max_tokens=70, ignore_eos=True):
        engine.add_request(request)
    while engine.has_work:
        engine.step()
    replay = Replay(path)
    assert 20 <= len(replay.steps) < 40
    assert [step.lengths for step in replay.steps] == [[33 + at] for at in range(70 - len(replay.steps), 70)]
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"71" not in b"".join(line for line in path.read_bytes().splitlines() if b"Arrival" in line)
    make_engine(record_steps=str(path))
    assert len(path.with_name("steps.previous").read_bytes().splitlines()) == 1 + len(replay.steps)
    assert replay.header.config == replace(EngineConfig(), record_steps=str(path))


def test_a_file_that_cannot_be_written_fails_no_request(
    tmp_path: Path, make_engine: Any, ask: Any, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    with pytest.raises(ConfigurationError, match=r"record_steps: .*No such file"):
        make_engine(record_steps=str(folder / "steps"))
    folder.mkdir()
    engine = make_engine(record_steps=str(folder / "steps"))
    shutil.rmtree(folder)
    assert len(run(engine, ask([[1, 2, 3]], max_tokens=4, ignore_eos=True))[0].token_ids) == 4
    assert caplog.text.count("Steps cannot be recorded") == 1


torch.set_num_threads(1)
