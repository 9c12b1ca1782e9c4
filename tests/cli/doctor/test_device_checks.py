"""`updraft doctor` and `updraft tune` on this machine and on machines that are not this one."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import gguf
import numpy as np
import pytest
from updraft.cli.doctor.device_checks import (
    check_kernels,
    check_memory,
    check_other_load,
    check_processor,
    check_tuning,
    unused_instruction_sets,
)
from updraft.embedded.pocket import pocket_small_gguf
from updraft.local_engine.llama.kernels import KernelsInUse
from updraft.local_engine.machine.machine import Machine, this_machine
from updraft.local_engine.runtime.tuned_options import TunedSettings, remember
from updraft.local_engine.store.find import find
from updraft.local_engine.store.library import Library
from updraft.local_engine.store.pull import pull

MACHINE = Machine("Some Processor", 4, 8, None, 16 * 10**9, 8 * 10**9, ("avx2", "avx512f", "amx_int8"))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path / "home"))


def changed(**fields: object) -> Machine:
    return dataclasses.replace(MACHINE, **fields)  # type: ignore[arg-type]


def test_the_processor() -> None:
    assert check_processor(MACHINE).status == "ok"
    assert check_processor(changed(quota=6.0)).status == "ok"
    limited = check_processor(changed(quota=1.5))
    assert limited.status == "warn"
    assert "1.5" in limited.finding
    assert "1 threads" in limited.fix
    old = check_processor(changed(instruction_sets=("ssse3", "avx")))
    assert old.status == "warn"
    assert "AVX2" in old.finding


def test_a_build_for_another_processor() -> None:
    """AMX is not missed: it is left out on purpose."""
    assert unused_instruction_sets(MACHINE, "CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 1 | ") == []
    assert unused_instruction_sets(MACHINE, "CPU : SSE3 = 1 | AVX = 1 | ") == ["avx2", "avx512f"]


def test_kernels() -> None:
    assert check_kernels(KernelsInUse(("Q8_0", "Q5_0"))).finding == "Updraft's kernels for Q8_0, Q5_0"
    assert check_kernels(KernelsInUse(("Q8_0",), True)).finding == "Updraft's kernels for Q8_0, attention"
    none = check_kernels(KernelsInUse(reason="this processor has no AVX-512 VNNI"))
    assert (none.status, none.finding) == ("ok", "llama.cpp's own kernels: this processor has no AVX-512 VNNI")
    fixable = check_kernels(KernelsInUse(reason="llama-cpp-python was built without our kernels", fix="rebuild it"))
    assert (fixable.status, fixable.fix) == ("warn", "rebuild it")


def test_memory(tmp_path, monkeypatch) -> None:
    assert check_memory(MACHINE).status == "ok"
    monkeypatch.setenv("UPDRAFT_LOCAL", "pocket")
    check = check_memory(MACHINE)
    assert check.status == "ok"
    assert "pocket-small.gguf needs" in check.finding
    tight = check_memory(changed(available=10**6))
    assert tight.status == "fail"
    assert "pocket-small.gguf needs" in tight.finding
    assert "0.0 MB are free" in tight.finding
    library = Library()
    pull(library, find(str(pocket_small_gguf()), name="mine"))
    library.path("mine").write_bytes(b"?" * library.path("mine").stat().st_size)  # `updraft verify` says so
    assert check_memory(MACHINE) == check
    monkeypatch.setenv("UPDRAFT_LOCAL", str(tmp_path / "none.gguf"))
    assert "none.gguf" in check_memory(MACHINE).finding


def test_a_pulled_adapter_is_no_model_that_could_be_too_large(tmp_path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "lora.gguf", "llama")
    writer.add_string("general.type", "adapter")
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.ones((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    check = check_memory(MACHINE)
    pull(Library(), find(str(tmp_path / "lora.gguf"), name="lora"))
    assert check_memory(MACHINE) == check


def test_busy_processors() -> None:
    machine = this_machine()
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(machine.processors)]
    try:
        check = check_other_load(machine)
    finally:
        for process in others:
            process.kill()
            process.wait()
    assert check.status == "warn"


def test_tuning(monkeypatch) -> None:
    monkeypatch.setenv("UPDRAFT_LOCAL", "pocket")
    assert "updraft tune" in check_tuning().fix
    remember(pocket_small_gguf(), TunedSettings())
    assert check_tuning().fix == ""


def test_doctor_reports_the_machine_and_tuned_options(updraft, environment, monkeypatch) -> None:
    done = updraft("tune", "--json", env={"UPDRAFT_LOCAL": "pocket"})
    assert done.returncode == 0, done.stderr
    checks = json.loads(done.stdout)
    assert checks["model"] == "pocket-small.gguf"
    assert checks["runs"][0]["note"] == "default"
    assert all(run["answer_tokens_per_s"] > 0 for run in checks["runs"])
    if checks["gain"] == 0:
        assert not any(checks["settings"].values())
    names = {
        check["name"]: check
        for check in json.loads(updraft("doctor", "--json", env={"UPDRAFT_LOCAL": "pocket"}).stdout)
    }
    assert {"processor", "threads", "memory"} <= set(names)
    assert names["memory"]["status"] == "ok"
    assert "was tuned" in names["tuning"]["finding"]


def test_tune_refuses_nonsense(updraft) -> None:
    assert updraft("tune", "no-such-model").returncode == 1
    assert updraft("tune", "none").returncode == 2
