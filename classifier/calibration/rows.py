"""Numeric calibration rows of a policy, from which a router computes thresholds for any target at startup."""

from __future__ import annotations

import io
import zipfile
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ...protocol.errors import ConfigurationError
from ..arrays import Bools, Floats
from ..target import Target

CALIBRATION_NAME = "calibration.npz"
_MAX_BYTES = 2**28  # maximum unpacked size of all rows
# Errors of numpy and the zip archive on malformed data.
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, slots=True)
class CalibrationRows:
    """Calibration data of n rows that no gate was fitted on. Each array is (n,) float64."""

    # P(gain) from gate 1: the probability, before generation, that the cloud's answer is better.
    before: Floats
    # P(gain) from gate 3, after generation; None without a gate 3.
    after: Floats | None
    # Score of the local answer.
    local: Floats
    # Score of the cloud's answer.
    cloud: Floats
    # Number of prompt tokens that the cloud reads.
    read: Floats
    # Number of answer tokens that the cloud writes.
    written: Floats
    # P(gain) from gate 2, during generation; None without a gate 2.
    during: Floats | None = None
    # Number of independent rows if questions repeat; None: all rows are independent.
    prompts: int | None = None

    @property
    def evidence(self) -> int:
        """Number of independent rows, as used in the statistical bounds."""
        return len(self.local) if self.prompts is None else self.prompts

    @property
    def gain(self) -> Bools:
        return self.cloud > self.local

    @property
    def judged(self) -> Floats:
        """P(gain) of each row from the policy's last gate, which knows most about the answer."""
        return self.before if self.after is None else self.after

    def dollars(self, target: Target) -> Floats:
        """Return the cloud's cost of each row, (n,) in US dollars; 0 if the target has no prices."""
        read, written = target.prices or (0.0, 0.0)
        return (self.read * read + self.written * written) / 1e6


def pack_calibration(rows: CalibrationRows) -> bytes:
    """Return the bytes of `calibration.npz`; deterministic."""
    packed = io.BytesIO()
    arrays = {f.name: getattr(rows, f.name) for f in fields(rows) if getattr(rows, f.name) is not None}
    stored: dict[str, Any] = {name: np.asarray(array, np.float32) for name, array in arrays.items()}
    np.savez_compressed(packed, **stored)
    return packed.getvalue()


def unpack_calibration(path: Path, data: bytes) -> CalibrationRows:
    """Parse the output of `pack_calibration`. Raises ConfigurationError, which names `path`, if `data` is invalid."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(member.file_size for member in archive.infolist()) > _MAX_BYTES:
                raise ValueError(f"the rows have more than {_MAX_BYTES} bytes")
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            arrays: dict[str, Any] = {name: np.asarray(stored[name], np.float64) for name in stored.files}
        arrays.setdefault("after", None)
        if "prompts" in arrays:
            arrays["prompts"] = int(arrays["prompts"])
        rows = CalibrationRows(**arrays)
        _check_shapes([array for array in arrays.values() if isinstance(array, np.ndarray)])
        if not 0 < rows.evidence <= len(rows.local):
            raise ValueError(f"the number of prompts is {rows.evidence}, but there are {len(rows.local)} rows")
        return rows
    except _UNREADABLE as error:
        raise ConfigurationError(f"{path} holds no valid calibration rows ({error}): calibrate again.") from error


def _check_shapes(arrays: list[Floats]) -> None:
    """Raise ValueError unless the arrays are non-empty, one-dimensional, of equal length and finite."""
    if len({array.shape for array in arrays}) != 1 or arrays[0].ndim != 1 or not len(arrays[0]):
        raise ValueError("columns are empty or differ in length")
    if not all(np.isfinite(array).all() for array in arrays):
        raise ValueError("columns hold NaN or infinity")
