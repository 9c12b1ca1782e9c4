"""`/metrics`, for Prometheus."""

from __future__ import annotations

from ....protocol.http import prometheus
from ....protocol.http.wire import WireResponse
from .route import RequestContext, Route


async def metrics(context: RequestContext) -> WireResponse:
    return WireResponse(200, {"content-type": prometheus.CONTENT_TYPE}, context.router.metrics().encode())


ROUTES = (Route("GET", "/metrics", metrics, "see [metrics](metrics.md)"),)
