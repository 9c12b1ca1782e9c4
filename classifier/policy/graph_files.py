"""Reading the files of a policy folder: a card with matching versions, and the graphs that the card describes."""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.decoding import UNREADABLE
from ...protocol.errors import ConfigurationError
from ...protocol.unicode_forms import read_text
from ..optional_imports import load_onnxruntime

CARD_NAME = "policy.json"
OPSET, ML_OPSET = 17, 3
_MAX_CARD, _MAX_FILE = 2**22, 2**30  # bytes


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_card(folder: Path) -> dict[str, Any]:
    """Return the card's JSON object. Raises ConfigurationError if the card is missing or unreadable."""
    path = folder / CARD_NAME
    try:
        _check_file(path, _MAX_CARD)
        return msgspec.json.decode(read_text(path, ConfigurationError), type=dict[str, Any])
    except FileNotFoundError as error:
        missing = f"There is no policy at {folder}: {path.name} is missing."
        raise ConfigurationError(missing, param="policy") from error
    except (OSError, *UNREADABLE) as error:
        raise ConfigurationError(f"Cannot read the policy {path} ({error}): install or train it again.") from error


def _check_file(path: Path, most: int) -> None:
    """Raise OSError, or ConfigurationError if `path` is too large or not a regular file (a device may be endless)."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > most:
        raise ConfigurationError(f"{path} cannot be a policy file: it must be a regular file of at most {most} bytes.")


def check_versions(folder: Path, card: Mapping[str, Any], versions: Mapping[str, Any], remedy: str) -> None:
    """Raise ConfigurationError, naming the remedy, if the card's versions differ from `versions`."""
    for name, version in versions.items():
        if card.get(name) != version:
            raise ConfigurationError(
                f"The policy at {folder} has {name} {card.get(name)}, but this Updraft reads {version}: "
                f"{remedy} or install the matching version."
            )


def file_named(files: Mapping[str, str], name: str) -> str | None:
    """Return the stored name of a file such as `gate1.onnx` or `gate1-<digits>.onnx` in a card's `files`, or None."""
    stem, suffix = name.rsplit(".", 1)
    return next((file for file in files if re.fullmatch(rf"{stem}(-[0-9a-f]+)?\.{suffix}", file)), None)


def read_checked(path: Path, expected: str | None) -> bytes:
    """Return the contents of a policy file with the SHA-256 `expected`. Raises ConfigurationError."""
    try:
        _check_file(path, _MAX_FILE)
        data = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"The policy at {path.parent} lacks {path.name}: install or train the policy again."
        ) from error
    if sha256(data) != expected:
        raise ConfigurationError(
            f"{path} does not match its {CARD_NAME} (damaged or replaced): install or train the policy again."
        )
    return data


def open_graph(path: Path, expected: str | None) -> Any:
    """Open a single-threaded onnxruntime session. Raises ConfigurationError or MissingDependencyError."""
    onnxruntime = load_onnxruntime()
    graph = read_checked(path, expected)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    try:
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class but Exception
        raise ConfigurationError(f"onnxruntime cannot load {path} ({error}): train the policy again.") from error
