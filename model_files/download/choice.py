"""The file of a repository that is meant. Never a guess: where several fit, they are listed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from ...protocol.errors import InvalidRequestError, ModelNotFoundError
from .naming import printable

# At the end of a file's name: Q4_K_M, UD-IQ2_XXS, Q8_0, TQ1_0, BF16, F16, MXFP4_MOE
_TAG = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q|TQ)\d+(?:_[A-Z0-9]+)*|BF16|F16|F32|FP16|MXFP4(?:_[A-Z]+)?)$", re.IGNORECASE
)
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
# They are GGUF, but no language models: projectors of images, calibration data of quantisations.
_OTHER = re.compile(r"(^|[-._])(mmproj|imatrix)([-._]|$)", re.IGNORECASE)
_MAX_LISTED = 40


@dataclass(frozen=True, slots=True)
class HubFile:
    """`sha256`: what the hub says about the content; None where it says nothing."""

    path: str
    size: int | None = None
    sha256: str | None = None
    blob: str | None = None

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


def choose(source: str, files: Sequence[HubFile], choice: str | None) -> HubFile:
    """The file that `choice` means: its path, its name or the tag of its quantisation; None: the only model.

    `source`: where the files lie, as a person names it. Raises InvalidRequestError, with the list, where several fit or
    the model is split into parts; ModelNotFoundError, with the list, where none does.
    """
    found = [file for file in files if file.name.lower().endswith(".gguf")]
    if choice is not None:
        exact = [file for file in found if file.path == choice] or [file for file in found if file.name == choice]
        fitting = exact or [file for file in found if tag_of(file) == choice.upper() and not _OTHER.search(file.name)]
    else:
        fitting = [file for file in found if not _OTHER.search(file.name)]
    whole = [file for file in fitting if not _SPLIT.search(file.name)]
    if len(whole) == 1 and (choice is not None or len(fitting) == 1):
        return whole[0]
    wanted = f"{source}:{printable(choice)}" if choice else source
    if fitting and not whole:
        raise InvalidRequestError(f"{wanted} is split into {len(fitting)} files, which this store does not take.")
    if fitting:
        raise InvalidRequestError(
            f"{wanted} could be any of {len(fitting)} files. Name one, as in {source}:{_short(fitting[0])}:\n"
            f"{_listed(fitting)}",
            code="several_files",
        )
    if not found:
        raise ModelNotFoundError(f"{source} holds no GGUF file; its GGUF version is often another one.")
    raise ModelNotFoundError(f"{source} holds no {printable(choice or 'model')}. It has:\n{_listed(found)}")


def tag_of(file: HubFile) -> str | None:
    """The quantisation at the end of the file's name, or of the name before the number of a part."""
    stem = _SPLIT.sub("", file.name).removesuffix(".gguf").removesuffix(".GGUF")
    found = _TAG.search(stem)
    return found[1].upper() if found else None


def _short(file: HubFile) -> str:
    return printable(file.path)


def _listed(files: Sequence[HubFile]) -> str:
    lines = [
        f"  {printable(file.path)}" + ("" if file.size is None else f"  {file.size / 1e6:,.1f} MB")
        for file in sorted(files, key=lambda file: (file.size or 0, file.path))[:_MAX_LISTED]
    ]
    more = len(files) - len(lines)
    return "\n".join([*lines, f"  and {more} more"] if more > 0 else lines)
