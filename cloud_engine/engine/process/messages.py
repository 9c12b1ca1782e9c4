"""Messages between the server of an engine and its core: typed structs, as msgpack where they cross a process.

Requests, outputs and counters are the engine's own dataclasses, encoded as they are: a new field needs nothing here.
Nothing is ever unpickled.
"""

from __future__ import annotations

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
    """The first command to a core. `folder` and `draft` are paths as `Engine.from_folder` takes them."""

    folder: str
    draft: str | None
    config: EngineConfig


class Add(msgspec.Struct, tag=True, frozen=True):
    request: GenerationRequest


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Drop a request, or one of its answers; one that is not there (any more) is no error."""

    request_id: str
    index: int | None = None


class Prepared(msgspec.Struct, tag=True, frozen=True):
    """From a thread of the engine to its loop: the constraint of this request is compiled, or found to be unusable."""

    request_id: str


class Close(msgspec.Struct, tag=True, frozen=True):
    """End after the current step."""


Command = Load | Add | Abort | Prepared | Close


class Loading(msgspec.Struct, tag=True, frozen=True):
    """`done` of `total` bytes of weights are read."""

    done: int
    total: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded. `context_length`: tokens of prompt and answer together. `sampling`: the model's own."""

    model_id: str
    context_length: int
    sampling: SamplingDefaults = SamplingDefaults()


class Stepped(msgspec.Struct, tag=True, frozen=True):
    """The outputs of the steps since the last report, and the counters after them."""

    outputs: list[StepOutputs]
    stats: EngineStats


class Failed(msgspec.Struct, tag=True, frozen=True):
    """These requests are over, the engine goes on."""

    request_ids: list[str]
    error: UpdraftError


class Alive(msgspec.Struct, tag=True, frozen=True):
    """Sent all the time, also during a long step: a core that does not is hung."""


class Down(msgspec.Struct, tag=True, frozen=True):
    """The engine's last report: it ends, because of `error`."""

    error: UpdraftError


Report = Loading | Ready | Stepped | Failed | Alive | Down


def encode_command(command: Command) -> bytes:
    """Raises InvalidRequestError for a request with numbers or text that msgpack cannot hold."""
    try:
        return _ENCODER.encode(command)
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequestError(f"The request holds a value out of all bounds: {error}.") from error


def decode_command(data: bytes) -> Command:
    return _COMMANDS.decode(data)


def encode_report(report: Report) -> bytes:
    return _ENCODER.encode(report)


def decode_report(data: bytes) -> Report:
    return _REPORTS.decode(data)


def down_report(error: BaseException) -> Down:
    """The report of a core that ends because of `error`: our own errors as they are, others by type and message."""
    if isinstance(error, UpdraftError):
        return Down(error)
    failure = EngineError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return Down(failure)


class _Error(msgspec.Struct, frozen=True):
    kind: str
    message: str
    param: str | None
    code: str | None


prepare_types(_Error)


def _plain(value: object) -> object:
    """An error travels as the nearest class of `protocol.errors` and what those are made of."""
    if not isinstance(value, UpdraftError):
        raise NotImplementedError(f"{type(value).__name__} is not for the wire between server and core.")
    kind = next(kind for kind in type(value).__mro__ if kind.__module__ == errors.__name__)
    return _Error(kind.__name__, value.message, value.param, value.code)


def _rebuilt(kind: type, value: Any) -> UpdraftError:
    if kind is not UpdraftError:
        raise NotImplementedError(f"{kind.__name__} is not for the wire between server and core.")
    fields = msgspec.convert(value, _Error)
    error = getattr(errors, fields.kind, None)
    if not (isinstance(error, type) and issubclass(error, UpdraftError)):
        raise ValueError(f"{fields.kind!r} is no error of ours")
    return error(fields.message, param=fields.param, code=fields.code)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_COMMANDS = msgspec.msgpack.Decoder(Command, dec_hook=_rebuilt)
_REPORTS = msgspec.msgpack.Decoder(Report, dec_hook=_rebuilt)
