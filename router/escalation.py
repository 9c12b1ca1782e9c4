"""One request's way to the cloud: what it asks there, for how long it waits, and what must be closed in the end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ..protocol.errors import EngineError
from .config import RouterConfig
from .job import Job
from .record import Record
from .tiers import CloudStream, CloudTier, CloudUsage


@dataclass(frozen=True, slots=True)
class CloudReply:
    """A complete cloud answer, as the server sent it."""

    completion: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CloudStreamReply:
    stream: CloudStream


class Escalation:
    """`ask()` for a whole reply, `open()` for a stream; `aclose()` when its answer is delivered or nobody wants it.

    Both raise CloudFailure, and tell the record how long the cloud took and what it counted.
    """

    def __init__(self, job: Job, tier: CloudTier | None, config: RouterConfig, record: Record) -> None:
        self.job = job
        self.config = config
        self.record = record
        self._tier = tier
        self._stream: CloudStream | None = None
        self._streaming = 0.0  # since when, on the clock of time.monotonic()

    @property
    def tier(self) -> CloudTier:
        if self._tier is None:
            raise EngineError("The router has no cloud tier.")
        return self._tier

    def body(self) -> dict[str, Any]:
        """What the caller sent, for our cloud's model."""
        return {**self.job.body, "model": self.config.cloud_model}

    async def ask(self, body: dict[str, Any], *, patience_s: float) -> CloudReply | CloudStreamReply:
        """A stream whose first piece of content has arrived if the caller wants a stream, else the whole answer."""
        if self.job.stream:
            return CloudStreamReply(await self.open(body, patience_s=patience_s))
        with self.record.in_cloud(self.config.cloud_model):
            completion = await self.tier.complete("chat/completions", body, timeout_s=patience_s)
        self.record.cloud = CloudUsage.of(completion) or CloudUsage()
        return CloudReply(completion)

    async def open(self, body: dict[str, Any], *, patience_s: float) -> CloudStream:
        body["stream"] = True
        body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        with self.record.in_cloud(self.config.cloud_model):
            stream = await self.tier.open("chat/completions", body, timeout_s=patience_s)
        self._stream, self._streaming = stream, time.monotonic()
        return stream

    async def aclose(self) -> None:
        """Stop what is still coming. Idempotent."""
        stream, self._stream = self._stream, None
        if stream is not None:
            self.record.cloud_s += time.monotonic() - self._streaming
            await stream.aclose()
