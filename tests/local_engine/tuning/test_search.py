"""`updraft tune` decides honestly: by more than the noise, twice, and within its time."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import msgspec
import pytest
from updraft.embedded.pocket import pocket_small_gguf
from updraft.local_engine.engine import LocalOptions
from updraft.local_engine.machine.child_process import ChildOutcome
from updraft.local_engine.machine.machine import Machine
from updraft.local_engine.machine.memory_fit import estimate, quantizable
from updraft.local_engine.opening import EngineCandidate, plan_of
from updraft.local_engine.runtime.tuned_options import TunedSettings, recall
from updraft.local_engine.tuning import search as tuning
from updraft.local_engine.tuning.search import tune
from updraft.model_files.gguf_reader import read_header
from updraft.protocol.errors import ModelLoadError, ModelTooLargeError

MEMORY = 2**40


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Runs that give what a function of (job, number of runs so far) says, on a machine of eight cores."""
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tuning, "ensure_loadable", lambda path: None)
    monkeypatch.setattr(tuning, "this_machine", lambda: Machine("p", 8, 16, None, MEMORY, MEMORY, ()))
    monkeypatch.setattr(tuning, "default_threads", lambda parameters: 8)

    def make(speed, noise: float = 0.0):
        runs = []

        def run_child(module, arguments, *, timeout_s):
            job = json.loads(arguments[0])
            runs.append({**job, "timeout_s": timeout_s})
            speeds = speed(job, len(runs))
            if isinstance(speeds, ChildOutcome):
                return speeds
            slices = [speeds * (1 - noise), speeds, speeds, speeds * (1 + noise)]
            return ChildOutcome("ok", result={"prompt": [speeds * 5, speeds * 5], "answer": slices})

        monkeypatch.setattr(tuning, "run_child", run_child)
        return runs

    return make


def test_a_clear_winner_is_remembered(tiny, measured) -> None:
    runs = measured(lambda job, _: {8: 10.0, 16: 8.0, 4: 15.0, 1: 3.0}[job["threads"]])
    tuned = tune(tiny.gguf, MEMORY)
    assert tuned.settings == TunedSettings(threads=4) == recall(tiny.gguf)
    assert tuned.gain == pytest.approx(1 / 3)
    assert [run.note for run in tuned.runs[-2:]] == ["default again", "winner again"]
    assert len({job["prompt"] for job in runs[1:]}) == 1


def test_differences_within_noise_change_nothing(tiny, measured) -> None:
    measured(lambda job, _: 10.4 if job["threads"] == 4 else 10.0)
    assert tune(tiny.gguf, MEMORY).settings == TunedSettings()
    measured(lambda job, _: 11.5 if job["threads"] == 4 else 10.0, noise=0.2)
    assert tune(tiny.gguf, MEMORY).settings == TunedSettings()


def test_single_win_is_not_enough(tiny, measured) -> None:
    """The default was slow because somebody else was busy."""
    measured(lambda job, number: 5.0 if number == 2 else 10.0)
    tuned = tune(tiny.gguf, MEMORY)
    assert tuned.settings == TunedSettings()
    assert tuned.runs[-1].note == "winner again"


def test_two_settings_together(tiny, measured) -> None:
    measured(lambda job, _: (10.0 if job["threads"] == 8 else 14.0) * (1 if job["ubatch"] == 512 else 1.3))
    assert tune(tiny.gguf, MEMORY).settings == TunedSettings(threads=16, ubatch=128)


def test_a_candidate_that_crashes_only_loses(tiny, measured) -> None:
    measured(lambda job, _: 10.0 if job["threads"] == 8 else ChildOutcome("crashed", "SIGSEGV"))
    tuned = tune(tiny.gguf, MEMORY)
    assert tuned.settings == TunedSettings()
    assert any("SIGSEGV" in run.note for run in tuned.runs)
    measured(lambda job, _: ChildOutcome("crashed", "SIGILL"))
    with pytest.raises(ModelLoadError, match="SIGILL"):
        tune(tiny.gguf, MEMORY)


def test_no_time_is_said(tiny, measured, monkeypatch) -> None:
    monkeypatch.setattr(tuning, "BUDGET_S", 0.0)
    measured(lambda job, _: 10.0)
    tuned = tune(tiny.gguf, MEMORY)
    assert tuned.settings == TunedSettings()
    assert len(tuned.runs) == 1
    assert "threads" in tuned.skipped


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    fake = SimpleNamespace(now=0.0, monotonic=lambda: fake.now)
    monkeypatch.setattr(tuning, "time", fake)
    return fake


def pass_by(clock: SimpleNamespace, seconds: float) -> float:
    clock.now += seconds
    return 10.0


def test_a_first_load_on_trial_takes_nothing_of_the_time(tiny, measured, monkeypatch, clock) -> None:
    runs = measured(lambda job, _: pass_by(clock, 1.0))
    monkeypatch.setattr(tuning, "ensure_loadable", lambda path: pass_by(clock, 200))
    assert tune(tiny.gguf, MEMORY).skipped == ()
    assert runs[0]["timeout_s"] == tuning.BUDGET_S


def test_a_model_that_is_slow_to_load_gets_its_default_measured(tiny, measured, clock) -> None:
    runs = measured(lambda job, number: pass_by(clock, 25.0 if number == 1 else 2.0))
    assert tune(tiny.gguf, MEMORY).settings == TunedSettings()
    assert [run["timeout_s"] for run in runs] == [tuning.BUDGET_S, 10.0]


def test_little_memory_takes_a_smaller_cache_before_fewer_answers_and_a_smaller_context(tmp_path, measured) -> None:
    measured(lambda job, _: 10.0)
    path = shutil.copy(pocket_small_gguf(), tmp_path / "model.gguf")

    def need(**options) -> int:
        return estimate(read_header(path), plan_of(read_header(path), LocalOptions(**options))).total

    def tuned(available: int) -> TunedSettings:
        """The chosen settings fit in `available` bytes."""
        settings = tune(path, available).settings
        EngineCandidate.of(path, None, sound=path).check(available)
        return settings

    assert tuned(need()) == TunedSettings()
    assert tuned(need() - 1) == TunedSettings(kv_cache_type="q8_0")
    assert tuned(need(kv_cache_type="q8_0") - 1) == TunedSettings(kv_cache_type="q8_0", max_num_seqs=4)
    alone = need(kv_cache_type="q8_0", max_num_seqs=1)
    assert tuned(alone) == TunedSettings(kv_cache_type="q8_0", max_num_seqs=1)
    assert tuned(alone - 1).max_model_len == 256
    least = need(kv_cache_type="q8_0", max_num_seqs=1, max_model_len=256)
    assert tuned(least) == TunedSettings(kv_cache_type="q8_0", max_num_seqs=1, max_model_len=256)
    with pytest.raises(ModelTooLargeError, match="use a smaller or more strongly quantized model"):
        tune(path, least - 1)


def test_the_default_that_is_measured_is_the_engines(tiny, measured) -> None:
    runs = measured(lambda job, _: 10.0)
    tune(tiny.gguf, MEMORY)
    default = plan_of(read_header(tiny.gguf), LocalOptions())
    assert (runs[0]["ubatch"], runs[0]["kv_cache_type"]) == (default.ubatch, default.kv_cache_type)


def test_heads_that_are_no_whole_blocks_keep_their_type(tiny) -> None:
    """Heads of 16 values: llama.cpp would refuse a quantized cache."""
    assert not quantizable(read_header(tiny.gguf))
    assert quantizable(read_header(pocket_small_gguf()))


def test_stored_settings_have_their_former_names() -> None:
    stored = b'{"context_length":256,"parallel":1}'
    assert msgspec.json.decode(stored, type=TunedSettings) == TunedSettings(max_model_len=256, max_num_seqs=1)
