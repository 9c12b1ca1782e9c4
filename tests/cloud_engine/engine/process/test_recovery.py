"""Failures of single requests: only the culprit fails, and all others get the tokens of a run without the failure."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence

import pytest
from threaded_engine import ThreadedEngine, with_engine
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.process.recovery import Recovery
from updraft.cloud_engine.engine.types.outputs import TokenOutput
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.protocol.errors import RequestFailedError
from updraft.protocol.sampling import SamplingParams

POISON = 96  # a prompt token
Answers = dict[int, list[TokenOutput]]


def is_poisoned(token_ids: Sequence[int]) -> bool:
    return POISON in token_ids


def poison_model(engine: Engine) -> None:
    """The forward pass of a batch with the poison fails."""
    runner = engine._worker.runner
    healthy = runner.compute

    def compute(batch, unread=None):
        if any(is_poisoned(item.state.request.prompt_ids) for item in engine._unread[-1].batch):
            raise RuntimeError("a kernel failed")
        return healthy(batch, unread)

    runner.compute = compute  # type: ignore[method-assign]


def poison_sampler(engine: Engine) -> None:
    """Sampling the fourth token of the poisoned request fails, after some tokens were streamed."""
    healthy = engine._worker.sample

    def sample(sampling):
        states = [state for state in engine._worker.slots.states.values() if state.num_generated_tokens >= 3]
        if any(is_poisoned(state.token_ids[: -state.num_generated_tokens]) for state in states):
            raise RuntimeError("the sampler failed")
        healthy(sampling)

    engine._worker.sample = sample  # type: ignore[method-assign]


def poison_result(engine: Engine) -> None:
    """Applying a result fails, when other requests of the step already have their tokens."""
    healthy = engine._outputs._accept

    def accept(item, *rest):
        if is_poisoned(item.state.request.prompt_ids) and item.state.num_generated_tokens >= 2:
            item.state.token_ids.append(0)
            raise RuntimeError("the result failed")
        return healthy(item, *rest)

    engine._outputs._accept = accept  # type: ignore[method-assign]


def everlasting(poison: Callable[[Engine], None], engine: Engine) -> Engine:
    """Poison the engine again after each reset."""
    reset = engine.reset

    def poisoned_reset():
        lost = reset()
        if poison is poison_result:
            poison(engine)
        return lost

    poison(engine)
    engine.reset = poisoned_reset  # type: ignore[method-assign]
    return engine


def requests_of(prompts: Sequence[list[int]]) -> list[GenerationRequest]:
    """Greedy and sampled, with several answers, penalties, log-probabilities and predictions."""
    kinds = [
        {"params": SamplingParams(temperature=0.0, max_tokens=30)},
        {"params": SamplingParams(temperature=1.0, max_tokens=25), "n": 3},
        {"params": SamplingParams(temperature=0.9, max_tokens=30, seed=7, presence_penalty=1.5, logprobs=2)},
        {"params": SamplingParams(temperature=0.0, max_tokens=20, prompt_logprobs=1), "draft_ids": [5, 6, 7, 8]},
    ]
    return [
        GenerationRequest(f"r{i}", [token % POISON for token in prompt], **kinds[i % len(kinds)])
        for i, prompt in enumerate(prompts)
    ]


async def answers(engine: ThreadedEngine, request: GenerationRequest) -> Answers:
    outputs: Answers = {index: [] for index in range(request.n)}
    async for output in engine.generate(request):
        outputs[output.index].append(output)
    return outputs


def contents(outputs: Answers) -> list[object]:
    """Everything that a client sees, however it is divided into outputs."""
    return [
        (
            [token for output in each for token in output.token_ids],
            [round(score.logprob, 4) for output in each for score in output.logprobs],
            [round(score.logprob, 4) for output in each for score in output.prompt_logprobs],
            each[-1].finish_reason,
            each[-1].stats and (each[-1].stats.prompt_tokens, each[-1].stats.completion_tokens),
        )
        for each in outputs.values()
    ]


@pytest.mark.parametrize("poison", [poison_model, poison_sampler, poison_result])
@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 6}, {"ngram": True}])
@pytest.mark.parametrize("n", [1, 2])
def test_only_the_culprit_fails(poison, options, n, make_engine, make_prompts):
    requests = requests_of(make_prompts(11))
    culprit = GenerationRequest("bad", [1, 2, POISON], SamplingParams(temperature=0.7, max_tokens=20, seed=1), n=n)
    expected: list[list[object]] = []

    async def undisturbed(engine: ThreadedEngine) -> None:
        expected.extend(map(contents, await asyncio.gather(*(answers(engine, request) for request in requests))))

    async def disturbed(engine: ThreadedEngine) -> None:
        mixed = (answers(engine, request) for request in [*requests[:5], culprit, *requests[5:]])
        results = await asyncio.gather(*mixed, return_exceptions=True)
        failure = results.pop(5)
        assert isinstance(failure, RequestFailedError)
        assert (failure.status, failure.code, failure.retryable) == (500, "request_failed", False)
        assert "RuntimeError: " in failure.message
        assert [contents(result) for result in results if isinstance(result, dict)] == expected
        assert engine.failure is None
        assert engine.stats().kv_blocks_used == engine.stats().running == engine.stats().waiting == 0
        assert contents(await answers(engine, requests[0])) == expected[0], "and it serves as before"

    with_engine(make_engine(**options), undisturbed)
    with_engine(everlasting(poison, make_engine(**options)), disturbed)


def test_a_lone_culprit_fails_and_the_engine_serves(make_engine):
    async def scenario(engine: ThreadedEngine) -> None:
        for _ in range(5):
            with pytest.raises(RequestFailedError):
                await answers(engine, GenerationRequest("bad", [POISON]))
        assert engine.failure is None
        assert len((await answers(engine, GenerationRequest("good", [1], SamplingParams(max_tokens=4))))[0]) > 0

    with_engine(everlasting(poison_model, make_engine()), scenario)


def test_culprits_that_leave_hold_nobody(make_engine, make_prompts):
    """A culprit's client closes its connection during the trials."""
    requests = requests_of(make_prompts(4))

    async def scenario(engine: ThreadedEngine) -> None:
        bad = [asyncio.create_task(answers(engine, GenerationRequest(f"bad{i}", [POISON]))) for i in range(4)]
        good = [asyncio.create_task(answers(engine, request)) for request in requests]
        while not engine._recovery.is_active:  # noqa: ASYNC110 - trials are no events
            await asyncio.sleep(0.001)
        for task in bad:
            task.cancel()
        await asyncio.gather(*good)
        assert not engine._recovery.is_active

    with_engine(everlasting(poison_model, make_engine()), scenario)


@pytest.mark.parametrize("num_requests", [1, 2, 3, 16, 255])
@pytest.mark.parametrize("is_late", [False, True])
def test_the_culprit_is_found_in_few_trials(num_requests, is_late):
    """A simulated engine that fails whenever the culprit runs. `is_late`: only after the culprit was cleared once."""
    names = [f"r{i}" for i in range(num_requests)]
    for culprit in names[:: max(1, num_requests // 8)]:
        recovery, running, failures = Recovery(), list(names), 0
        late = {culprit} if is_late and num_requests > 1 else set()
        found = None
        while found is None:
            if culprit in running and not (culprit in recovery.trial and culprit in late):
                failures += 1
                found = recovery.failed(running, running)
                running = []
            else:
                late -= recovery.trial
                recovery.trial.clear()
            running += recovery.returning(names.__contains__)
        assert found == culprit
        assert failures <= (2 if is_late else 1) * (3 + math.log2(num_requests))


def test_every_request_returns_whatever_fails():
    """Random failures, culprits and departures, until all requests have been cleared or convicted."""
    for seed in range(200):
        chance = random.Random(seed)
        names = [f"r{i}" for i in range(chance.randrange(1, 20))]
        culprits = {name for name in names if chance.random() < 0.2}
        recovery, running, gone = Recovery(), list(names), set[str]()
        for _ in range(1000):
            if not running and not recovery.is_active:
                break
            batch = [name for name in running if chance.random() < 0.9] or running
            if culprits & set(batch):
                found = recovery.failed(running, batch)
                assert found is None or found in culprits
                gone |= {found} - {None}
                running = []
            else:
                recovery.trial -= set(batch)
                ended = {name for name in batch if chance.random() < 0.2}
                gone |= ended
                running = [name for name in running if name not in ended]
            returning = recovery.returning(lambda name, gone=gone: name not in gone)
            assert not set(returning) & set(running), "nothing runs twice"
            running += returning
        assert gone == set(names)
