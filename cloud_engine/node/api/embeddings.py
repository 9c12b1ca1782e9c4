"""`/v1/embeddings`: sends each input as a separate request to the engine, which pools the hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from ....protocol.http.wire import new_id
from ...engine.types.request import GenerationRequest
from ..answers.fan_out import fan_out
from .preprocessing import Tenant

if TYPE_CHECKING:
    from ...engine.process.client import EngineClient


async def embed(engine: EngineClient, inputs: Sequence[list[int]], tenant: Tenant) -> list[list[float]]:
    """Return one vector (hidden_size,) per input, in order. Cancelling this call aborts the engine's work.

    Raises the errors of `EngineClient.generate`; one invalid input fails the whole call.
    """
    vectors: dict[int, list[float]] = {}
    requests = [
        GenerationRequest(new_id("emb"), tokens, embed=True, streamed=False, tenant=tenant.id, weight=tenant.weight)
        for tokens in inputs
    ]
    async with aclosing(fan_out([partial(engine.generate, request) for request in requests])) as outputs:
        async for number, output in outputs:
            vectors[number] = list(output.embedding)
    return [vectors[number] for number in range(len(inputs))]
