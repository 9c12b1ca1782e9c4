"""Names of local models: `pocket`, a file, a pulled model, a server, or a model on a hub or package index."""

from __future__ import annotations

import sys

from ...local_engine.store.known_models import DEFAULT, KNOWN_MODELS
from ...local_engine.store.library import Library, model_path
from ...local_engine.store.pull import pulled
from ...protocol import settings
from ...protocol.errors import ConfigurationError, ModelLoadError
from ...protocol.safety.private_files import has_file
from ..shared import output
from .store import obtain


def resolve(name: str, *, yes: bool = False) -> str:
    """Return the value of `RouterConfig.local` for `name`; models of a hub or index are pulled on first use.

    `yes`: do not ask before a download. Raises ModelLoadError if the file does not exist, InvalidRequestError for a
    malformed name, and the errors of a download.
    """
    if name in ("pocket", "none") or name.startswith(("ollama:", "http://", "https://")):
        return name
    if name.startswith(("hf:", "pypi:")) or (name in KNOWN_MODELS and not has_file(model_path(name))):
        library = Library()
        there = pulled(library, name) or obtain(library, name, yes=yes).name
        return str(library.path(there))
    path = model_path(name)
    if not has_file(path):
        raise ModelLoadError(
            f"There is no local model {name!r}. Use a GGUF file's path, a pulled model (see updraft models and updraft "
            "pull), smollm2, hf:owner/repo:file.gguf, pypi:package, pocket, ollama:MODEL, a server's URL, or none."
        )
    return str(path.resolve())


def default_local() -> str | None:
    """Return the path of smollm2, and ask to pull it if missing. None if the settings name a model or a cloud.

    Raises ConfigurationError if smollm2 is not pulled and there is no terminal for the prompt.
    """
    values = {**settings.read_toml(settings.config_file()), **settings.environment()}
    if "local" in values or "cloud_url" in values:
        return None
    library = Library()
    there = pulled(library, DEFAULT)
    if there is None:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ConfigurationError(
                f"No model is set. Fetch a small default model with `updraft pull {DEFAULT}`, name models with --local "
                "and --cloud-url, or save them as settings with `updraft init`."
            )
        output.secho(f"No model is set. {DEFAULT} is a small model that runs on any machine.", err=True)
        there = obtain(library, DEFAULT).name
    return str(library.path(there))
