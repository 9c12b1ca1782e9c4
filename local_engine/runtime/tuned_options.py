"""The options that `updraft tune` found best for a model on this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from ...protocol.decoding import prepare_types
from ..llama.build import build_key
from ..machine.machine import this_machine
from ..machine.memory_fit import KvCacheType
from ..machine.notes import Notes, file_key
from ..options import QUANTIZED, LocalOptions


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `LocalOptions` that are tuned; None: as the engine does it by default."""

    threads: int | None = None
    repack: bool | None = None
    ubatch: int | None = None
    kv_cache_type: KvCacheType | None = None
    context_length: int | None = None
    parallel: int | None = None


prepare_types(Settings)


def remember(path: Path, settings: Settings) -> None:
    """For this file, build and machine, until one of them changes."""
    Notes("tuned").write(_key(path), settings)


def recall(path: Path) -> Settings | None:
    """None if this model was not tuned on this machine. Raises ModelLoadError if there is no such file."""
    return Notes("tuned").read(_key(path), Settings)


def tuned_options(path: Path, options: LocalOptions) -> LocalOptions:
    """`options` with what was found for the fields that are None: whoever says what he wants gets that. What was found
    and contradicts it is left out."""
    found = recall(path) or Settings()
    missing = {name: value for name, value in msgspec.structs.asdict(found).items() if getattr(options, name) is None}
    if options.flash_attention is False and found.kv_cache_type in QUANTIZED:
        missing.pop("kv_cache_type", None)
    return dataclasses.replace(options, **missing)


def _key(path: Path) -> str:
    machine = this_machine()
    limits = (machine.processor, machine.cores, machine.processors, machine.quota, machine.memory)
    return repr((file_key(path), build_key(), limits))
