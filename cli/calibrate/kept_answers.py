"""The answers of both tiers while a calibration runs: a file of its own, so that a killed one goes on where it stopped.

Only the user can read it, and it is removed when the policy is made. It holds answers, and hashes of the prompts.
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

_VERSION = 2  # of what is kept of an answer: files of another one are not read


class AnsweredPair(msgspec.Struct, omit_defaults=True):
    """Both answers to one prompt; of a line that only says what was spent, nothing but that."""

    key: str = ""
    local: str = ""
    local_finish: str = "stop"
    logprobs: list[float] = []
    entropies: list[float] = []
    margins: list[float] = []
    # What only engines of ours tell, float32 each.
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


def answers_file(models: dict[str, str], local: ModelIdentity) -> Path:
    """Of a pair: other weights, or another template, begin anew."""
    name = _digest(json.dumps([_VERSION, models, local.weights, local.template], sort_keys=True))
    return state_folder() / "calibrations" / f"{name}.jsonl"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class KeptAnswers:
    """The file, open for one process. Raises ConfigurationError where it cannot be used, or another one has it."""

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
            raise ConfigurationError(f"{path} cannot be used for the answers so far: {error.strerror}.") from error
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
        """Keep the file, unless there is nothing in it. Idempotent."""
        if not self.pairs and not self.spent:
            self.path.unlink(missing_ok=True)
        self._open.close()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._open.close()

    def _append(self, pair: AnsweredPair) -> None:
        line = msgspec.json.encode(pair) + b"\n"
        while line:  # a full disk takes a part of it, and then raises
            line = line[os.write(self._handle, line) :]

    def _read(self) -> None:
        """Every whole line. The last one is cut off where a killed process left it unfinished."""
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._handle, whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                pair = msgspec.json.decode(line, type=AnsweredPair)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigurationError(
                    f"{self.path}, line {number}, is damaged ({error}): delete the file."
                ) from error
            self.spent += pair.usd
            if pair.key:
                self.pairs[pair.key] = pair

    def _refuse(self) -> None:
        raise ConfigurationError(f"Another calibration of this pair is running: {self.path} is in use.")
