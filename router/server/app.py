"""HTTP daemon of the router: OpenAI-compatible endpoints for apps in any language."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from ...protocol.errors import InvalidRequestError, UpdraftError
from ...protocol.http.access import Access, check_keyless
from ...protocol.http.app import cancel_on_disconnect, create_app, read_wire_request, send, upload_wire_request
from ...protocol.http.server import bind_socket, serve
from ...protocol.http.tls import TlsFiles, check_encrypted
from ...protocol.http.wire import WireRequest, WireResponse
from ...protocol.safety.private_files import file_version
from ...protocol.safety.system import on_hangup
from ..config import RouterConfig
from ..router import Router
from ..settings_checks import check_settings
from ..storage.file_store import MB
from . import chat_socket
from .batches.run import is_set_within
from .endpoints import Endpoints
from .page.assets import public_paths
from .routes.openai.files import MAX_UPLOAD, UPLOADS

#: Header with the seconds that the client waits for the answer to begin, like the read timeout of OpenAI's clients.
TIMEOUT_HEADER = "x-updraft-timeout"
_CLIENTS_TIMEOUTS = ("x-stainless-read-timeout", "x-stainless-timeout")  # headers of OpenAI's Python and JS clients

_SET_KEY = "set a key with --client-api-key-env"
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
log = logging.getLogger("updraft.router")
POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """Options of the daemon: settings, address and access control."""

    config: RouterConfig = field(default_factory=RouterConfig)
    host: str = "127.0.0.1"
    # TCP port. 0 picks a free port, which the ready line reports.
    port: int = 4114
    # File to write the URL to once the daemon is ready.
    ready_file: Path | None = None
    # API key that clients must send. None: loopback only, because other machines could spend the user's cloud budget.
    api_key: str | None = field(default=None, repr=False)
    # TLS certificate and key. None: plain HTTP, which needs `insecure` on addresses other than loopback.
    tls: TlsFiles | None = None
    insecure: bool = False
    # Source of reloaded settings. None disables reloading.
    reload: Reload | None = None

    def __post_init__(self) -> None:
        if self.api_key is None:
            check_keyless(self.host, _SET_KEY)
        check_encrypted(self.host, self.tls, insecure=self.insecure)


def daemon_app(
    router: Router, api_key: str | None = None, host: str = "127.0.0.1", reload: Reload | None = None
) -> FastAPI:
    """Return the app that starts `router`, serves its endpoints and closes it at shutdown. `host`: the bind address."""
    endpoints = Endpoints(router)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        following: asyncio.Task[None] | None = None
        try:
            await endpoints.start()
            if reload is not None:
                following = asyncio.create_task(follow_settings(router, reload))
            yield
        finally:
            if following is not None:
                following.cancel()
            await endpoints.close()

    config = router.config
    serves_all = api_key is not None or config.allow_other_users
    access = Access(
        (host, *config.allowed_hosts),
        config.allowed_origins,
        api_key,
        ("/health", *public_paths()),
        own_user="" if serves_all else f"{_SET_KEY}, or set allow_other_users = true in the settings",
    )
    body, uploads = config.body_mb * MB, {UPLOADS: MAX_UPLOAD}
    app = create_app("Updraft", access=access, max_body_bytes=body, max_upload_bytes=uploads, lifespan=lifespan)

    @app.api_route("/{path:path}", methods=METHODS)
    async def _serve(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction] - the decorator uses it
        if request.method == "POST" and request.scope["path"] == UPLOADS:
            return send(_stamped(await endpoints.handle(upload_wire_request(request))), request)
        wire = replace(await read_wire_request(request), timeout_s=timeout_of(request.headers))
        with cancel_on_disconnect(request):
            response = await endpoints.handle(wire)
        events = response.headers.get("content-type", "").startswith("text/event-stream")
        return send(_stamped(response), request, config.heartbeat_s if events else 0.0)

    @app.websocket(chat_socket.PATH)
    @app.websocket(chat_socket.RESPONSES)
    async def _sockets(socket: WebSocket) -> None:  # pyright: ignore[reportUnusedFunction] - the decorator uses it
        chats = socket.scope["path"] == chat_socket.PATH
        kind = chat_socket.ChatSocket if chats else chat_socket.ResponsesSocket
        path = "/v1/chat/completions" if chats else chat_socket.RESPONSES
        template = WireRequest("POST", path, dict(socket.headers), timeout_s=timeout_of(socket.headers))
        await kind(socket, template, endpoints.handle, app.state.traffic).serve()

    return app


def _stamped(response: WireResponse) -> WireResponse:
    """Drop the router's x-request-id, since the HTTP server sets another. x-updraft-request-id keeps the router's."""
    headers = {name: value for name, value in response.headers.items() if name != "x-request-id"}
    return replace(response, headers=headers)


def timeout_of(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the client waits: `x-updraft-timeout`, else the timeout that OpenAI's clients report.
    Raises InvalidRequestError if `x-updraft-timeout` is not a positive number. Invalid OpenAI headers are ignored."""
    given = headers.get(TIMEOUT_HEADER)
    if given is not None and _seconds(given) is None:
        raise InvalidRequestError(
            f"{TIMEOUT_HEADER} must be a positive number of seconds, not {given[:40]!r}.", param=TIMEOUT_HEADER
        )
    timeouts = (_seconds(headers.get(name, "")) for name in (TIMEOUT_HEADER, *_CLIENTS_TIMEOUTS))
    return next((seconds for seconds in timeouts if seconds is not None), None)


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None


def run_daemon(options: DaemonOptions, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises PortInUseError or ConfigurationError before loading any model."""
    check_settings(options.config)
    sock = bind_socket(options.host, options.port)
    app = daemon_app(Router(options.config), options.api_key, options.host, options.reload)
    serve(app, sock=sock, ready_file=options.ready_file, on_ready=on_ready, tls=options.tls, websockets=True)


@dataclass(frozen=True, slots=True)
class Reload:
    """Settings that are read again on SIGHUP and when their file changes."""

    # Settings file, which may be missing.
    file: Path
    # Function that reads the settings. Raises ConfigurationError.
    load: Callable[[], RouterConfig]


async def follow_settings(router: Router, reload: Reload) -> None:
    """Apply the settings to `router` after each change of the settings file, until cancelled. Settings that are
    unusable or need a restart change nothing; the log says why."""
    asked = asyncio.Event()
    last = file_version(reload.file)
    with on_hangup(asked.set):
        while True:
            if not await is_set_within(asked, POLL_S) and file_version(reload.file) == last:
                continue
            asked.clear()
            last = file_version(reload.file)
            await _apply(router, reload.load)


async def _apply(router: Router, load: Callable[[], RouterConfig]) -> None:
    try:
        changed = await router.reconfigure(await asyncio.to_thread(load))
    except UpdraftError as error:
        log.warning("settings not changed: %s", error.message)
        return
    if changed:
        log.warning("settings changed: %s", ", ".join(changed))
