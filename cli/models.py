"""Names of local models on the command line: `pocket`, a file, or a file on a model hub."""

from __future__ import annotations

from pathlib import Path

from ..cloud_engine.models.hub import download_file
from ..protocol.errors import ModelLoadError


def resolve(name: str) -> str:
    """What `RouterConfig.local` takes for `name`; a hub file is downloaded on first use.

    Raises ConfigurationError for a name of no known form, ModelLoadError where there is no such file.
    """
    if name in ("pocket", "none"):
        return name
    if name.startswith("hf:"):
        return str(download_file(name))
    path = Path(name).expanduser()
    if not path.is_file():
        raise ModelLoadError(
            f"There is no local model {name!r}. Name a GGUF file, hf:owner/repo/file.gguf, pocket, or none."
        )
    return str(path.resolve())
