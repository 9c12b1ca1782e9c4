"""Names of local models on the command line: `pocket`, a file, a pulled model, or a file on a model hub."""

from __future__ import annotations

from ..cloud_engine.models.hub import download_file
from ..local_engine.store.library import model_path
from ..protocol.errors import ModelLoadError


def resolve(name: str) -> str:
    """What `RouterConfig.local` takes for `name`; a hub file is downloaded on first use.

    Raises ConfigurationError for a name of no known form, ModelLoadError where there is no such file.
    """
    if name in ("pocket", "none"):
        return name
    if name.startswith("hf:"):
        return str(download_file(name))
    path = model_path(name)
    if not path.is_file():
        raise ModelLoadError(
            f"There is no local model {name!r}. Name a GGUF file, a model that was pulled (updraft models lists them), "
            "hf:owner/repo/file.gguf, pocket, or none."
        )
    return str(path.resolve())
