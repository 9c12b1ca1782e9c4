"""Reading the files of a policy folder: a card whose versions fit, and graphs that are the ones it describes."""

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
from ..optional import load_onnxruntime

CARD_NAME = "policy.json"
OPSET, ML_OPSET = 17, 3
_MAX_CARD, _MAX_FILE = 2**22, 2**30  # bytes


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_card(folder: Path) -> dict[str, Any]:
    """The card's JSON. Raises ConfigurationError if there is none or it is no JSON object."""
    path = folder / CARD_NAME
    try:
        _check_file(path, _MAX_CARD)
        return msgspec.json.decode(read_text(path, ConfigurationError), type=dict[str, Any])
    except FileNotFoundError as error:
        missing = f"There is no policy at {folder}: {path.name} is missing."
        raise ConfigurationError(missing, param="policy") from error
    except (OSError, *UNREADABLE) as error:
        raise ConfigurationError(f"{path} cannot be read as a policy ({error}): install or train it again.") from error


def _check_file(path: Path, most: int) -> None:
    """Raises OSError, and ConfigurationError for what is no file, which may have no end, and for too long a one."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > most:
        raise ConfigurationError(f"{path} is no file of a policy: it must be a file of up to {most} bytes.")


def check_versions(folder: Path, card: Mapping[str, Any], known: Mapping[str, Any], remedy: str) -> None:
    """Raises ConfigurationError, with the remedy, if the card is of other versions than this code reads."""
    for name, version in known.items():
        if card.get(name) != version:
            raise ConfigurationError(
                f"The policy at {folder} has {name} {card.get(name)}, this Updraft reads {version}: "
                f"{remedy} or install the matching one."
            )


def file_named(files: Mapping[str, str], name: str) -> str | None:
    """Under which name a card's `files` have `gate1.onnx`, say: that, or `gate1-<digits>.onnx`. None if they do not."""
    stem, suffix = name.rsplit(".", 1)
    return next((file for file in files if re.fullmatch(rf"{stem}(-[0-9a-f]+)?\.{suffix}", file)), None)


def read_checked(path: Path, expected: str | None) -> bytes:
    """A file of a policy, whose SHA-256 its card names. Raises ConfigurationError."""
    try:
        _check_file(path, _MAX_FILE)
        data = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"The policy at {path.parent} lacks {path.name}: install or train it again."
        ) from error
    if sha256(data) != expected:
        raise ConfigurationError(
            f"{path} is not the file its {CARD_NAME} describes (damaged or replaced): install or train it again."
        )
    return data


def open_graph(path: Path, expected: str | None) -> Any:
    """An onnxruntime session on one thread. Raises ConfigurationError, or MissingDependencyError."""
    onnxruntime = load_onnxruntime()
    graph = read_checked(path, expected)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    try:
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own tree of plain Exceptions
        raise ConfigurationError(f"{path} cannot be run by onnxruntime ({error}): train the policy again.") from error
