"""Answers of both tiers, kept in a file while a calibration runs, so that an interrupted calibration can resume.

The file is private to the user and is removed when the policy is made. It holds answers and hashes of the prompts.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from ...model_files.identity import ModelIdentity
from ...protocol.decoding import prepare_types
from ...protocol.errors import ConfigurationError
from ...protocol.safety.private_files import create_private, private_file
from ...protocol.safety.system import locked
from ...protocol.settings import state_folder
from ...protocol.validation_messages import plain_words

_VERSION = 2  # format version; part of the file name, so that files of other versions are not read


class AnsweredPair(msgspec.Struct, omit_defaults=True):
    """A line of the file: both answers to one prompt, or only a cost in `usd`, with all other fields unset."""

    key: str = ""
    local: str = ""
    local_finish: str = "stop"
    logprobs: list[float] = []
    entropies: list[float] = []
    margins: list[float] = []
    # Log-probabilities and hidden states as float32 arrays; only Updraft's engines report them.
    prompt_logprobs: bytes = b""
    prompt_hidden: bytes = b""
    answer_hidden: bytes = b""
    cloud: str = ""
    cloud_finish: str = "stop"
    cloud_read: int | None = None
    cloud_written: int | None = None
    usd: float = 0.0


prepare_types(AnsweredPair)


def prompt_key(messages: list[dict[str, Any]]) -> str:
    return _digest(json.dumps(messages, sort_keys=True))


def saved_answers_file(models: dict[str, str], local: ModelIdentity) -> Path:
    """Return the path of a pair's file. The name depends on the local model's weights and chat template."""
    name = _digest(json.dumps([_VERSION, models, local.weights, local.template], sort_keys=True))
    return state_folder() / "calibrations" / f"{name}.jsonl"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class SavedAnswers:
    """The locked file of kept answers. Raises ConfigurationError if it is unusable or used by another process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pairs: dict[str, AnsweredPair] = {}
        self.spent = 0.0
        self._open = ExitStack()
        try:
            create_private(path)
            self._handle = os.open(path, os.O_RDWR | os.O_APPEND)
            self._open.callback(os.close, self._handle)
            self._open.enter_context(locked(self._handle, self._refuse))
            self._read()
            private_file(path)
        except OSError as error:
            self._open.close()
            raise ConfigurationError(f"Cannot keep answers in {path}: {error.strerror}.") from error
        except ConfigurationError:
            self._open.close()
            raise

    def add(self, pair: AnsweredPair) -> None:
        self.pairs[pair.key] = pair
        self._append(pair)

    def spend(self, usd: float) -> None:
        self.spent += usd
        self._append(AnsweredPair(usd=usd))

    def close(self) -> None:
        """Close the file and delete it if it is empty. Idempotent."""
        if not self.pairs and not self.spent:
            self.path.unlink(missing_ok=True)
        self._open.close()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._open.close()

    def _append(self, pair: AnsweredPair) -> None:
        line = msgspec.json.encode(pair) + b"\n"
        while line:  # on a full disk, the first write may be partial and the next raises
            line = line[os.write(self._handle, line) :]

    def _read(self) -> None:
        """Read all complete lines, and truncate an incomplete last line that a killed process left."""
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._handle, whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                pair = msgspec.json.decode(line, type=AnsweredPair)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigurationError(
                    f"{self.path}, line {number}, is damaged ({plain_words(error)}): delete the file."
                ) from error
            self.spent += pair.usd
            if pair.key:
                self.pairs[pair.key] = pair

    def _refuse(self) -> None:
        raise ConfigurationError(f"Another calibration of this pair is running: {self.path} is in use.")
