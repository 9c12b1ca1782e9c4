"""From a file to an engine: what is refused before anything is loaded, and what it costs."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from homes import home_in
from updraft.embedded.pocket import pocket_small_gguf
from updraft.local_engine import opening
from updraft.local_engine import trial_load as trial
from updraft.local_engine.engine import LocalEngine, LocalOptions, LoraAdapter
from updraft.local_engine.machine.memory_fit import MemoryPlan
from updraft.local_engine.opening import EngineCandidate, open_engine, plan_of
from updraft.local_engine.runtime.tuned_options import TunedSettings, remember
from updraft.local_engine.tuning.search import Candidate, _Search
from updraft.model_files.gguf_reader import read_header
from updraft.protocol.errors import InvalidRequestError, ModelLoadError, ModelTooLargeError
from updraft.protocol.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(home_in(tmp_path)))


def answer(engine: LocalEngine) -> list[int]:
    return [token.id for token in engine.start_text("2 + 2", GREEDY)]


def test_a_model_of_our_own_needs_no_trial(monkeypatch) -> None:
    monkeypatch.setattr(trial, "run_child", None)
    with open_engine(pocket_small_gguf(), sound=pocket_small_gguf()) as engine:
        assert answer(engine)


def test_oversized_models_are_not_loaded(monkeypatch) -> None:
    monkeypatch.setattr(opening, "free_memory", lambda _machine: 2**20)
    monkeypatch.setattr(opening, "LocalEngine", None)
    with pytest.raises(ModelTooLargeError, match=r"pocket-small\.gguf needs .* 1\.0 MB are free"):
        open_engine(pocket_small_gguf(), sound=pocket_small_gguf())


def test_a_missing_file(tmp_path) -> None:
    with pytest.raises(ModelLoadError, match="Cannot open"):
        open_engine(tmp_path / "none.gguf", sound=pocket_small_gguf())


def test_plans_follow_the_options(tiny) -> None:
    header = read_header(tiny.gguf)
    plan = plan_of(header, LocalOptions())  # eight answers with 256 tokens each, exact as small models are
    assert plan == MemoryPlan(
        8 * 256, kv_cache_type="f32", ubatch=512, outputs=plan.outputs, sequences=8, flash_attention=False
    )
    options = LocalOptions(max_model_len=64, kv_cache_type="q8_0", ubatch=32, max_num_seqs=1)
    shared = plan_of(header, options)  # with ids and cells for looking back
    assert shared == MemoryPlan(64 + 2, kv_cache_type="q8_0", ubatch=32, outputs=shared.outputs, sequences=18)
    with pytest.raises(InvalidRequestError):
        plan_of(header, LocalOptions(max_model_len=-1))


def test_tuned_options_apply_and_flags_win(tiny) -> None:
    remember(tiny.gguf, TunedSettings(threads=2, repack=False, max_model_len=128))
    candidate = EngineCandidate.of(tiny.gguf, LocalOptions(max_model_len=200), sound=pocket_small_gguf())
    assert candidate.options == LocalOptions(max_model_len=200, threads=2, repack=False)
    with candidate.load() as engine:
        assert engine.context_length == 200
    tiny.gguf.touch()  # another file, as far as anyone knows
    assert EngineCandidate.of(tiny.gguf, None, sound=pocket_small_gguf()).options == LocalOptions()


def test_tuned_options_yield_to_contradicting_flags(tiny) -> None:
    remember(tiny.gguf, TunedSettings(threads=2, kv_cache_type="q8_0"))
    options = LocalOptions(flash_attention=False)
    candidate = EngineCandidate.of(tiny.gguf, options, sound=pocket_small_gguf())
    assert candidate.options == LocalOptions(flash_attention=False, threads=2)
    with pytest.raises(InvalidRequestError, match="needs flash attention"):
        EngineCandidate.of(tiny.gguf, replace(options, kv_cache_type="q8_0"), sound=pocket_small_gguf())


@pytest.mark.parametrize(
    "option",
    [
        {"flash_attention": "off"},
        {"repack": "no"},
        {"prompt_logprobs": "x"},
        {"model_id": 5},
        {"tool_call_parser": None},
        {"adapters": "a.gguf"},
        {"adapters": ("a.gguf",)},
        {"adapters": (LoraAdapter(None),)},
        {"adapters": (LoraAdapter("a.gguf", "1"),)},
        {"adapters": (LoraAdapter("a.gguf", float("nan")),)},
    ],
)
def test_options_of_a_wrong_type_are_refused_by_name(option) -> None:
    (name,) = option
    with pytest.raises(InvalidRequestError, match=f"^{name} must be") as refused:
        LocalOptions(**option).check()
    assert refused.value.param == name


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_of_files_need_not_be_utf_8(tmp_path, caplog) -> None:
    caplog.set_level("INFO", "updraft")  # each line can be written as UTF-8, as pytest-xdist does
    path = tmp_path / os.fsdecode(b"mod\xe8le.gguf")
    with pytest.raises(ModelLoadError, match="Cannot open") as missing:
        open_engine(path, sound=pocket_small_gguf())
    assert r"mod\udce8le.gguf" in missing.value.message
    shutil.copy(pocket_small_gguf(), path)
    with open_engine(path, sound=pocket_small_gguf()) as engine:
        assert engine.model_id == "mod\ufffdle"
        assert answer(engine)
    assert r"Testing mod\udce8le.gguf" in caplog.text
    search = _Search(path, time.monotonic() + 600, lambda _: None)
    result = search._measure(Candidate(1, repack=True, ubatch=32, kv_cache_type="f32"), "", prompt=8, seconds=0.05)
    speed, note = (
        result.answer_tokens_per_s,
        ascii(result.note),
    )  # a report with what is no UTF-8 ends a worker of xdist
    assert speed > 0, note


def test_a_cache_in_eight_bits() -> None:
    """Near the exact one, but not the same: the option arrives."""
    path = pocket_small_gguf()
    with LocalEngine.load(path) as exact, LocalEngine.load(path, LocalOptions(kv_cache_type="q8_0")) as small:
        tokens = list(range(3, 40))
        difference = abs(exact.score(tokens) - small.score(tokens)).max()
    assert 1e-5 < difference < 3


def test_a_known_model_opens_in_a_moment() -> None:
    """Safety's addition to a warm start, in processor time."""

    def opened(load) -> float:
        started = time.process_time()
        load().close()
        return time.process_time() - started

    path: Path = pocket_small_gguf()
    open_engine(path, sound=path).close()
    plain = min(opened(lambda: LocalEngine.load(path)) for _ in range(5))
    safe = min(opened(lambda: open_engine(path, sound=path)) for _ in range(5))
    assert safe - plain < 0.05
