"""Names of local models on the command line: `pocket`, a file, or a file on a model hub."""

from __future__ import annotations

import re
from pathlib import Path

from ..protocol.errors import ConfigurationError, MissingDependencyError, ModelLoadError

HUB_NAME = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)/(?P<file>[\w./-]+\.gguf)")


def resolve(name: str) -> str:
    """What `RouterConfig.local` takes for `name`; a hub file is downloaded on first use.

    Raises ConfigurationError for a name of no known form, ModelLoadError where there is no such file.
    """
    if name in ("pocket", "none"):
        return name
    if name.startswith("hf:"):
        return str(_download(name))
    path = Path(name).expanduser()
    if not path.is_file():
        raise ModelLoadError(
            f"There is no local model {name!r}. Name a GGUF file, hf:owner/repo/file.gguf, pocket, or none."
        )
    return str(path.resolve())


def _download(name: str) -> Path:
    """From the hub's cache, else over the network; `HF_ENDPOINT` and `HF_HUB_OFFLINE` are honoured."""
    form = HUB_NAME.fullmatch(name)
    if form is None:
        raise ConfigurationError(f"{name!r} is not of the form hf:owner/repo/file.gguf.")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
    except ImportError as error:
        raise MissingDependencyError("hf: needs huggingface-hub: pip install 'updraft-llm[edge]'") from error
    try:
        return Path(hf_hub_download(form["repo"], form["file"]))
    except RepositoryNotFoundError as error:
        raise ModelLoadError(f"The hub has no repository {form['repo']}, or it needs a token (HF_TOKEN).") from error
    except OSError as error:  # what httpx, requests and the hub raise without a network are all of this kind
        raise ModelLoadError(
            f"{name} cannot be downloaded ({type(error).__name__}). Without a network, name a GGUF file on this "
            "machine; a mirror of the hub is named by HF_ENDPOINT."
        ) from error
    except EntryNotFoundError as error:
        raise ModelLoadError(f"{form['repo']} holds no {form['file']}.") from error
