"""The safe way to a running model: nothing is loaded into this process that would crash it or swap it to death.

In this order: the header is read, the memory is compared, the build of llama.cpp is tried, an unknown file is loaded
on trial. On a machine and a file that are known, this costs some milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..model_files.gguf_header import GgufHeader
from ..model_files.gguf_reader import read_model_header
from .build_check import ensure_usable_build
from .engine import LocalEngine, LocalOptions
from .llama.adapter_file import read_adapter
from .machine.machine import this_machine
from .machine.memory_fit import DEFAULT_CELLS, MemoryPlan, ensure_fits, estimate, free_memory, vocabulary_size
from .runtime.context_layout import ContextLayout, ModelTraits
from .runtime.tuned_options import tuned_options
from .trial_load import ensure_loadable


@dataclass(frozen=True, slots=True)
class EngineCandidate:
    """A model file that could become an engine. `need`: bytes of memory. `sound`: a file that is known to load; the
    build of llama.cpp is tried with it."""

    path: Path
    options: LocalOptions
    header: GgufHeader
    plan: MemoryPlan
    sound: Path

    @classmethod
    def of(cls, path: Path, options: LocalOptions | None, *, sound: Path) -> EngineCandidate:
        """With what `updraft tune` found for options that are None. Raises ModelLoadError, InvalidRequestError."""
        options = tuned_options(path, options or LocalOptions())
        header = read_model_header(path)
        return cls(path, options, header, plan_of(header, options), sound)

    @property
    def need(self) -> int:
        return estimate(self.header, self.plan).total

    def check(self, room: int) -> None:
        ensure_fits(self.path.name, self.header, self.plan, room)

    def load(self) -> LocalEngine:
        """Raises ModelLoadError, MissingDependencyError, ConfigurationError."""
        ensure_usable_build(self.sound)
        if self.path != self.sound or self.options.adapters:
            ensure_loadable(self.path, self.options.adapters, own_template=self.options.chat_template is None)
        return LocalEngine.load(self.path, self.options)


def open_engine(path: Path, options: LocalOptions | None = None, *, sound: Path) -> LocalEngine:
    """One engine of its own, for `path`. `sound`: as in `EngineCandidate`.

    Raises ModelLoadError for a file that is missing, damaged, hostile or foreign, ModelTooLargeError for one that does
    not fit, MissingDependencyError or ConfigurationError for a missing or broken llama.cpp, InvalidRequestError.
    """
    candidate = EngineCandidate.of(path, options, sound=sound)
    candidate.check(free_memory(this_machine()))
    return candidate.load()


def plan_of(header: GgufHeader, options: LocalOptions) -> MemoryPlan:
    """The plan of `LocalEngine` for these options, as far as memory depends on it. Raises InvalidRequestError, and
    ModelLoadError for an adapter that cannot be used."""
    options.check()
    layout = layout_of(header, options)
    return MemoryPlan(
        context_length=layout.cells,
        kv_cache_type=layout.kv_cache_type,
        ubatch=layout.rows,
        outputs=layout.outputs,
        sequences=layout.sequences,
        flash_attention=not layout.exact and options.flash_attention is not False,
        adapters=sum(read_adapter(adapter.path, header).data_end for adapter in options.adapters),
    )


def layout_of(header: GgufHeader, options: LocalOptions) -> ContextLayout:
    """The layout that an engine of this file will have. `options` have been checked."""
    trained, state = header.hyperparameter("context_length"), header.hyperparameter("ssm.state_size")
    traits = ModelTraits(
        header.parameters, vocabulary_size(header), trained if isinstance(trained, int) else DEFAULT_CELLS, bool(state)
    )
    return ContextLayout.of(traits, options)
