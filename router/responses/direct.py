"""Requests that skip the gates: only rules choose the tier, which answers the unchanged request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from ...protocol.errors import InvalidRequestError, UnsupportedFeatureError
from ...protocol.http.forwarding import forwarded
from ...protocol.http.wire import WireRequest
from ..accounting.request_record import RequestRecord
from ..cascade.escalation import Escalation
from ..gates.gates import GateDecision
from ..gates.rules import Ruling
from ..request.chat_request import RequestedTier, RoutingRequest, check_private, take_options
from ..state import RouterState
from ..tiers.interfaces import CloudContent

#: JSON (a dict or a struct), server-sent events, or content of a cloud.
DirectReply = object | AsyncGenerator[bytes] | CloudContent
DirectHandler = Callable[["DirectCall"], Awaitable[DirectReply]]


class CloudsOwnError(UnsupportedFeatureError):
    """A request that only a cloud can answer."""


@dataclass(slots=True)
class DirectCall:
    """One request with its resources. Call `aclose()` when the answer is delivered or dropped."""

    request: WireRequest
    job: RoutingRequest
    state: RouterState
    record: RequestRecord
    # Resources to close at the end.
    closing: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def route(
        self, path: str, unsupported: InvalidRequestError | None, why_cloud: str
    ) -> tuple[Ruling, Escalation]:
        """Return the tiers that may answer, and the escalation to the cloud. `unsupported`: why the device cannot.
        `why_cloud`: the reason for the cloud if the rules give none. Raises as `rule`.
        """
        self.job = replace(self.job, unsupported=unsupported)
        escalation = Escalation(self.job, self.state, self.record, path)
        self.closing.push_async_callback(escalation.aclose)
        ruling = await escalation.ruling()
        open_ended = ruling.open or (ruling.cloud and isinstance(unsupported, CloudsOwnError))
        self.record.decide(GateDecision(0, escalate=ruling.cloud, reason=why_cloud if open_ended else ruling.reason))
        return ruling, escalation

    def cloud_time_left_s(self) -> float:
        return max(0.001, min(self.state.config.cloud_timeout_s, self.job.remaining_s))

    async def aclose(self) -> None:
        await self.closing.aclose()


def direct_job(
    request: WireRequest, body: dict[str, Any], requested_tier: RequestedTier, record: RequestRecord
) -> RoutingRequest:
    """Return the request for the rules. Raises InvalidRequestError for options that only gates use."""
    options = take_options(body)
    check_private(options, requested_tier)
    for name in ("quality", "confidence", "hold_tokens"):
        if getattr(options, name) is not None:
            raise UnsupportedFeatureError(
                f"updraft.{name} is only for /v1/chat/completions: no gate judges this endpoint. Leave it out.",
                param=f"updraft.{name}",
            )
    return RoutingRequest(
        requested_tier=requested_tier,
        body=body,
        private=options.private,
        deadline=None if request.timeout_s is None else record.started + request.timeout_s,
        forwarded=forwarded(request.headers, request.query, request.cloud_key),
    )
