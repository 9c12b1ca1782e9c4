"""Messages from rank 0 to the other ranks, which do what they say in the same order, so that collectives match."""

from __future__ import annotations

import msgspec

from ...protocol.decoding import prepare_types
from .config import CacheOptions, EngineConfig
from .step import StepPlan, StepSampling


class Join(msgspec.Struct, tag=True, frozen=True):
    """Rank 0's answer to a rank that joins: load your part of the model with this `fingerprint`."""

    config: EngineConfig
    fingerprint: str


class Refusal(msgspec.Struct, tag=True, frozen=True):
    """Rank 0's answer to a process that cannot join."""

    reason: str


class NewRunner(msgspec.Struct, tag=True, frozen=True):
    """Create a runner with an empty KV cache, in place of the last one."""

    num_blocks: int
    cache: CacheOptions


class NewWorker(msgspec.Struct, tag=True, frozen=True):
    """Create the worker, with slots for sequences of up to `context_length` tokens."""

    context_length: int


class Capture(msgspec.Struct, tag=True, frozen=True):
    """Capture CUDA graphs (`Runner.capture`). The arguments are those of `GraphLimits`."""

    sequences: int
    draft_rows: int
    blocks: int


class RunChunk(msgspec.Struct, array_like=True, frozen=True):
    """The arguments of `Chunk`."""

    token_ids: list[int]
    start: int
    block_table: list[int]
    num_logits: int


class RunChunks(msgspec.Struct, tag=True, frozen=True):
    """Compute chunks outside a step, to warm up and to measure."""

    chunks: list[RunChunk]


class LaunchStep(msgspec.Struct, tag=True, frozen=True):
    """Launch a step. The plan has the tokens that the drafters of rank 0 proposed, and no grants."""

    plan: StepPlan


class SampleStep(msgspec.Struct, tag=True, frozen=True):
    """Sample the last launched step."""

    sampling: StepSampling


class ReadStep(msgspec.Struct, tag=True, frozen=True):
    """Read the earliest unread step. `tokens`: the sampled token of each row, accepted or not."""

    tokens: list[int]


class Release(msgspec.Struct, tag=True, frozen=True):
    """Free the KV cache, and move weights on a GPU to host memory (`Runner.release`)."""


class Restore(msgspec.Struct, tag=True, frozen=True):
    """Undo `Release`."""


Message = (
    Join
    | Refusal
    | NewRunner
    | NewWorker
    | Capture
    | RunChunks
    | LaunchStep
    | SampleStep
    | ReadStep
    | Release
    | Restore
)

_ENCODER = msgspec.msgpack.Encoder()
prepare_types(Message)
_DECODER = msgspec.msgpack.Decoder(Message)


def encode(message: object) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes) -> Message:
    return _DECODER.decode(data)
