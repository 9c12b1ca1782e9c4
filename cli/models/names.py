"""Names of local models on the command line: `pocket`, a file, a pulled model, or one on a hub or package index."""

from __future__ import annotations

import sys

from ...local_engine.store.known import DEFAULT, KNOWN
from ...local_engine.store.library import Library, model_path
from ...local_engine.store.pull import pulled
from ...protocol import settings
from ...protocol.errors import ConfigurationError, ModelLoadError
from ...protocol.safety.private_files import has_file
from ..shared import output
from .store import obtain


def resolve(name: str, *, yes: bool = False) -> str:
    """The value of `RouterConfig.local` for `name`; a model of a hub or index is pulled on first use.

    `yes`: do not ask before a download. Raises InvalidRequestError for a name of no known form, ModelLoadError where
    there is no such file, and what pulling raises.
    """
    if name in ("pocket", "none") or name.startswith(("ollama:", "http://", "https://")):
        return name
    if name.startswith(("hf:", "pypi:")) or (name in KNOWN and not has_file(model_path(name))):
        library = Library()
        there = pulled(library, name) or obtain(library, name, yes=yes).name
        return str(library.path(there))
    path = model_path(name)
    if not has_file(path):
        raise ModelLoadError(
            f"There is no local model {name!r}. Name a GGUF file by its path (./name in this folder), a model that was "
            "pulled (updraft models lists them), smollm2, hf:owner/repo:file.gguf, pypi:package, pocket, ollama:MODEL, "
            "a server's URL, or none."
        )
    return str(path.resolve())


def default_local() -> str | None:
    """The file of smollm2, for whoever set no model at all; a terminal is asked before it is pulled.

    None: the settings name a model or a cloud. Raises ConfigurationError where there is no model and nobody to ask.
    """
    given = {**settings.read_toml(settings.config_file()), **settings.environment()}
    if "local" in given or "cloud_url" in given:
        return None
    library = Library()
    there = pulled(library, DEFAULT)
    if there is None:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ConfigurationError(
                f"No model is set. `updraft pull {DEFAULT}` fetches a small one, which is then used. --local and "
                "--cloud name others, and `updraft init` keeps them as settings."
            )
        output.secho(f"No model is set. {DEFAULT} is a small one that runs on any machine.", err=True)
        there = obtain(library, DEFAULT).name
    return str(library.path(there))
