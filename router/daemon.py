"""The router on a local OpenAI port, for apps that are not Python: the shared HTTP shell around `Router.handle`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from ..protocol.http import create_app, read_wire_request, send, while_connected
from ..protocol.server import bind_socket, serve
from .config import RouterConfig
from .router import Router

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """`port` 0 takes any free one; the ready line says which. `ready_file` receives the URL."""

    config: RouterConfig = field(default_factory=RouterConfig)
    host: str = "127.0.0.1"
    port: int = 4114
    ready_file: Path | None = None


def daemon_app(router: Router) -> FastAPI:
    """The app that starts `router`, serves every path from it, and closes it in the end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        try:
            await router.start()
            yield
        finally:
            await router.close()

    app = create_app("Updraft", lifespan=lifespan)

    @app.api_route("/{path:path}", methods=METHODS)
    async def _serve(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction] - the decorator uses it
        wire = await read_wire_request(request)
        async with while_connected(request.receive):
            response = await router.handle(wire)
        # The shell stamps its own x-request-id on everything; ours stays in x-updraft-request-id.
        headers = {name: value for name, value in response.headers.items() if name != "x-request-id"}
        return send(replace(response, headers=headers), request)

    return app


def run_daemon(options: DaemonOptions, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises PortInUseError before any model is loaded."""
    sock = bind_socket(options.host, options.port)
    app = daemon_app(Router(options.config))
    serve(app, host=options.host, sock=sock, ready_file=options.ready_file, on_ready=on_ready)
