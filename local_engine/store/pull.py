"""`updraft pull`: downloads a model into the library. The model gets its name only after all checks."""

from __future__ import annotations

from datetime import UTC, datetime

from ...model_files.download.download_spec import DownloadSpec
from ...model_files.download.fetch import fetch
from ...model_files.download.file_selection import HubFile, choose
from ...model_files.download.hub import endpoint
from ...model_files.download.naming import HubRef, IndexRef, licence_in, parse
from ...model_files.download.partial_file import PartialFile, check_disk_space, read_resume_record
from ...model_files.download.progress import ProgressReport
from ...model_files.download.web import RetryLimits
from ...model_files.gguf_reader import read_header
from ...protocol.errors import InvalidRequestError, ModelLoadError, ModelNotFoundError
from .known_models import KNOWN_MODELS
from .library import Library, Manifest


def stored(library: Library, spec: DownloadSpec) -> Manifest | None:
    """Return the manifest if the model of `spec` is stored already. Raises InvalidRequestError if its name is taken."""
    manifest = library.find(spec.name)
    if manifest is None:
        return None
    whole = library.path(spec.name).stat().st_size == manifest.size
    same = spec.sha256 == manifest.sha256 or (spec.identity is not None and spec.identity == manifest.identity)
    if same and whole:
        return manifest
    if manifest.source != spec.source and not same:
        raise InvalidRequestError(
            f"{spec.name} is already the name of {manifest.source}: choose another name with --name, or run "
            f"updraft rm {spec.name}.",
            code="name_taken",
        )
    return None  # another version or a truncated file, which `pull` replaces


def pulled(library: Library, model: str) -> str | None:
    """Return the name of the complete model pulled from `model`, a hub or index name; None unless one model matches.

    Works without network access. Raises InvalidRequestError for a malformed name.
    """
    place = KNOWN_MODELS[model].place if model in KNOWN_MODELS else parse(model, endpoint())
    ready = {entry.source: entry.name for entry in library.entries() if entry.state == "ready"}
    if not isinstance(place, HubRef):
        return ready.get(str(place))
    prefix = f"hf:{place.repo}:"
    names = {source.removeprefix(prefix): name for source, name in ready.items() if source.startswith(prefix)}
    try:
        return names[choose(f"hf:{place.repo}", [HubFile(path) for path in names], place.choice).path]
    except (ModelNotFoundError, InvalidRequestError):  # not exactly one match, so the caller has to ask the hub
        return None


def missing_bytes(library: Library, spec: DownloadSpec) -> int | None:
    """Return the bytes of disk space that the download still needs; None if the size is unknown."""
    if spec.size is None:
        return None
    if isinstance(spec.place, IndexRef):
        return 2 * spec.size  # for the wheel, and for the model extracted from the wheel
    part = library.partial / f"{spec.name}.part"
    record = read_resume_record(library.partial, spec.name)
    here = part.stat().st_size if spec.can_continue and record == spec.record and part.exists() else 0
    return max(0, spec.size - here)


def check_space(library: Library, spec: DownloadSpec) -> int:
    """Return the free bytes of the library's disk. Raises DiskSpaceError if the download does not fit."""
    return check_disk_space(library.folder, spec.name, missing_bytes(library, spec) or 0)


def pull(
    library: Library, spec: DownloadSpec, *, retries: RetryLimits | None = None, report: ProgressReport | None = None
) -> Manifest:
    """Download, check and store a model, unless it is already stored.

    An interrupted download continues at the next call. Raises InvalidRequestError, DownloadError (ChecksumError for
    wrong bytes, which are deleted), ModelNotFoundError, ModelLoadError if the file is not a model, DiskSpaceError,
    ConfigurationError if the library is not writable.
    """
    retries, report = retries or RetryLimits(), report or ProgressReport()
    with library.lock(spec.name, lambda: report.say(f"Another process is pulling {spec.name}: waiting for it.")):
        if (there := stored(library, spec)) is not None:
            return there
        check_space(library, spec)
        with PartialFile(library.partial, spec.name, spec.record) as part:
            if part.size:
                report.say(f"Resuming after {part.size:,} bytes.")
            fetch(spec, part, retries, report)
            licence = _licence_of_model(spec, part)
            manifest = Manifest(
                name=spec.name,
                source=spec.source,
                size=part.size,
                sha256=part.sha256,
                published=spec.sha256 is not None,
                pulled_at=datetime.now(UTC).isoformat(timespec="seconds"),
                licence=spec.licence or licence,
                identity=spec.identity,
                revision=spec.revision,
            )
            library.keep(part, manifest)
    return manifest


def _licence_of_model(spec: DownloadSpec, part: PartialFile) -> str | None:
    """Return the licence in the file. Raises ModelLoadError and deletes the file if it is not a model."""
    try:
        return licence_in(read_header(part.path).metadata)
    except ModelLoadError as error:
        part.discard()
        raise ModelLoadError(f"{spec.source} is not a usable model and was deleted. {error}") from error
