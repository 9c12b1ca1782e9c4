"""`/v1/embeddings` through the router: always the cloud's, for the model on the device gives none."""

from __future__ import annotations

from typing import Any

from ...protocol.errors import EngineError, InvalidRequestError, UnsupportedFeatureError
from ...protocol.http.forwarding import NOTHING, Forwarded
from ..accounting.request_record import RequestRecord
from ..cascade.escalation import cloud_call, traced
from ..gates.gates import GateDecision
from ..gates.rules import offline_mode
from ..request.chat_request import RequestedTier, take_options
from ..state import RouterState
from ..tiers.interfaces import CloudUsage


async def embed(
    body: dict[str, Any],
    requested_tier: RequestedTier,
    state: RouterState,
    record: RequestRecord,
    passed_on: Forwarded = NOTHING,
) -> dict[str, Any]:
    """The cloud's answer to `body`, as it sent it; `record` learns what it cost. Raises UpdraftError, CloudFailure."""
    if take_options(body).private:
        raise InvalidRequestError(
            "updraft.private keeps a request on this device, which has no embeddings: leave it out.",
            param="updraft.private",
        )
    if requested_tier == "local":
        raise UnsupportedFeatureError("This device has no embeddings: use model='auto' or 'cloud'.", param="model")
    config, tiers = state.config, state.tiers
    missing = offline_mode() if config.offline else state.availability().cloud_missing
    if missing is not None:
        raise missing
    if tiers.cloud is None:
        raise EngineError("The router has no cloud tier.")
    record.decide(GateDecision(0, escalate=True, reason="embeddings come from the cloud"))
    body = {**body, "model": config.cloud_model}
    async with cloud_call(state, record, body) as span:
        forwarded = traced(passed_on, span)
        answer = await tiers.cloud.embed(body, timeout_s=config.cloud_timeout_s, forwarded=forwarded)
    record.route = "cloud"
    record.counted(CloudUsage.of(answer))
    return answer
