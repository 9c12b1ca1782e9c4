"""Models by name: a path on this machine, or a repository or single file on a model hub.

Downloads resume where they broke off, and what is new is checked against the hub's SHA-256 before it is used.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from ...protocol.errors import ConfigurationError, MissingDependencyError, ModelLoadError

_FILE = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)/(?P<file>[\w./-]+\.gguf)")
_REPO = re.compile(r"(hf:)?(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)")
_NEEDED = ["config.json", "generation_config.json", "tokenizer*", "chat_template*", "model*.safetensors*"]
_SHA256 = re.compile(r"[0-9a-f]{64}")


def find_model(name: str) -> Path:
    """The folder or GGUF file that `name` means; one on the hub is downloaded on first use.

    `name`: a path, `owner/repo` for a folder of safetensors, or `hf:owner/repo/file.gguf`. Raises ModelLoadError if
    there is no such model or it cannot be downloaded.
    """
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if _FILE.fullmatch(name):
        return download_file(name)
    form = _REPO.fullmatch(name)
    if form is None:
        raise ModelLoadError(
            f"There is no model {name!r}. Name a model folder or a GGUF file on this machine, owner/repo on a model "
            "hub, or hf:owner/repo/file.gguf."
        )
    from_hub = _hub_library()
    with _told(name, form["repo"]):
        return _verified(
            form["repo"], lambda: Path(from_hub.snapshot_download(form["repo"], allow_patterns=_NEEDED)), name
        )


def name_of(path: Path) -> str:
    """What a model is called in answers: its folder's name, or owner/repo where the hub's cache holds it."""
    for parent in path.parents:
        if parent.name.startswith("models--"):
            return parent.name.removeprefix("models--").replace("--", "/")
    return path.resolve().name


def download_file(name: str) -> Path:
    """A single GGUF file, `hf:owner/repo/file.gguf`. Raises what `find_model` does."""
    form = _FILE.fullmatch(name)
    if form is None:
        raise ConfigurationError(f"{name!r} is not of the form hf:owner/repo/file.gguf.")
    from_hub = _hub_library()
    with _told(name, form["repo"]):
        return _verified(form["repo"], lambda: Path(from_hub.hf_hub_download(form["repo"], form["file"])), name)


def _hub_library() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingDependencyError("Models from a hub need huggingface-hub: pip install huggingface-hub") from error
    return huggingface_hub


@contextmanager
def _told(name: str, repo: str) -> Iterator[None]:
    """What the hub's library raises, as one of our errors."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] - of whichever HTTP library the hub's uses
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except RepositoryNotFoundError as error:
        raise ModelLoadError(f"The hub has no repository {repo}, or it needs a token (HF_TOKEN).") from error
    except (OSError, EntryNotFoundError, HTTPError) as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise ModelLoadError(f"{repo} holds no {name.removeprefix(f'hf:{repo}/')}.") from error
        raise ModelLoadError(
            f"{name} cannot be downloaded ({type(error).__name__}). Without a network, name a model on this machine; "
            "a mirror of the hub is named by HF_ENDPOINT."
        ) from error


def _verified(repo: str, download: Callable[[], Path], name: str) -> Path:
    """What `download` returns, after checking the large files that it brought (they are called by their SHA-256)."""
    from huggingface_hub.constants import HF_HUB_CACHE

    blobs = Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs"
    before = _files(blobs)
    path = download()
    for blob in _files(blobs) - before:
        if _SHA256.fullmatch(blob.name) and _sha256(blob) != blob.name:
            blob.unlink()
            raise ModelLoadError(f"{name} arrived damaged (its SHA-256 is not the hub's): try again.")
    return path


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.iterdir() if path.is_file()} if folder.is_dir() else set()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
