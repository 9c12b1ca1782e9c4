"""Lookup of models by name: a path on this machine, or a repository or single file on a model hub.

Downloads go to the hub's standard cache, which is shared with other servers.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from ....model_files.download.download_spec import DownloadSpec
from ....model_files.download.fetch import fetch
from ....model_files.download.file_selection import HubFile
from ....model_files.download.hub import Repository, ask_hub
from ....model_files.download.naming import HubRef, is_node_path
from ....model_files.download.partial_file import PartialFile, check_disk_space, lock
from ....model_files.download.progress import ProgressReport
from ....model_files.download.web import RetryLimits
from ....protocol.errors import ChecksumError, ConfigurationError, DownloadError, MissingDependencyError, ModelLoadError
from .progress import loading_bar

_FILE = re.compile(r"hf:(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)/(?P<file>[\w./-]+\.gguf)", re.ASCII)
_REPO = re.compile(r"(hf:)?(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)", re.ASCII)
_NEEDED = ("config.json", "generation_config.json", "tokenizer*", "chat_template*", "model*.safetensors*")
_HEX = re.compile(r"[0-9a-f]{40,64}")  # a commit hash or checksum
_log = logging.getLogger("updraft.engine")


def find_model(name: str) -> Path:
    """Return the folder or GGUF file of a model, downloading models from the hub on first use.

    `name` is a path, `owner/repo` for a folder of safetensors, or `hf:owner/repo/file.gguf`. Raises ModelLoadError if
    the model does not exist, ConfigurationError for a malformed name, and download errors.
    """
    if is_node_path(name):
        if not (path := Path(name).expanduser()).exists():
            raise ModelLoadError(f"The model path {name!r} does not exist.")
        return path
    if file := _FILE.fullmatch(name):
        if ".." in Path(file["file"]).parts:
            raise ConfigurationError(f"{name!r} must have the form hf:owner/repo/file.gguf.")
        return _snapshot(file["repo"], lambda path: path == file["file"]) / file["file"]
    repo = _REPO.fullmatch(name)
    if repo is None:
        raise ModelLoadError(
            f"Model {name!r} not found. Use the path of a model folder or GGUF file (./name in the current folder), or "
            "owner/repo or hf:owner/repo/file.gguf on a model hub."
        )
    return _snapshot(repo["repo"], lambda path: any(fnmatch(path, pattern) for pattern in _NEEDED))


def name_of(path: Path) -> str:
    """Return a model's name for API replies: owner/repo from the hub's cache, else the name of the folder or file."""
    for parent in path.parents:
        if parent.name.startswith("models--"):
            return parent.name.removeprefix("models--").replace("--", "/")
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def _snapshot(repo: str, wanted: Callable[[str], bool]) -> Path:
    """Download the `wanted` files that are not cached, or none if offline. Return their folder in the cache."""
    cache = _cache_of(repo)
    here = _left(cache, wanted)
    try:
        repository = ask_hub(HubRef(repo), RetryLimits(tries=5 if here is None else 1), ProgressReport())
        files = [file for file in repository.files if wanted(file.path)]
        if not files:
            raise ModelLoadError(f"{repo} contains neither the requested file nor a safetensors model.")
        return _completed(cache, repository, files)
    except DownloadError as error:
        if here is not None and not isinstance(error, ChecksumError):
            return here
        raise ModelLoadError(
            f"{repo} cannot be downloaded: {error.message} Offline, use the path of a model on this machine; to use a "
            "mirror of the hub, set HF_ENDPOINT."
        ) from error


def _cache_of(repo: str) -> Path:
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError as error:
        raise MissingDependencyError("Models from a hub need huggingface-hub: pip install huggingface-hub") from error
    return Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def _left(cache: Path, wanted: Callable[[str], bool]) -> Path | None:
    main = cache / "refs" / "main"
    if not main.is_file():
        return None
    folder = cache / "snapshots" / main.read_text(encoding="utf-8").strip()
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return folder if any(map(wanted, files)) else None


def _completed(cache: Path, repository: Repository, files: Sequence[HubFile]) -> Path:
    if not _HEX.fullmatch(repository.revision):
        raise DownloadError(f"The hub sent an invalid revision of {repository.name}: {repository.revision[:80]!r}.")
    folder = cache / "snapshots" / repository.revision
    for file in files:
        blob = cache / "blobs" / _blob_name(repository, file)
        if not blob.exists():
            _fetch(cache, blob, repository.spec(file, blob.name))
        link = folder / file.path
        if not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            with suppress(FileExistsError):  # another process has created the link
                link.symlink_to(Path(*[".."] * len(link.relative_to(cache).parent.parts), "blobs", blob.name))
    main = cache / "refs" / "main"
    main.parent.mkdir(exist_ok=True)
    (temporary := main.with_name(f"main.{os.getpid()}")).write_text(repository.revision, encoding="utf-8")
    temporary.replace(main)
    return folder


def _fetch(cache: Path, blob: Path, spec: DownloadSpec) -> None:
    def waiting() -> None:
        _log.warning("Waiting for another process to download %s", spec.source)

    with lock(cache, blob.name, waiting), loading_bar("downloading") as progress:
        if blob.exists():
            return
        check_disk_space(cache, spec.source, spec.size or 0)
        with PartialFile(cache / ".partial", blob.name, spec.record) as part:
            report = ProgressReport(lambda done, total: progress(done, total or done), _log.warning)
            fetch(spec, part, RetryLimits(), report)
            part.sync()
            blob.parent.mkdir(exist_ok=True)
            part.path.replace(blob)
            part.discard()


def _blob_name(repository: Repository, file: HubFile) -> str:
    """Return the name of a file's blob in the hub's cache: the hub's hash, else a hash of revision and path."""
    named = [name for name in (file.sha256, file.blob) if name is not None and _HEX.fullmatch(name)]
    return named[0] if named else hashlib.sha256(f"{repository.revision}/{file.path}".encode()).hexdigest()
