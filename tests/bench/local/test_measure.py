"""The on-device engine's benchmark, small: every figure is there, and what it compares is what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from updraft.bench.local import measure as local
from updraft.bench.local.gaps import gaps_during_prefill
from updraft.bench.local.peers import LlamaCppPython, RawLlama, Setup, llama_server
from updraft.bench.local.shapes import Shape, q4_k_m, q8_0
from updraft.embedded.pocket import pocket_small_gguf
from updraft.local_engine.engine import LocalEngine, LocalOptions
from updraft.protocol.errors import EngineError
from updraft.protocol.sampling import SamplingParams

PROMPT = "17 + 25 = "
STUB = Path(__file__).parents[2] / "support" / "stub_llama_server.py"
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture
def setup() -> Setup:
    return Setup(pocket_small_gguf(), context_length=512, threads=1)


@pytest.fixture
def engine(setup: Setup):
    options = LocalOptions(max_model_len=512, threads=1, kv_cache_type="f16")
    with LocalEngine.load(setup.path, options) as engine:
        yield engine


def test_every_figure_is_measured() -> None:
    lines: list[str] = []
    options = local.LocalBenchOptions(models=("pocket-small",), tokens=8, rounds=1, prefill_seconds=2)
    figures = local.measure(options, lines.append)
    wanted = {
        "single_over_raw", "single_threads", "single_over_llama_cpp", "streams8_over_raw", "warm_over_cold_ttft",
        "first_token_s", "memory_over_file", "p99_gap_during_prefill_over_idle",
    }  # fmt: skip
    server = "llama_cpp_server" if local.has_llama_cpp_server() else "locked_llama_cpp"
    wanted |= {f"streams8_over_{server}", f"streams8_logprobs_over_{server}"}
    assert wanted <= set(figures)
    assert all(value > 0 for value in figures.values())
    assert figures["single_over_raw"] == figures["pocket-small.single_over_raw"]
    assert figures["memory_over_file"] > 1
    assert lines


def test_the_headline_is_the_worst_of_the_large_files() -> None:
    good = {"single_over_raw": 1.0, "streams8_over_raw": 1.0, "first_token_s": 0.5}
    bad = {"single_over_raw": 0.9, "streams8_over_raw": 0.8, "first_token_s": 0.7}
    assert local.worst([good, bad]) == bad


def test_raw_decoding_writes_what_the_engine_writes(setup: Setup, engine: LocalEngine) -> None:
    prompts = [PROMPT, "Name a fruit.", "1, 2, 3,"]
    raw = RawLlama(setup, streams=len(prompts))
    steps = list(raw.steps([engine.encode(prompt) for prompt in prompts], 12))
    raw.close()
    for number, prompt in enumerate(prompts):
        run = engine.start_text(prompt, GREEDY)
        list(run)
        assert [step[number] for step in steps] == run.token_ids


def test_peers_count_their_tokens(setup: Setup, engine: LocalEngine) -> None:
    for logprobs in (None, 5):
        peer = LlamaCppPython(setup, logprobs=logprobs is not None)
        assert peer.answer(PROMPT, 7, logprobs) == local.OwnEngine(engine).answer(PROMPT, 7, logprobs) == 7
        peer.close()


def test_a_server_is_started_asked_and_ended(setup: Setup, tmp_path: Path) -> None:
    binary = tmp_path / "llama-server"
    binary.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STUB}" "$@"\n')
    binary.chmod(0o755)
    with llama_server(binary, setup, streams=8) as server:
        assert server.answer(PROMPT, 9, 5) == 9
        client = server.client
    assert client.is_closed


def test_a_server_that_ends_at_once_is_named(setup: Setup, tmp_path: Path) -> None:
    binary = tmp_path / "llama-server"
    binary.write_text("#!/bin/sh\nexit 3\n")
    binary.chmod(0o755)
    with (
        pytest.raises(EngineError, match=r"exited with code 3: .*llama-server"),
        llama_server(binary, setup, streams=8),
    ):
        pass


def test_gaps_see_a_prompt_that_holds_the_others_up(engine: LocalEngine) -> None:
    gaps = gaps_during_prefill(engine, "7" * 128, seconds=5)
    assert 0 < gaps["idle_gap_s"] < gaps["prefill_watched_s"]
    assert gaps["p99_gap_during_prefill_over_idle"] > 0


def test_built_files_load_and_count_digits(tmp_path: Path) -> None:
    shape = Shape(layers=2, width=256, kv=2, feed_forward=512, vocabulary=2048, context=1024)
    source = q8_0(tmp_path / "small-q8_0.gguf", shape)
    made = source.stat()
    assert q8_0(source, shape).stat() == made  # not built twice
    smaller = q4_k_m(tmp_path / "small-q4_k_m.gguf", source, threads=1)
    assert smaller.stat().st_size < 0.8 * made.st_size
    for path in (source, smaller):
        with LocalEngine.load(path, LocalOptions(threads=1)) as engine:
            assert len(engine.encode("31415926535")) == 11
            assert len(engine.encode("the cat")) < 7  # merges work
            run = engine.start_text("2718281828", GREEDY)
            assert len(list(run)) == len(run.token_ids) == 12
    assert not list(tmp_path.glob("*.part"))
