"""A repository as a model hub describes it: its files with their checksums, its licence. Fetching is done elsewhere.

The hub's own library is asked for the facts but does not fetch: a file has to be checked, continued after a restart and
watched for stalls in the same way wherever it comes from.
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
from .choice import HubFile, choose
from .naming import OnHub, name_for, printable
from .offer import Offer
from .web import PassingError, RetryPolicy, check_url
from .work import ProgressReport, retrying

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_DEFAULT_ENDPOINT = "https://huggingface.co"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def endpoint() -> str:
    """The hub's address: HF_ENDPOINT, else the public one."""
    return (os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")


@dataclass(frozen=True, slots=True)
class Repository:
    """The hub's description of one revision of a repository."""

    name: str
    files: Sequence[HubFile]
    # The commit that the files are pinned to.
    revision: str
    licence: str | None
    # Where the files are fetched from, and for whom.
    base: str
    token: str | None = field(repr=False)

    def offer(self, file: HubFile, name: str) -> Offer:
        """`file` to be fetched as `name`."""
        revision = quote(self.revision, safe="")
        return Offer(
            name=name,
            source=f"hf:{self.name}:{printable(file.path)}",
            place=httpx.URL(f"{self.base}/{self.name}/resolve/{revision}/{quote(file.path)}"),
            size=file.size,
            sha256=file.sha256,
            licence=self.licence,
            # Without a checksum of the content the hub's own name for it tells versions apart.
            validator=file.blob and f"blob:{file.blob}",
            revision=revision,
            token=self.token,
        )


def hub_offer(wanted: OnHub, name: str | None, retry_policy: RetryPolicy, report: ProgressReport) -> Offer:
    """The file that is meant, pinned to the repository's present revision. Raises what `ask_hub` does."""
    repository = ask_hub(wanted, retry_policy, report)
    chosen = choose(f"hf:{wanted.repo}", repository.files, wanted.choice)
    return repository.offer(chosen, name or name_for(chosen.path))


def ask_hub(wanted: OnHub, retry_policy: RetryPolicy, report: ProgressReport) -> Repository:
    """The present revision of a repository.

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
    info = retrying(lambda: _ask(api, wanted, retry_policy), retry_policy, report)
    return Repository(
        wanted.repo, _files(info), str(info.sha or wanted.revision or "main"), _licence(info), base, token
    )


def _ask(api: Any, wanted: OnHub, retry_policy: RetryPolicy) -> ModelInfo:
    """The hub's answer. Raises PassingError for what another try may mend."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] - of whichever HTTP library the hub's uses
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return api.model_info(wanted.repo, revision=wanted.revision, files_metadata=True, timeout=retry_policy.read_s)
    except HFValidationError as error:
        raise InvalidRequestError(f"{wanted.repo!r} cannot be a repository: {error}") from error
    except GatedRepoError as error:
        raise DownloadError(
            f"{wanted.repo} is open only to those who accepted its terms on the hub: do so there, and set HF_TOKEN.",
            code="access_denied",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"The hub has no repository {wanted.repo}, or it needs a token (HF_TOKEN).") from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{wanted.repo} has no revision {wanted.revision}.") from error
    except HfHubHTTPError as error:
        raise _of_status(error) from error
    except (HTTPError, OSError) as error:
        raise PassingError(f"The hub cannot be asked ({type(error).__name__})") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # JSON that is none, or not what it should be
        raise DownloadError("The hub's answer cannot be read: is HF_ENDPOINT a model hub?") from error


def _of_status(error: Exception) -> UpdraftError | PassingError:
    status = int(getattr(getattr(error, "response", None), "status_code", 0))
    if status in (408, 425, 429) or status >= 500:
        return PassingError(f"The hub answers {status}")
    if status in (401, 403):
        return DownloadError(f"The hub refuses ({status}): check HF_TOKEN.", code="access_denied")
    return DownloadError(f"The hub answers {status}.")


def _files(info: ModelInfo) -> list[HubFile]:
    found: list[HubFile] = []
    for file in info.siblings or []:
        path, size = file.rfilename, file.size
        # A path is asked for, never written to; but one that climbs would ask for something else than it says.
        if not isinstance(path, str) or path.startswith("/") or "\\" in path or ".." in path.split("/"):
            continue
        sha256 = file.lfs.sha256 if file.lfs else None
        found.append(
            HubFile(
                path=path,
                size=size if isinstance(size, int) and size >= 0 else None,
                sha256=sha256 if isinstance(sha256, str) and _SHA256.fullmatch(sha256) else None,
                blob=file.blob_id if isinstance(file.blob_id, str) else None,
            )
        )
    return found


def _licence(info: ModelInfo) -> str | None:
    card: Any = info.card_data
    named = None if card is None else card.get("license_name") or card.get("license")
    if isinstance(named, list):
        named = ", ".join(str(item) for item in named)
    if not named:
        named = next((tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")), None)
    return printable(str(named)) if named else None
