"""Many answers at once through real llama.cpp: each as if it were alone, whatever the others do."""

import asyncio
import gc
import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from updraft.embedded import pocket
from updraft.local_engine.engine import LocalEngine, LocalOptions, LoraAdapter
from updraft.local_engine.runtime.scheduler import HiddenStateProbe, ScheduledStep, Sequence, SequenceShare
from updraft.protocol.errors import EngineError, ModelLoadError, OverloadedError
from updraft.protocol.requests import Message
from updraft.protocol.sampling import SamplingParams
from updraft.text.chat import ChatPrompt

QUESTIONS = [f"What is {17 * i % 90 + 3} {'+-'[i % 2]} {5 * i % 40 + 2}?" for i in range(40)] + [
    f"Reverse the word {word}." for word in ("stone", "river", "lamp", "cloud", "engine", "draft", "paper", "night")
]

# Two hundred of all lengths: the longest prompts take a third of the context.
MANY_QUESTIONS = QUESTIONS + [
    f"Sort: {' '.join(str(17 * i * j % 97) for j in range(1, 2 + i % 50))}" for i in range(152)
]


def ask(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


def greedy(tokens: int = 40) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens)


def drain(engine: LocalEngine) -> None:
    """Wait until nobody is served any more: nothing may be left over."""
    end = time.monotonic() + 60
    loop = engine._resources.loop
    while loop._open or loop._jobs:
        assert time.monotonic() < end, "somebody is still served"
        time.sleep(0.01)
    assert not loop._scheduler.has_work
    cache = loop._scheduler._cache
    assert cache._branches.keys() == cache._parked.keys()
    assert cache.available_cells() == cache._cells


def forget(engine: LocalEngine) -> None:
    cache = engine._resources.loop._scheduler._cache
    assert cache.ensure_free(cache._cells)


@pytest.fixture(scope="module")
def engine():
    with LocalEngine.load(pocket.pocket_small_gguf()) as engine:
        yield engine


@pytest.fixture(scope="module")
def solo(engine):
    """The answers to the questions, one after the other."""
    answers = {}
    for question in QUESTIONS:
        run = engine.start(ask(question), greedy())
        list(run)
        answers[question] = run.token_ids
    return answers


@pytest.mark.parametrize(
    ("ours", "theirs", "questions"),
    [
        (LocalOptions(), {"type_k": 0, "type_v": 0}, MANY_QUESTIONS),
        (LocalOptions(kv_cache_type="f16"), {"flash_attn": True}, QUESTIONS),
    ],
    ids=["exact", "f16"],
)
def test_greedy_answers_equal_llama_cpps_own(ours, theirs, questions):
    """One after the other: the same kernels on the same rows."""
    from llama_cpp import Llama

    reference = Llama(
        str(pocket.pocket_small_gguf()), n_ctx=512, verbose=False, n_threads=1, n_threads_batch=1, **theirs
    )
    with LocalEngine.load(pocket.pocket_small_gguf(), ours) as engine:
        for question in questions:
            run = engine.start(ask(question), greedy(24))
            list(run)
            reference.reset()
            expected = []
            for token in reference.generate(engine.encode_chat(ask(question)), temp=0, repeat_penalty=1.0):
                if token == reference.token_eos() or len(expected) == 24:
                    break
                expected.append(token)
            assert run.token_ids == expected, question
    reference.close()


def test_all_at_once_equals_one_after_the_other(engine, solo):
    runs = {question: engine.start(ask(question), greedy()) for question in QUESTIONS}
    for question, run in runs.items():
        assert [token.id for token in run if token.id in run.token_ids] == solo[question]
        assert run.prompt_logprobs is not None
        assert len(run.prompt_logprobs) == run.prompt_tokens - 1
        assert run.answer_hidden is not None
    drain(engine)


def test_signals_are_those_of_the_run_alone(tiny):
    """Hidden states too, which have to be looked at again where chunks of prompts are computed in the same step."""
    options = LocalOptions(prompt_logprobs=False, max_num_seqs=4)
    prompts = ["the user " * n + "knows" for n in (1, 20, 3, 14, 7, 25)]
    with LocalEngine.load(tiny.gguf, options) as engine:

        def observed(run):
            list(run)
            signals = np.array([(s.logprob, s.entropy, s.margin) for s in run.signals])
            return run.token_ids, signals, run.prompt_hidden, run.answer_hidden

        alone = [observed(engine.start_text(prompt, greedy(n + 1))) for n, prompt in enumerate(prompts)]
        forget(engine)
        runs = [engine.start_text(prompt, greedy(n + 1)) for n, prompt in enumerate(prompts)]
        for run, (ids, *expected) in zip(runs, alone, strict=True):
            got, *values = observed(run)
            assert got == ids
            for left, right in zip(values, expected, strict=True):
                np.testing.assert_allclose(left, right, atol=1e-3)
        drain(engine)


def test_too_few_cells_preempt_and_every_answer_is_whole(tiny):
    with LocalEngine.load(tiny.gguf, LocalOptions(max_model_len=200, prompt_logprobs=False)) as engine:
        loop = engine._resources.loop
        loop._options = replace(loop._options, cells=220)
        loop._reset()
        params = [SamplingParams(temperature=0, max_tokens=120, ignore_eos=True) for _ in range(6)]
        prompts = [f"the assistant answers {i} " for i in range(6)]
        alone = [[t.id for t in engine.start_text(p, s)] for p, s in zip(prompts, params, strict=True)]
        runs = [engine.start_text(p, s) for p, s in zip(prompts, params, strict=True)]
        assert [[token.id for token in run] for run in runs] == alone
        assert loop._scheduler.preemptions > 0
        drain(engine)


@pytest.mark.parametrize("prompt_logprobs", [False, True])
def test_a_long_prompt_does_not_stop_the_others(tiny, prompt_logprobs):
    with LocalEngine.load(tiny.gguf, LocalOptions(max_num_seqs=4, prompt_logprobs=prompt_logprobs)) as engine:
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        talker = engine.start_text("the", params)
        for _ in range(20):
            next(talker)
        steps = []
        measured = engine._resources.loop._budget.measured
        engine._resources.loop._budget.measured = lambda *step: (steps.append(step[:2]), measured(*step))[1]
        long = engine.start_text("1" * 250, greedy(1))
        list(long)
        talker.cancel()
    beside = [chunk for decoding, chunk in steps if chunk and decoding]
    assert len(beside) > 2, "in pieces"
    assert max(beside) < 250
    assert sum(chunk for _, chunk in steps) >= 249, "and the last token by itself, perhaps"


async def collected(run) -> list[int]:
    return [token.id async for token in run]


def test_event_loops_and_threads_read_the_same(engine, solo):
    async def test() -> None:
        runs = [engine.start(ask(question), greedy()) for question in QUESTIONS]
        await asyncio.gather(*map(collected, runs))
        assert [run.token_ids for run in runs] == list(solo.values())
        waiting = asyncio.create_task(collected(engine.start(ask("count"), SamplingParams(temperature=2, seed=3))))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        run = engine.start(ask(QUESTIONS[0]), greedy())
        await anext(run)
        run.cancel()
        assert await collected(run) == []
        assert run.finish_reason is None

    asyncio.run(test())
    gc.collect()
    drain(engine)


def test_a_run_outlives_its_event_loop(engine):
    async def begin():
        run = engine.start(ask(QUESTIONS[0]), greedy())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(collected(run), asyncio.sleep(5)), 0.0)
        return run

    run = asyncio.run(begin())
    list(run)
    drain(engine)


def test_the_queue_has_a_limit(tiny):
    with LocalEngine.load(tiny.gguf, LocalOptions(max_num_seqs=2, max_waiting=3)) as engine:
        runs = [engine.start_text("the", SamplingParams(temperature=0, ignore_eos=True)) for _ in range(5)]
        with pytest.raises(OverloadedError, match="3 requests waiting") as refused:
            engine.start_text("the", greedy())
        assert refused.value.retryable
        for run in runs[:4]:
            run.cancel()
        assert len(list(runs[4])) > 100
        drain(engine)
        assert len(list(engine.start_text("the", greedy(3)))) == 3


def test_close_and_garbage_end_a_run_at_once(engine):
    for end in ("close", "garbage", "garbage unread"):
        run = engine.start(ask("count"), SamplingParams(temperature=2, seed=1, ignore_eos=True))
        if end != "garbage unread":
            next(run)
        if end == "close":
            run.close()
            assert list(run) == []
        del run
        gc.collect()
        drain(engine)


def test_cancel_wakes_a_reader(engine):
    blocker = [engine.start(ask("count"), SamplingParams(temperature=2, ignore_eos=True)) for _ in range(30)]
    waiting = engine.start(ask("x"), SamplingParams(max_tokens=3))
    thread = threading.Thread(target=lambda: list(waiting))
    thread.start()
    waiting.cancel()
    thread.join(60)
    assert not thread.is_alive()
    for run in blocker:
        run.cancel()
    drain(engine)


@pytest.mark.parametrize("code", [1, 2, -1, -3])
def test_a_failing_decode_ends_only_whom_it_met(tiny, monkeypatch, code):
    with LocalEngine.load(tiny.gguf, LocalOptions(max_num_seqs=2)) as engine:
        expected = [token.id for token in engine.start_text("the", greedy(9))]
        context = engine._resources.loop._context
        decode, calls = context._api.llama_decode, []

        def failing(*arguments):
            calls.append(code if len(calls) == 3 else 0)
            return calls[-1] or decode(*arguments)

        monkeypatch.setattr(context._api, "llama_decode", failing)
        met, alone = engine.start_text("the", greedy(9)), engine.start_text("the", greedy(9))
        outcomes = []
        for run in (met, alone, engine.start_text("the", greedy(9))):
            try:
                outcomes.append([token.id for token in run])
            except EngineError as error:
                assert "KV cache" in error.message if code == 1 else f"code {code}" in error.message
                outcomes.append("failed")
        assert outcomes[2] == expected, "the engine goes on"
        assert len(calls) > 3
        if code == 1:
            assert outcomes[:2] == [expected, expected], "a full cache fails no answer while others can wait"
        drain(engine)


def test_a_row_that_is_no_number_ends_its_run_only(tiny, monkeypatch):
    with LocalEngine.load(tiny.gguf, LocalOptions(max_num_seqs=2)) as engine:
        meter, rows, both = engine._resources.loop._meter, [], threading.Event()
        measure = meter.measure

        def poisoned(logits):
            both.wait(10)  # on a busy machine the first would have ended before the second begins
            if len(logits) == 2 and not rows:
                logits[1, 5] = np.nan
                rows.append(1)
            return measure(logits)

        monkeypatch.setattr(meter, "measure", poisoned)
        runs = [engine.start_text("the", greedy(9)) for _ in range(2)]
        both.set()
        assert len(list(runs[0])) == 9
        with pytest.raises(EngineError, match="NaN or infinite"):
            list(runs[1])
        drain(engine)


def test_engine_fault_is_reported_and_survived(tiny, monkeypatch):
    with LocalEngine.load(tiny.gguf) as engine:
        monkeypatch.setattr(engine._resources.loop._scheduler, "complete", lambda step: 1 / 0)
        with pytest.raises(EngineError, match="ZeroDivisionError") as failure:
            list(engine.start_text("the", greedy(9)))
        assert isinstance(failure.value.__cause__, ZeroDivisionError)
        assert len(list(engine.start_text("the", greedy(9)))) == 9


class Recorded:
    """A job whose answer is chosen, and that waits for a hidden state."""

    def __init__(self) -> None:
        self.sequence = Sequence([1, 2, 3], limit=9, pending_hidden=[1], finished=True, computed=3)
        self.seen_there = []

    def choose(self, row, hidden) -> None:
        assert self.sequence.finished

    def take_hidden_state(self, hidden) -> None:
        self.seen_there.append(hidden)
        self.sequence.pending_hidden.clear()


def test_a_job_may_be_seen_again_and_decode_in_one_step(tiny):
    """After a preemption, one that is done may be a token behind again."""
    with LocalEngine.load(tiny.gguf) as engine:
        loop, job = engine._resources.loop, Recorded()
        loop._jobs[job.sequence], loop._open = job, 1
        step = ScheduledStep(1, [SequenceShare(job.sequence, 2, 1, False)], [HiddenStateProbe(job.sequence, 1, None)])
        loop._deliver(step, np.zeros((2, engine._model.vocab_size), np.float32), np.ones((2, 4), np.float32))
        assert len(job.seen_there) == 1
        drain(engine)


def test_an_engine_whose_thread_ended_takes_no_more_requests(tiny, monkeypatch):
    def fail() -> None:
        raise MemoryError

    ended = []
    monkeypatch.setattr(threading, "excepthook", lambda end: ended.append(end.exc_type))
    with LocalEngine.load(tiny.gguf) as engine:
        loop = engine._resources.loop
        monkeypatch.setattr(loop._scheduler, "complete", lambda step: 1 / 0)
        monkeypatch.setattr(loop._scheduler, "remove", lambda *_, **__: 1 / 0)
        monkeypatch.setattr(loop, "_reset", fail)
        run = engine.start_text("the", greedy(9))
        with pytest.raises(EngineError, match="closed"):
            list(run)
        loop._thread.join()
        assert ended == [MemoryError]
        with pytest.raises(EngineError, match="closed"):
            engine.start_text("the", greedy(9))


@pytest.mark.parametrize("kv_cache_type", ["f32", "f16", "q8_0", "q4_0"])
def test_kv_cache_types(engine, kv_cache_type):
    ids = list(range(5, 105))
    with LocalEngine.load(pocket.pocket_small_gguf(), LocalOptions(kv_cache_type=kv_cache_type)) as other:
        difference = np.abs(other.score(ids) - engine.score(ids)).mean()
        low, high = {"f32": (0, 0), "f16": (1e-7, 0.5), "q8_0": (1e-4, 1), "q4_0": (1e-3, 4)}[kv_cache_type]
        assert low <= difference <= high


def test_indivisible_kv_cache_type_is_reported(tiny):
    with pytest.raises(ModelLoadError, match="kv_cache_type"):
        LocalEngine.load(tiny.gguf, LocalOptions(kv_cache_type="q8_0"))


def test_adapters(tiny, lora):
    adapter, merged = lora
    ids = list(range(5, 60))
    with LocalEngine.load(merged) as expected, LocalEngine.load(tiny.gguf) as plain:
        with LocalEngine.load(tiny.gguf, LocalOptions(adapters=(LoraAdapter(adapter, 0.5),))) as engine:
            np.testing.assert_allclose(engine.score(ids), expected.score(ids), atol=1e-3)
            assert np.abs(engine.score(ids) - plain.score(ids)).max() > 0.1
        with LocalEngine.load(tiny.gguf, LocalOptions(adapters=(LoraAdapter(adapter, 0.0),))) as engine:
            np.testing.assert_allclose(engine.score(ids), plain.score(ids), atol=1e-5)
    with pytest.raises(ModelLoadError, match="adapter"):
        LocalEngine.load(tiny.gguf, LocalOptions(adapters=(LoraAdapter(tiny.gguf),)))


def test_a_recurrent_model(recurrent):
    prompts = ["the user " * n + "knows" for n in (1, 9, 3, 14, 7)]
    with LocalEngine.load(recurrent, LocalOptions(prompt_logprobs=False, max_num_seqs=3)) as engine:
        alone = [[token.id for token in engine.start_text(prompt, greedy(12))] for prompt in prompts]
        runs = [engine.start_text(prompt, greedy(12)) for prompt in prompts]
        assert [[token.id for token in run] for run in runs] == alone
        first = engine.start_text(prompts[0], greedy(12))
        list(first)
        assert first.answer_hidden is not None
        drain(engine)
        ids = engine.encode(prompts[0]) + first.token_ids
        prefix = engine._resources.loop._scheduler._cache._find(ids)
        assert prefix[2] == len(ids) - 1, "all that was computed can go on"
        assert len(list(engine._start(ChatPrompt([*ids, 5, 6], None), greedy(5), None, None))) == 5
        drain(engine)


def test_idle_costs_nothing(engine):
    drain(engine)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_forked_process_gets_an_error(engine):
    """The engine's thread is not in it, so that nobody would ever answer."""
    child = os.fork()
    if not child:
        try:
            engine.start_text("0", SamplingParams(max_tokens=1))
        except EngineError as error:
            os._exit(0 if "is a fork" in error.message else 2)
        os._exit(1)
    assert exit_code(child) == 0
    assert list(engine.start_text("0", SamplingParams(max_tokens=1, ignore_eos=True)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("read", [next, lambda run: asyncio.run(run.__anext__())], ids=["thread", "event loop"])
def test_a_run_begun_before_a_fork_is_not_waited_for(engine, read):
    run = engine.start_text("0", greedy(3))
    expected = len(list(engine.start_text("0", greedy(3))))
    child = os.fork()
    if not child:
        try:
            for _ in range(4):  # some may have come before
                read(run)
        except EngineError as error:
            os._exit(0 if "is a fork" in error.message else 2)
        except (StopIteration, StopAsyncIteration):
            os._exit(3)
        os._exit(1)
    assert exit_code(child) == 0
    assert len(list(run)) == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_process_closes_without_waiting(engine):
    """As at its exit, even where a thread that it does not have held the lock."""
    loop = engine._resources.loop
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with loop._lock:
            held.set()
            forked.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if not child:
        loop.close()
        os._exit(0)
    forked.set()
    holder.join()
    assert exit_code(child) == 0
    assert list(engine.start_text("0", SamplingParams(max_tokens=1, ignore_eos=True)))


def exit_code(child: int) -> int:
    """Of a forked process, which is killed after 20 seconds."""
    end = time.monotonic() + 20
    while not (status := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(status[1])
