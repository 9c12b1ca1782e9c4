"""Messages between an engine's server and its core: typed structs, encoded as msgpack between processes.

Requests, outputs and counters are the engine's dataclasses, so new fields need no change here. Nothing is unpickled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from ....protocol import errors
from ....protocol.decoding import prepare_types
from ....protocol.errors import EngineError, InvalidRequestError, UpdraftError
from ....protocol.sampling import SamplingDefaults
from ..config import EngineConfig
from ..stats import EngineStats
from ..types.outputs import StepOutputs
from ..types.request import GenerationRequest


class Load(msgspec.Struct, tag=True, frozen=True):
    """The first command to a core: load a model. `folder` and `draft` are the paths for `Engine.from_folder`."""

    folder: str
    draft: str | None
    config: EngineConfig


class Add(msgspec.Struct, tag=True, frozen=True):
    request: GenerationRequest


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Drop a request, or one of its answers; ignored if the request is unknown or has finished."""

    request_id: str
    index: int | None = None


class CompileNotice(msgspec.Struct, tag=True, frozen=True):
    """Notice from the compiling thread to the engine loop: this request's constraint is compiled, or has failed."""

    request_id: str


class Sleep(msgspec.Struct, tag=True, frozen=True):
    """Call `Engine.sleep`, or `Engine.wake` if `asleep` is false; sent only while no request is in flight."""

    asleep: bool


class Close(msgspec.Struct, tag=True, frozen=True):
    """Stop after the current step."""


Command = Load | Add | Abort | CompileNotice | Sleep | Close


class LoadProgress(msgspec.Struct, tag=True, frozen=True):
    """Progress of loading: `done` of `total` bytes of weights are read."""

    done: int
    total: int


class ReadyReport(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded. `context_length` limits prompt plus answer, in tokens; `sampling` has model defaults."""

    model_id: str
    context_length: int
    sampling: SamplingDefaults = SamplingDefaults()


class OutputReport(msgspec.Struct, tag=True, frozen=True):
    """The outputs of the steps since the last report, and the current statistics."""

    outputs: list[StepOutputs]
    stats: EngineStats


class FailureReport(msgspec.Struct, tag=True, frozen=True):
    """Failure of some requests; the engine continues."""

    request_ids: list[str]
    error: UpdraftError


class StepFailureReport(msgspec.Struct, tag=True, frozen=True):
    """Failure of a step. The engine has dropped the `lost` requests, and continues. `suspects` were in the step."""

    lost: list[str]
    suspects: list[str]
    error: UpdraftError


class SleepReport(msgspec.Struct, tag=True, frozen=True):
    """The engine sleeps, or has woken up."""

    asleep: bool


class AliveReport(msgspec.Struct, tag=True, frozen=True):
    """Heartbeat, sent even during long steps; a core that stops sending heartbeats is hung."""


class DownReport(msgspec.Struct, tag=True, frozen=True):
    """The engine's last report: it has ended with `error`."""

    error: UpdraftError


Report = (
    LoadProgress
    | ReadyReport
    | OutputReport
    | FailureReport
    | StepFailureReport
    | SleepReport
    | AliveReport
    | DownReport
)


class CoreTransport(ABC):
    """The transport between an engine loop and its server: queues of a thread, or sockets of a process."""

    @abstractmethod
    def next_command(self, wait: bool) -> Command | None:
        """Return the next command. If none is pending, wait for one, or return None if `wait` is false."""

    @abstractmethod
    def report(self, what: Report) -> None:
        """Send a report without waiting."""

    @abstractmethod
    def send_back(self, command: Command) -> None:
        """Queue a command for `next_command`. May be called from any thread."""


def encode_command(command: Command) -> bytes:
    """Encode a command. Raises InvalidRequestError if the request holds numbers or text that msgpack cannot encode."""
    try:
        return _ENCODER.encode(command)
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequestError(f"The request holds a value that cannot be encoded: {error}.") from error


def decode_command(data: bytes) -> Command:
    return _COMMANDS.decode(data)


def encode_report(report: Report) -> bytes:
    return _ENCODER.encode(report)


def decode_report(data: bytes) -> Report:
    return _REPORTS.decode(data)


def down_report(error: BaseException) -> DownReport:
    """Return the last report of a core that ends with `error`. Errors of other libraries become EngineErrors."""
    if isinstance(error, UpdraftError):
        return DownReport(error)
    failure = EngineError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return DownReport(failure)


class _Error(msgspec.Struct, frozen=True):
    kind: str
    message: str
    param: str | None
    code: str | None


prepare_types(_Error)


def _plain(value: object) -> object:
    """Encode an error as its fields and the name of its class, or of its nearest base class in `protocol.errors`."""
    if not isinstance(value, UpdraftError):
        raise NotImplementedError(f"{type(value).__name__} cannot be sent between server and core.")
    kind = next(kind for kind in type(value).__mro__ if kind.__module__ == errors.__name__)
    return _Error(kind.__name__, value.message, value.param, value.code)


def _rebuilt(kind: type, value: Any) -> UpdraftError:
    if kind is not UpdraftError:
        raise NotImplementedError(f"{kind.__name__} cannot be sent between server and core.")
    fields = msgspec.convert(value, _Error)
    error = getattr(errors, fields.kind, None)
    if not (isinstance(error, type) and issubclass(error, UpdraftError)):
        raise ValueError(f"{fields.kind!r} is not an Updraft error")
    return error(fields.message, param=fields.param, code=fields.code)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_COMMANDS = msgspec.msgpack.Decoder(Command, dec_hook=_rebuilt)
_REPORTS = msgspec.msgpack.Decoder(Report, dec_hook=_rebuilt)
