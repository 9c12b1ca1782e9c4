"""Names of local models on the command line: `pocket`, a file, a pulled model, or a file on a model hub."""

from __future__ import annotations

from ...local_engine.store.library import Library, model_path
from ...local_engine.store.pull import pulled
from ...protocol.errors import ModelLoadError
from .store import obtain


def resolve(name: str) -> str:
    """What `RouterConfig.local` takes for `name`; what a hub has is pulled on first use, as `updraft pull` does it.

    Raises InvalidRequestError for a name of no known form, ModelLoadError where there is no such file, and what pulling
    raises.
    """
    if name in ("pocket", "none"):
        return name
    if name.startswith("hf:"):
        library = Library()
        there = pulled(library, name) or obtain(library, name).name
        return str(library.path(there))
    path = model_path(name)
    if not path.is_file():
        raise ModelLoadError(
            f"There is no local model {name!r}. Name a GGUF file, a model that was pulled (updraft models lists them), "
            "hf:owner/repo:file.gguf, pocket, or none."
        )
    return str(path.resolve())
