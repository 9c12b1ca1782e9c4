"""Options that `updraft tune` found best for a model on this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from ...protocol.decoding import prepare_types
from ..llama.build import build_key
from ..machine.json_store import JsonStore, file_key
from ..machine.machine import this_machine
from ..machine.memory_fit import KvCacheType
from ..options import QUANTIZED, LocalOptions


class TunedSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename={"max_model_len": "context_length", "max_num_seqs": "parallel"}
):
    """Tuned fields of `LocalOptions`, stored under their former names; None keeps the default."""

    threads: int | None = None
    repack: bool | None = None
    ubatch: int | None = None
    kv_cache_type: KvCacheType | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None


prepare_types(TunedSettings)


def remember(path: Path, settings: TunedSettings) -> None:
    """Save the settings; they apply until the file, the build or the machine changes."""
    JsonStore("tuned").write(_key(path), settings)


def recall(path: Path) -> TunedSettings | None:
    """Return the saved settings, None if not tuned on this machine. Raises ModelLoadError if the file is missing."""
    return JsonStore("tuned").read(_key(path), TunedSettings)


def tuned_options(path: Path, options: LocalOptions) -> LocalOptions:
    """Fill options that are None with tuned settings. Without flash attention, skip a cache type that needs it."""
    tuned = recall(path) or TunedSettings()
    missing = {name: value for name, value in msgspec.structs.asdict(tuned).items() if getattr(options, name) is None}
    if options.flash_attention is False and tuned.kv_cache_type in QUANTIZED:
        missing.pop("kv_cache_type", None)
    return dataclasses.replace(options, **missing)


def _key(path: Path) -> str:
    machine = this_machine()
    limits = (machine.processor, machine.cores, machine.processors, machine.quota, machine.memory)
    return repr((file_key(path), build_key(), limits))
