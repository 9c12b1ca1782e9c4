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
    """Create a runner with an empty KV cache and a worker, in place of the last ones."""

    num_blocks: int
    # Slots of the worker, and blocks of each.
    num_slots: int
    blocks_per_slot: int
    cache: CacheOptions


class Capture(msgspec.Struct, tag=True, frozen=True):
    """Capture CUDA graphs (`Runner.capture`). The arguments are those of `GraphLimits`."""

    sequences: int
    draft_rows: int


class ComputeZeros(msgspec.Struct, tag=True, frozen=True):
    """Compute outside a step, to warm up and to measure (`Runner.compute_zeros`)."""

    rows: list[int]
    num_logits: int


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


Message = Join | Refusal | NewRunner | Capture | ComputeZeros | LaunchStep | SampleStep | ReadStep | Release | Restore

_ENCODER = msgspec.msgpack.Encoder()
prepare_types(Message)
_DECODER = msgspec.msgpack.Decoder(Message)


def encode(message: object) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes) -> Message:
    return _DECODER.decode(data)
