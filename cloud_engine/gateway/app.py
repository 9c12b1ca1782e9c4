"""The gateway's HTTP routes: endpoints relayed to nodes, and routes for models, health, metrics and administration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...protocol.errors import InvalidRequestError, ModelNotFoundError, OverloadedError
from ...protocol.http import prometheus
from ...protocol.http.access import Access
from ...protocol.http.app import create_app, error_response, send_json
from ...protocol.responses import ModelList
from .access.principal import Principal
from .access.principal import Scope as KeyScope
from .access.routes import KeyRoutes
from .metrics import WorkerGauges, gateway_metrics, requests_in_flight
from .node_routes import NodeRoutes
from .relay.passthrough import PATHS
from .relay.relay import Relay

RELAYED = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/moderations", *PATHS)


def create_gateway_app(relay: Relay, access: Access | None = None, *, logs_limits: bool = True) -> FastAPI:
    """Return the gateway's app. It watches the nodes while it runs, and writes all pending ledger rows at shutdown.

    `logs_limits`: whether to log limits that are useless with the models of the nodes.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:  # at shutdown, runs the callbacks in reverse order, even if one fails
            stack.callback(relay.keys.close)
            stack.push_async_callback(asyncio.to_thread, relay.tracer.flush)
            stack.push_async_callback(asyncio.to_thread, relay.accounting.ledger.close)
            stack.push_async_callback(relay.accounting.close)
            stack.push_async_callback(relay.dispatch.upstream.close)
            stack.push_async_callback(relay.dispatch.registry.close)
            await relay.dispatch.registry.start()
            if logs_limits and (served := relay.dispatch.registry.known_models()) is not None:
                relay.accounting.log_useless_limits(served)
            stack.callback(asyncio.create_task(gauges.keep_published()).cancel)
            # Settle nothing, only to learn whether the store of limits is reachable, which `/health` reports.
            stack.callback(asyncio.create_task(relay.accounting.limiter.store.settle(())).cancel)
            yield

    app = create_app("Updraft gateway", access=access, lifespan=lifespan)
    app.state.traffic.at_deadline = relay.end_answers
    gauges = WorkerGauges(relay.dispatch.registry, relay.accounting.ledger, relay.counters.own)
    routes = _Routes(relay, gauges)
    for path in RELAYED:
        app.add_post(path, relay)
    app.add_route("/v1/models", routes.models, methods=["GET"])
    app.add_route("/v1/models/{model:path}", routes.model, methods=["GET"])
    app.add_route("/health", routes.health, methods=["GET"])
    app.add_route("/metrics", routes.metrics, methods=["GET"])
    nodes = NodeRoutes(relay.keys, relay.dispatch.registry, relay.dispatch.upstream, routes.requests_in_flight)
    app.add_route("/admin/nodes", nodes.list, methods=["GET"])
    app.add_route("/admin/nodes", nodes.register, methods=["POST"])
    app.add_route("/admin/nodes", nodes.remove, methods=["DELETE"])
    app.add_route("/admin/usage", routes.usage, methods=["GET"])
    keys = KeyRoutes(relay.keys)
    app.add_route("/admin/keys", keys.list, methods=["GET"])
    app.add_route("/admin/keys", keys.create, methods=["POST"])
    app.add_route("/admin/keys/{key_id}", keys.revoke, methods=["DELETE"])
    app.add_route("/admin/keys/{key_id}/rotate", keys.rotate, methods=["POST"])
    app.add_route("/admin/audit", keys.audit, methods=["GET"])
    return app


class _Routes:
    def __init__(self, relay: Relay, gauges: WorkerGauges) -> None:
        self._gauges = gauges
        self._registry = relay.dispatch.registry
        self._accounting = relay.accounting
        self._keys = relay.keys
        self._counters = relay.counters

    async def models(self, request: Request) -> Response:
        principal = self._authenticate(request, "inference")
        return send_json(ModelList([card for card in self._registry.models() if principal.may_use(card.id)]))

    async def model(self, request: Request) -> Response:
        principal = self._authenticate(request, "inference")
        model = request.path_params["model"]
        for card in self._registry.models():
            if card.id == model and principal.may_use(model):
                return send_json(card)
        raise ModelNotFoundError(f"The model {model!r} does not exist here.", param="model")

    async def health(self, _request: Request) -> Response:
        healthy = sum(node.healthy for node in self._registry.nodes)
        if not self._registry.candidates:
            return error_response(OverloadedError("No node is healthy."))
        limits = self._accounting.limiter.store.failing
        failing = {"ledger": self._accounting.ledger.failing, "keys": self._keys.failing, "limits": limits}
        problems = {part: "unavailable" for part, is_failing in failing.items() if is_failing}
        status = "degraded" if problems or not healthy else "ok"
        return send_json({"status": status, "nodes": len(self._registry.nodes), "healthy_nodes": healthy, **problems})

    async def metrics(self, request: Request) -> Response:
        """Serve the metrics. Metrics labelled by key are included only for callers with the scope `usage`."""
        with_keys = self._keys.database is None
        if "authorization" in request.headers:
            with_keys = "usage" in self._keys.principal(request.headers["authorization"]).scopes
        self._gauges.publish()
        metrics = gateway_metrics(self._counters, with_keys=with_keys)
        return PlainTextResponse(prometheus.render(metrics), media_type=prometheus.CONTENT_TYPE)

    def requests_in_flight(self) -> dict[str, int]:
        """Return the requests in flight by node, summed over all workers."""
        self._gauges.publish()
        return requests_in_flight(self._counters.rows)

    async def usage(self, request: Request) -> Response:
        self._authenticate(request, "usage")
        for name in request.query_params:
            raise InvalidRequestError(f"Unknown query parameter {name[:100]!r}: leave it out.", param=name[:100])
        return send_json({"usage": await asyncio.to_thread(self._accounting.usage)})

    def _authenticate(self, request: Request, scope: KeyScope) -> Principal:
        principal = self._keys.principal(request.headers.get("authorization", ""))
        principal.require(scope)
        return principal
