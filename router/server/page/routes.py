"""All routes of the page, in one table."""

from __future__ import annotations

from ..routes.route import Route
from . import assets, charts, device_models, markdown, overview, savings, trace

ROUTES: tuple[Route, ...] = (
    *assets.ROUTES,
    *overview.ROUTES,
    *savings.ROUTES,
    *charts.ROUTES,
    *trace.ROUTES,
    *device_models.ROUTES,
    *markdown.ROUTES,
)
