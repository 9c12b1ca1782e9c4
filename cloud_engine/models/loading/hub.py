"""Models by name: a path on this machine, or a repository or single file on a model hub.

Downloads resume where they broke off, and are checked against the hub's SHA-256 before they are first used.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from ....protocol.errors import ConfigurationError, MissingDependencyError, ModelLoadError

_FILE = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)/(?P<file>[\w./-]+\.gguf)")
_REPO = re.compile(r"(hf:)?(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)")
_NEEDED = ["config.json", "generation_config.json", "tokenizer*", "chat_template*", "model*.safetensors*"]
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NOTES = "updraft-verified"  # a folder beside the blobs of a repository
_log = logging.getLogger("updraft.engine")


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
        return _verified(Path(from_hub.snapshot_download(form["repo"], allow_patterns=_NEEDED)), name)


def name_of(path: Path) -> str:
    """What a model is called in answers: its folder's name, or owner/repo where the hub's cache holds it."""
    for parent in path.parents:
        if parent.name.startswith("models--"):
            return parent.name.removeprefix("models--").replace("--", "/")
    return path.resolve().name


def download_file(name: str) -> Path:
    """A single GGUF file, `hf:owner/repo/file.gguf`. Raises what `find_model` does."""
    form = _FILE.fullmatch(name)
    if form is None or ".." in Path(form["file"]).parts:
        raise ConfigurationError(f"{name!r} is not of the form hf:owner/repo/file.gguf.")
    from_hub = _hub_library()
    with _told(name, form["repo"]):
        return _verified(Path(from_hub.hf_hub_download(form["repo"], form["file"])), name)


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
        raise ModelLoadError(f"{name} cannot be downloaded{_why(error)}") from error


def _why(error: Exception) -> str:
    """What is known of it, and what to do."""
    response = getattr(error, "response", None)
    if response is not None:
        return f": the hub answered {response.status_code}. Try again; a token for it is named by HF_TOKEN."
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return ": there is no space left. HF_HOME names the folder of downloads."
    if isinstance(error, OSError) and error.strerror:
        return f": {error.strerror}. HF_HOME names the folder of downloads."
    return (
        f" ({type(error).__name__}). Without a network, name a model on this machine; "
        "a mirror of the hub is named by HF_ENDPOINT."
    )


def _verified(path: Path, name: str) -> Path:
    """`path` as it was downloaded, once its large files (they are called by their SHA-256) have been compared with it.

    Each is compared once, whatever broke off before that: a note in the hub's cache says which have been.
    """
    for blob in _blobs(path):
        note, written = blob.parent.with_name(_NOTES) / blob.name, _written(blob)
        if note.is_file() and note.read_text() == written:
            continue
        if _sha256(blob) != blob.name:
            blob.unlink(missing_ok=True)
            raise ModelLoadError(f"{name} arrived damaged (its SHA-256 is not the hub's): try again.")
        try:
            note.parent.mkdir(exist_ok=True)
            note.write_text(written)
        except OSError as error:
            _log.warning("%s is compared with its SHA-256 at every start: no note of it can be kept: %s", name, error)
    return path


def _blobs(path: Path) -> list[Path]:
    """What the links of a download lead to, as far as that is called by a SHA-256."""
    links = [link for link in (path.iterdir() if path.is_dir() else [path]) if link.is_symlink()]
    blobs = [link.parent / link.readlink() for link in links]
    return [blob for blob in blobs if _SHA256.fullmatch(blob.name) and blob.is_file()]


def _written(blob: Path) -> str:
    """Its size in bytes, and when it was written, in nanoseconds since 1970: a new download has others."""
    found = blob.stat()
    return f"{found.st_size} {found.st_mtime_ns}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
