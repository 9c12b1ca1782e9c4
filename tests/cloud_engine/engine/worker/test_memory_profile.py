"""Memory planning against scripted figures of a device: the arithmetic, the file for the next start, and its key."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from updraft.cloud_engine.engine.config import MAX_DRAFT_TOKENS, EngineConfig
from updraft.cloud_engine.engine.kv.sizing import KVCacheSize, block_bytes
from updraft.cloud_engine.engine.worker.memory_profile import MemoryFigures, gpu_cache_bytes
from updraft.cloud_engine.engine.worker.model_runner import Runner
from updraft.cloud_engine.engine.worker.warm_up import largest_step
from updraft.protocol.errors import ConfigurationError

MIB, GIB = 2**20, 2**30
#: An 80 GB device with 16 GiB of weights. A step takes 3 GiB and 100 MiB outside of torch; graphs take 700 MiB.
LOADED = MemoryFigures(80 * GIB, 63 * GIB, 16 * GIB, 16 * GIB, 16 * GIB)
WITH_RUNNER = replace(LOADED, free=62 * GIB, reserved=17 * GIB, allocated=17 * GIB, peak=17 * GIB)
COMPUTED = replace(LOADED, free=57 * GIB - 100 * MIB, reserved=22 * GIB, allocated=17 * GIB, peak=20 * GIB)
SETTLED = replace(WITH_RUNNER, free=62 * GIB - 100 * MIB)
CAPTURED = replace(SETTLED, free=SETTLED.free - 700 * MIB, reserved=17 * GIB + 600 * MIB)
MEASURED = [WITH_RUNNER, COMPUTED, SETTLED, CAPTURED]
CONFIG = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64)
EXPECTED = int(0.92 * 80 * GIB) - 17 * GIB - 3 * GIB - 100 * MIB - 700 * MIB


class ScriptedMemory:
    """A device that gives these figures, one after the other."""

    name = "NVIDIA H100 80GB HBM3"

    def __init__(self, *figures: MemoryFigures) -> None:
        self._figures: Iterator[MemoryFigures] = iter(figures)
        self.settled = 0

    def settle(self) -> None:
        self.settled += 1

    def figures(self) -> MemoryFigures:
        return next(self._figures)

    @property
    def left(self) -> int:
        return len(list(self._figures))


@pytest.fixture(autouse=True)
def profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of profiles."""
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "memory"


def test_blocks_are_what_the_peak_and_graphs_leave(target) -> None:
    memory = ScriptedMemory(LOADED, *MEASURED)
    available = gpu_cache_bytes([target], CONFIG, memory)
    assert available == EXPECTED and memory.left == 0
    endless = EngineConfig(max_num_seqs=2**25, max_num_batched_tokens=2**25)
    assert KVCacheSize.of([target], endless, available).num_blocks == EXPECTED // block_bytes(target, 16)


def test_the_next_start_reads_the_profile(target, profiles: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Memory that another process uses by then is not given away."""
    gpu_cache_bytes([target], CONFIG, ScriptedMemory(LOADED, *MEASURED))
    (path,) = profiles.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    with caplog.at_level(logging.INFO, "updraft"):
        other_use = replace(LOADED, free=60 * GIB)
        assert gpu_cache_bytes([target], CONFIG, ScriptedMemory(other_use)) == EXPECTED - 3 * GIB
    assert f"(read from {path})" in caplog.text and "step 3.10 GiB, CUDA graphs 0.68 GiB" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "{}", '{"step": 0, "graphs": 1}', '{"step": 1.5, "graphs": -1}'])
def test_an_unreadable_profile_is_measured_again(
    text: str, target, profiles: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gpu_cache_bytes([target], CONFIG, ScriptedMemory(LOADED, *MEASURED))
    (path,) = profiles.iterdir()
    path.write_text(text)
    assert gpu_cache_bytes([target], CONFIG, ScriptedMemory(LOADED, *MEASURED)) == EXPECTED
    assert f"{path} is ignored, and memory is measured again" in caplog.text
    assert gpu_cache_bytes([target], CONFIG, ScriptedMemory(LOADED)) == EXPECTED
    assert [each.name for each in profiles.iterdir()] == [path.name]  # no temporary file remains


def test_a_profile_that_cannot_be_kept_is_used(target, profiles: Path, caplog: pytest.LogCaptureFixture) -> None:
    profiles.parent.mkdir()
    profiles.write_text("not a folder")
    assert gpu_cache_bytes([target], CONFIG, ScriptedMemory(LOADED, *MEASURED)) == EXPECTED
    assert "The next start measures memory again" in caplog.text


def test_other_models_limits_devices_and_versions_are_measured(
    make_llama, monkeypatch: pytest.MonkeyPatch, profiles: Path
) -> None:
    def starts(models, config: EngineConfig, device: str = ScriptedMemory.name) -> int:
        memory = ScriptedMemory(LOADED, *MEASURED * len(models))
        memory.name = device
        gpu_cache_bytes(models, config, memory)
        return len(list(profiles.iterdir()))

    assert starts([make_llama(0)], CONFIG) == 1
    assert starts([make_llama(7)], CONFIG) == 1  # other values of the same layout
    assert starts([make_llama(0)], replace(CONFIG, gpu_memory_utilization=0.5, max_step_ms=100)) == 1
    assert starts([make_llama(0, vocab_size=101)], CONFIG) == 2
    assert starts([make_llama(0).to(torch.bfloat16)], CONFIG) == 3
    assert starts([make_llama(0)], replace(CONFIG, max_num_seqs=9)) == 4
    assert starts([make_llama(0)], replace(CONFIG, max_num_batched_tokens=65)) == 5
    assert starts([make_llama(0)], CONFIG, "NVIDIA L4") == 6
    assert starts([make_llama(0), make_llama(1)], CONFIG) == 7
    monkeypatch.setattr(torch, "__version__", "9.0")
    assert starts([make_llama(0)], CONFIG) == 8


def test_two_models_take_turns_but_keep_their_graphs(target, draft) -> None:
    smaller = [WITH_RUNNER, replace(COMPUTED, free=62 * GIB, reserved=17 * GIB, peak=18 * GIB), SETTLED, CAPTURED]
    memory = ScriptedMemory(LOADED, *MEASURED, *smaller)
    assert gpu_cache_bytes([target, draft], CONFIG, memory) == EXPECTED - 700 * MIB


def test_a_full_device_leaves_nothing(target) -> None:
    assert gpu_cache_bytes([target], CONFIG, ScriptedMemory(replace(LOADED, free=8 * GIB), *MEASURED)) == 0


def test_nothing_is_measured_on_a_cpu_or_for_a_given_number_of_blocks(target, profiles: Path) -> None:
    assert gpu_cache_bytes([target], CONFIG) is None
    assert gpu_cache_bytes([target], replace(CONFIG, num_gpu_blocks_override=9), ScriptedMemory()) is None
    assert not profiles.exists()


def test_too_little_memory_for_the_largest_step_is_an_error(target, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Runner, "compute_zeros", fail)
    with pytest.raises(ConfigurationError, match="for a step of 64 tokens: lower max_num_batched_tokens"):
        gpu_cache_bytes([target], CONFIG, ScriptedMemory(LOADED, WITH_RUNNER))


@pytest.mark.parametrize(("sequences", "tokens"), [(8, 64), (7, 100), (1, 1000), (64, 64), (256, 8192)])
def test_the_largest_step_has_all_rows_and_logits(
    sequences: int, tokens: int, target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many sequences as the batch allows, or more if the model's context is too short for one."""
    runner = Runner(target, 64, 16)
    batches = []

    def noted(lengths, num_logits):
        batches.append((lengths, num_logits))
        return torch.zeros(2, target.config.vocab_size)

    monkeypatch.setattr(runner, "compute_zeros", noted)
    largest_step(runner, EngineConfig(max_num_seqs=sequences, max_num_batched_tokens=tokens))
    for lengths, num_logits in batches:
        assert sum(lengths) == tokens and max(lengths) <= target.config.context_length
        assert len(lengths) <= sequences or sequences == 1
        least = min(tokens, sequences + MAX_DRAFT_TOKENS) * (1 - 1 / len(lengths))
        assert sum(min(length, num_logits) for length in lengths) >= least
    assert len(batches) == 2
