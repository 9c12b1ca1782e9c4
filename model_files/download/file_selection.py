"""Selection of a model file in a repository. An ambiguous choice is an error that lists the candidates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from ...protocol.errors import InvalidRequestError, ModelNotFoundError
from .naming import printable

# Quantization at the end of a file name: Q4_K_M, UD-IQ2_XXS, Q8_0, TQ1_0, BF16, F16, MXFP4_MOE
_TAG = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q|TQ)\d+(?:_[A-Z0-9]+)*|BF16|F16|F32|FP16|MXFP4(?:_[A-Z]+)?)$", re.IGNORECASE
)
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
# GGUF files that are not language models: image projectors, and calibration data for quantization.
_OTHER = re.compile(r"(^|[-._])(mmproj|imatrix)([-._]|$)", re.IGNORECASE)
_MAX_LISTED = 40


@dataclass(frozen=True, slots=True)
class HubFile:
    """File in a repository. `sha256` and `blob` are the hub's checksum and id of the content, if known."""

    path: str
    size: int | None = None
    sha256: str | None = None
    blob: str | None = None

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


def choose(source: str, files: Sequence[HubFile], choice: str | None) -> HubFile:
    """Return the file that `choice` names by path, name or quantization; None selects the only model.

    `source` is the repository's name for messages. Raises InvalidRequestError if several files match (listing them) or
    the model is split into parts; ModelNotFoundError, with a list, if no file matches.
    """
    ggufs = [file for file in files if file.name.lower().endswith(".gguf")]
    if choice is not None:
        exact = [file for file in ggufs if file.path == choice] or [file for file in ggufs if file.name == choice]
        fitting = exact or [file for file in ggufs if tag_of(file) == choice.upper() and not _OTHER.search(file.name)]
    else:
        fitting = [file for file in ggufs if not _OTHER.search(file.name)]
    whole = [file for file in fitting if not _SPLIT.search(file.name)]
    if len(whole) == 1 and (choice is not None or len(fitting) == 1):
        return whole[0]
    wanted = f"{source}:{printable(choice)}" if choice else source
    if fitting and not whole:
        raise InvalidRequestError(f"{wanted} is split into {len(fitting)} files, which is not supported.")
    if fitting:
        raise InvalidRequestError(
            f"{wanted} could be any of {len(fitting)} files. Name one, as in {source}:{printable(fitting[0].path)}:\n"
            f"{_listed(fitting)}",
            code="several_files",
        )
    if not ggufs:
        raise ModelNotFoundError(f"{source} holds no GGUF file; look for a GGUF version in another repository.")
    raise ModelNotFoundError(f"{source} holds no {printable(choice or 'model')}. It has:\n{_listed(ggufs)}")


def tag_of(file: HubFile) -> str | None:
    """Return the quantization at the end of the file name, if any, ignoring the number of a part."""
    stem = _SPLIT.sub("", file.name).removesuffix(".gguf").removesuffix(".GGUF")
    match = _TAG.search(stem)
    return match[1].upper() if match else None


def _listed(files: Sequence[HubFile]) -> str:
    lines = [
        f"  {printable(file.path)}" + ("" if file.size is None else f"  {file.size / 1e6:,.1f} MB")
        for file in sorted(files, key=lambda file: (file.size or 0, file.path))[:_MAX_LISTED]
    ]
    more = len(files) - len(lines)
    return "\n".join([*lines, f"  and {more} more files"] if more > 0 else lines)
