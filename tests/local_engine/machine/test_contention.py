"""Threads that would have to share a processor are not started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import pairwise

import gguf
import pytest
from gguf_shapes import Shape, write
from hypothesis import given
from hypothesis import strategies as st
from updraft.kernels.runtime import contention
from updraft.kernels.runtime.contention import ProcessorUsage, ThreadGovernor, usage
from updraft.local_engine.engine import LocalEngine, LocalOptions
from updraft.protocol.sampling import SamplingParams


@pytest.fixture
def clock(monkeypatch):
    """A time of our own, in seconds."""

    class Clock:
        now = 0.0

    monkeypatch.setattr(contention.time, "monotonic", lambda: Clock.now)
    return Clock


def governed(
    clock, most: int, processors: int, others: list[float], own: float = 1.0, step_s: float = 0.3
) -> list[int]:
    """The threads chosen when others use that many processors, look by look."""
    states = [ProcessorUsage(0.0, 0.0, 0.0)]
    for share in others:
        before = states[-1]
        states.append(
            ProcessorUsage(before.wall + step_s, before.busy + (share + own) * step_s, before.own + own * step_s)
        )
    looks = iter(states)
    governor = ThreadGovernor(most, processors=processors, measure=lambda: next(looks))
    chosen = []
    for state in states:
        clock.now = state.wall
        chosen.append(governor.threads())
    return chosen[1:]


@pytest.mark.parametrize(
    ("most", "processors", "others", "threads"),
    [
        (2, 2, [0.0, 0.05, 0.3], [2, 2, 2]),
        (2, 2, [0.6, 1.0, 1.0, 0.0], [1, 1, 1, 2]),
        (2, 2, [2.0], [1]),
        (8, 8, [0.7, 3.0, 9.0], [7, 5, 1]),
        (8, 16, [4.0, 8.0, 10.0], [8, 8, 6]),  # hyper-threads: the first eight have free cores
        (1, 8, [8.0], [1]),
    ],
)
def test_cores_of_other_processes_are_left_free(clock, most, processors, others, threads) -> None:
    assert governed(clock, most, processors, others) == threads


@given(others=st.lists(st.floats(0, 64), min_size=1, max_size=8), most=st.integers(1, 64))
def test_always_between_one_and_most_and_fewer_when_more_is_used(others, most) -> None:
    with pytest.MonkeyPatch.context() as patch:

        class Clock:
            now = 0.0

        patch.setattr(contention.time, "monotonic", lambda: Clock.now)
        chosen = governed(Clock, most, 64, sorted(others))
    assert all(1 <= threads <= most for threads in chosen)
    assert all(later <= earlier for earlier, later in pairwise(chosen))


def test_load_is_sampled_five_times_a_second(clock) -> None:
    looks = [ProcessorUsage(0.0, 0.0, 0.0), ProcessorUsage(0.25, 0.5, 0.25), ProcessorUsage(60.0, 100.0, 0.25)]
    left = list(looks)
    governor = ThreadGovernor(2, processors=2, measure=lambda: left.pop(0))
    for now, threads, unseen in ((0.0, 2, 2), (0.1, 2, 2), (0.25, 1, 1), (0.3, 1, 1), (60.0, 1, 0)):
        clock.now = now
        assert governor.threads() == threads
        assert len(left) == unseen


def test_long_steps_are_no_pauses(clock) -> None:
    """Another process starts and ends while every step takes three seconds."""
    assert governed(clock, 2, 2, [1.0, 1.0, 0.0, 0.0], own=1.0, step_s=3.0) == [1, 1, 2, 2]


def test_a_real_pause_is_one(clock) -> None:
    assert governed(clock, 2, 2, [1.5, 1.5], own=0.0, step_s=3.0) == [2, 2]


def test_real_processes_are_seen() -> None:
    """With as many busy processes as processors, at least half of the processors is left to them."""
    count = len(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3)
        governor = ThreadGovernor(max(2, count))
        governor.threads()
        time.sleep(0.5)
        assert governor.threads() <= max(1, count // 2)
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_own_work_is_not_counted_as_other_load() -> None:
    before = usage()
    end = time.process_time() + 0.3  # processor time: others may take as much of the machine as they like
    while time.process_time() < end:
        pass
    after = usage()
    assert after.own - before.own == pytest.approx(0.3, abs=0.15)
    assert after.busy - before.busy >= 0.15


@pytest.mark.soak
def test_at_least_seventy_per_cent_of_the_fair_share(tmp_path) -> None:
    """One processor kept busy by another process: half of it, and the others, are ours by right."""
    count = len(os.sched_getaffinity(0))
    shape = Shape(
        architecture="qwen2", layers=24, width=896, heads=14, kv_heads=2, head=64, feed_forward=4864,
        vocabulary=30_000, kind=gguf.GGMLQuantizationType.Q8_0,
    )  # fmt: skip
    path = write(tmp_path / "half.gguf", shape)
    with LocalEngine.load(path, LocalOptions(max_model_len=512, threads=count)) as engine:
        idle = speed(engine)
        other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            speed(engine, tokens=20)
            shared = speed(engine)
        finally:
            other.kill()
            other.wait()
    fair = idle * (count - 0.5) / count
    print(f"idle {idle:.1f}, beside a busy process {shared:.1f} tokens/s: {shared / fair:.0%} of the fair share")
    assert shared >= 0.7 * fair


def speed(engine: LocalEngine, tokens: int = 60) -> float:
    """Tokens per second of an answer that does not end by itself."""
    run = iter(engine.start_text("a", SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)))
    next(run)
    started = time.perf_counter()
    return sum(1 for _ in run) / (time.perf_counter() - started)
