"""Safe loading of local models: checks first, so that a model neither crashes this process nor makes it swap.

The order is: read the header, check the memory, test the llama.cpp build, load an unknown file in a subprocess. For a
known machine and file, the checks take a few milliseconds.
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
    """A model file to check and load. `need`: its memory in bytes. `sound`: a working model file to test llama.cpp."""

    path: Path
    options: LocalOptions
    header: GgufHeader
    plan: MemoryPlan
    sound: Path

    @classmethod
    def of(cls, path: Path, options: LocalOptions | None, *, sound: Path) -> EngineCandidate:
        """Create a candidate, with tuned values for missing options. Raises ModelLoadError, InvalidRequestError."""
        options = tuned_options(path, options or LocalOptions())
        header = read_model_header(path)
        return cls(path, options, header, plan_of(header, options), sound)

    @property
    def need(self) -> int:
        return estimate(self.header, self.plan).total

    def check(self, available: int) -> None:
        ensure_fits(self.path.name, self.header, self.plan, available)

    def load(self) -> LocalEngine:
        """Test llama.cpp and the file, then load. Raises ModelLoadError, MissingDependencyError, ConfigurationError."""
        ensure_usable_build(self.sound)
        if self.path != self.sound or self.options.adapters:
            ensure_loadable(self.path, self.options.adapters, own_template=self.options.chat_template is None)
        return LocalEngine.load(self.path, self.options)


def open_engine(path: Path, options: LocalOptions | None = None, *, sound: Path) -> LocalEngine:
    """Check and load one model. `sound`: a model file that is known to load, used to test the build of llama.cpp.

    Raises ModelLoadError for an unusable file, ModelTooLargeError if the memory is too small, MissingDependencyError or
    ConfigurationError for a missing or broken llama.cpp, InvalidRequestError for invalid options.
    """
    candidate = EngineCandidate.of(path, options, sound=sound)
    candidate.check(free_memory(this_machine()))
    return candidate.load()


def plan_of(header: GgufHeader, options: LocalOptions) -> MemoryPlan:
    """Return the sizes that determine an engine's memory. Raises InvalidRequestError, ModelLoadError (bad adapter)."""
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
    """Return the context layout of an engine for this file. Call `options.check()` before."""
    trained, state = header.hyperparameter("context_length"), header.hyperparameter("ssm.state_size")
    traits = ModelTraits(
        header.parameters, vocabulary_size(header), trained if isinstance(trained, int) else DEFAULT_CELLS, bool(state)
    )
    return ContextLayout.of(traits, options)
