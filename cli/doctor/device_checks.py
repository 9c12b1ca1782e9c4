"""Checks of `updraft doctor` on this machine: processor, load, memory and tuning."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...protocol.errors import ModelLoadError, UpdraftError
from .findings import Check

if TYPE_CHECKING:
    from ...local_engine.llama.kernels import KernelsInUse
    from ...local_engine.machine.machine import Machine

_WATCH_S = 0.5
_BUSY = 0.4  # the engine uses one thread less if other processes use this share of a processor
# Instruction sets: the operating system's name for each, and the name in llama.cpp's system info.
_FEATURES = {
    "f16c": "F16C", "fma": "FMA", "avx2": "AVX2", "avx512f": "AVX512", "avx512vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16", "asimd": "NEON", "asimddp": "DOTPROD",
    "i8mm": "MATMUL_INT8", "sve": "SVE",
}  # fmt: skip


def check_processor(machine: Machine) -> Check:
    """Check the processor's instruction sets, and whether a control group limits the processors in use."""
    facts = f"{machine.processor}: {machine.cores} cores, {machine.processors} processors"
    instruction_sets = set(machine.instruction_sets)
    if instruction_sets and not instruction_sets & {"avx2", "asimd"}:
        return Check("processor", "warn", f"{facts}, without AVX2", "expect a few tokens/s: use the smallest models")
    if machine.quota is not None and machine.quota < machine.processors:
        facts += f"; a control group allows {machine.quota:g} processors"
        if machine.quota < machine.cores:
            advice = f"the engine uses {machine.threads} threads; raise the container's CPU limit for more speed"
            return Check("processor", "warn", facts, advice)
    sets = ", ".join(machine.instruction_sets) or "unknown"
    return Check("processor", "ok", f"{facts}; instruction sets: {sets}")


def unused_instruction_sets(machine: Machine, system_info: str) -> list[str]:
    """Return the processor's instruction sets that a build of llama.cpp does not use, according to `system_info`."""
    return [
        name
        for name, feature in _FEATURES.items()
        if name in machine.instruction_sets and f"{feature} = 1" not in system_info
    ]


def check_kernels(served: KernelsInUse) -> Check:
    """Report which operations run on Updraft's kernels. Warn if a fix would let more operations use these kernels."""
    facts = f"Updraft's kernels for {', '.join(served.names)}" if served.names else "llama.cpp's own kernels"
    facts += f": {served.reason}" if served.reason else ""
    return Check("kernels", "warn" if served.fix else "ok", facts, served.fix)


def check_other_load(machine: Machine) -> Check:
    """Measure for half a second how many processors other processes use."""
    from ...kernels.runtime.contention import usage

    before = usage()
    time.sleep(_WATCH_S)
    after = usage()
    other_load = max(0.0, (after.busy - before.busy - (after.own - before.own)) / (after.wall - before.wall))
    load = f"other processes use {other_load:.1f} of {machine.processors} processors"
    facts = f"the engine uses at most {machine.threads} threads; {load}"
    if int(machine.processors - other_load + _BUSY) < machine.threads:
        return Check("threads", "warn", facts, "stop other processes: the engine uses fewer threads while they run")
    return Check("threads", "ok", facts)


def check_memory(machine: Machine) -> Check:
    """Check that the configured local model fits in memory, and list pulled models that do not fit."""
    from ...local_engine.machine.memory_fit import free_memory

    available = free_memory(machine)
    free = f"{machine.available / 1e9:.1f} of {machine.memory / 1e9:.1f} GB free"
    try:
        name, need = _configured_need(available)
        large = _too_large(available)
    except UpdraftError as error:
        return Check(
            "memory", "fail", f"{free}. {error.message}", "choose another model: --local, or local in the settings"
        )
    facts = free if need is None else f"{free}; {name} needs {need / 1e6:,.0f} MB"
    if large:
        return Check("memory", "warn", f"{facts}; too large now: {', '.join(large)}", "try a smaller max_model_len")
    return Check("memory", "ok", facts)


def check_tuning() -> Check:
    """Check whether the configured model was tuned on this machine."""
    from ...local_engine.runtime.tuned_options import recall

    try:
        path = _configured()
        if path is None:
            return Check("tuning", "ok", "no local model is configured")
        if recall(path) is not None:
            return Check("tuning", "ok", f"{path.name} was tuned on this machine")
    except UpdraftError as error:
        return Check("tuning", "warn", error.message, "choose another model: --local, or local in the settings")
    return Check("tuning", "ok", f"{path.name} runs with default settings", "updraft tune may find faster settings")


def _configured() -> Path | None:
    """Return the file of the configured local model; None if the settings name no file. Raises UpdraftError."""
    from ...router.factory import has_model_file, model_file
    from ...router.settings_sources import load_config

    config = load_config()
    return model_file(config) if has_model_file(config) else None


def _configured_need(available: int) -> tuple[str, int | None]:
    from ...embedded.pocket import pocket_small_gguf
    from ...local_engine.opening import EngineCandidate

    path = _configured()
    if path is None:
        return "", None
    candidate = EngineCandidate.of(path, None, sound=pocket_small_gguf())
    candidate.check(available)
    return path.name, candidate.need


def _too_large(available: int) -> list[str]:
    """Return the names of pulled models that need more than `available` bytes."""
    from ...embedded.pocket import pocket_small_gguf
    from ...local_engine.opening import EngineCandidate
    from ...local_engine.store.library import Library

    library, too_large = Library(), list[str]()
    for entry in library.entries():
        if entry.state != "ready":
            continue
        try:
            need = EngineCandidate.of(library.path(entry.name), None, sound=pocket_small_gguf()).need
        except ModelLoadError:
            continue  # `updraft verify` reports damaged files
        if need > available:
            too_large.append(entry.name)
    return too_large
