"""Descriptions of repositories on a model hub: files with checksums, and the licence.

The hub's library provides the metadata. `fetch` downloads files, with checksums and resume as for every source.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx

from ...protocol.errors import (
    DownloadError,
    InvalidRequestError,
    MissingDependencyError,
    ModelNotFoundError,
    UpdraftError,
)
from .download_spec import DownloadSpec
from .file_selection import HubFile, choose
from .naming import HubRef, name_for, printable
from .progress import ProgressReport, retrying
from .web import RetryLimits, TemporaryError, check_url

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_DEFAULT_ENDPOINT = "https://huggingface.co"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def endpoint() -> str:
    """Return the hub's address: HF_ENDPOINT, else the public hub."""
    return (os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")


@dataclass(frozen=True, slots=True)
class Repository:
    """One revision of a repository, as described by the hub."""

    name: str
    files: Sequence[HubFile]
    # Commit of the repository.
    revision: str
    licence: str | None
    # Address of the hub, and the user's access token (`token`).
    base: str
    token: str | None = field(repr=False)

    def spec(self, file: HubFile, name: str) -> DownloadSpec:
        """Return a spec to fetch `file` as `name`."""
        revision = quote(self.revision, safe="")
        return DownloadSpec(
            name=name,
            source=f"hf:{self.name}:{printable(file.path)}",
            place=httpx.URL(f"{self.base}/{self.name}/resolve/{revision}/{quote(file.path)}"),
            size=file.size,
            sha256=file.sha256,
            licence=self.licence,
            # The hub's content id identifies the version if there is no checksum.
            validator=file.blob and f"blob:{file.blob}",
            revision=revision,
            token=self.token,
        )


def hub_file(wanted: HubRef, name: str | None, retries: RetryLimits, report: ProgressReport) -> DownloadSpec:
    """Return a spec for the wanted file, pinned to the current revision. Raises the errors of `ask_hub`."""
    repository = ask_hub(wanted, retries, report)
    chosen = choose(f"hf:{wanted.repo}", repository.files, wanted.choice)
    return repository.spec(chosen, name or name_for(chosen.path))


def ask_hub(wanted: HubRef, retries: RetryLimits, report: ProgressReport) -> Repository:
    """Query the current revision of a repository.

    Raises InvalidRequestError, ModelNotFoundError, DownloadError or MissingDependencyError.
    """
    base = endpoint()
    check_url(base)
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError as error:
        raise MissingDependencyError("Models from a hub need huggingface-hub: pip install huggingface-hub") from error
    token = get_token()
    api = HfApi(endpoint=base, token=token or False, library_name="updraft")
    info = retrying(lambda: _ask(api, wanted, retries), retries, report)
    return Repository(
        wanted.repo, _files(info), str(info.sha or wanted.revision or "main"), _licence(info), base, token
    )


def _ask(api: Any, wanted: HubRef, retries: RetryLimits) -> ModelInfo:
    """Query the hub. Raises TemporaryError for failures that a retry may fix."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] - the base error of the library's HTTP client
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return api.model_info(wanted.repo, revision=wanted.revision, files_metadata=True, timeout=retries.read_s)
    except HFValidationError as error:
        raise InvalidRequestError(f"{wanted.repo!r} is not a valid repository name: {error}") from error
    except GatedRepoError as error:
        raise DownloadError(
            f"{wanted.repo} is gated: accept its terms on the hub, and set HF_TOKEN.", code="access_denied"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"The hub has no repository {wanted.repo}, or needs HF_TOKEN to show it.") from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{wanted.repo} has no revision {wanted.revision}.") from error
    except HfHubHTTPError as error:
        raise _of_status(error) from error
    except (HTTPError, OSError) as error:
        raise TemporaryError(f"The hub cannot be reached ({type(error).__name__})") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # not JSON, or of an unexpected structure
        raise DownloadError("The hub's response cannot be read: is HF_ENDPOINT a model hub?") from error


def _of_status(error: Exception) -> UpdraftError | TemporaryError:
    status = int(getattr(getattr(error, "response", None), "status_code", 0))
    if status in (408, 425, 429) or status >= 500:
        return TemporaryError(f"The hub answers with HTTP status {status}")
    if status in (401, 403):
        return DownloadError(f"The hub refuses ({status}): check HF_TOKEN.", code="access_denied")
    return DownloadError(f"The hub answers with HTTP status {status}.")


def _files(info: ModelInfo) -> list[HubFile]:
    files: list[HubFile] = []
    for file in info.siblings or []:
        path, size = file.rfilename, file.size
        # Paths are only requested, never written, but a path with `..` would request another file than it shows.
        if not isinstance(path, str) or path.startswith("/") or "\\" in path or ".." in path.split("/"):
            continue
        sha256 = file.lfs.sha256 if file.lfs else None
        files.append(
            HubFile(
                path=path,
                size=size if isinstance(size, int) and size >= 0 else None,
                sha256=sha256 if isinstance(sha256, str) and _SHA256.fullmatch(sha256) else None,
                blob=file.blob_id if isinstance(file.blob_id, str) else None,
            )
        )
    return files


def _licence(info: ModelInfo) -> str | None:
    card: Any = info.card_data
    named = None if card is None else card.get("license_name") or card.get("license")
    if isinstance(named, list):
        named = ", ".join(str(item) for item in named)
    if not named:
        named = next((tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")), None)
    return printable(str(named)) if named else None
