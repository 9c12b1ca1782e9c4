"""Server process: early binding, readiness announcement, graceful shutdown, exit with the parent process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ConfigurationError, PortInUseError, UpdraftError
from ..safety.private_files import write_private
from ..safety.system import KILL, listener_on
from ..telemetry.logs import log_to_stderr
from .access import usual_limits
from .app import Traffic
from .connection import Connection
from .tls import Certificate, Handshake, TlsFiles

DRAIN_S = 10.0
"""Default time for requests in flight to finish after SIGTERM or SIGINT, in seconds."""

_ACCEPTED = 32  # maximum connections accepted per loop iteration; `ConnectionLimits` counts them two iterations later
_BACKLOG = 1024
_SHUTDOWN_S = 5.0  # time from the end of the drain to SIGKILL
_PARENT_POLL_S = 0.5


def serve(  # noqa: PLR0913
    app: FastAPI,
    *,
    sock: socket.socket,
    ready_file: Path | None = None,
    on_ready: Callable[[str], None] | None = None,
    drain_s: float = DRAIN_S,
    announces: bool = True,
    tls: TlsFiles | None = None,
    websockets: bool = False,
) -> None:
    """Serve `app`, made by `create_app`, until SIGTERM or SIGINT; then finish requests in flight and return.

    `sock` comes from `bind_socket`, so that slow startup work can happen after binding. Requests still in flight after
    `drain_s` seconds are ended by the app's `Traffic.at_deadline`, or else cut off.

    When ready, prints `ready http://HOST:PORT` (https with `tls`), writes that URL to `ready_file` and calls `on_ready`
    with the URL. `announces=False` skips all three, for several processes sharing a port.
    Raises PortInUseError, ConfigurationError, or the error with which `app` failed to start.
    """
    if not (drain_s >= 0 and math.isfinite(drain_s)):
        raise ConfigurationError(f"drain_timeout_s must be at least 0, got {drain_s}.", param="drain_timeout_s")
    log_to_stderr()

    def announce() -> None:
        if not announces:
            return
        url = url_of(sock, "http" if tls is None else "https")
        if ready_file is not None:
            write_private(ready_file, f"{url}\n")  # private, because a changed file would redirect clients
        with contextlib.suppress(OSError):  # a daemon runs with a closed standard output, too
            sys.stdout.write(f"ready {url}\n")
            sys.stdout.flush()
        if on_ready is not None:
            on_ready(url)

    limits = usual_limits()
    http: Any = partial(Connection, limits=limits) if tls is None else partial(Handshake, Certificate(tls), limits)
    plain = _StartupErrors(app)
    config = uvicorn.Config(
        plain,
        http=http,
        ws="websockets-sansio" if websockets else "none",
        ws_max_size=app.state.max_body_bytes,
        ws_per_message_deflate=False,  # prevents decompression bombs
        loop="asyncio",  # never uvloop, even if another package has installed it (decision 063)
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # access control must not trust a proxy's claims about the client
        timeout_graceful_shutdown=1,
        backlog=_ACCEPTED,
    )
    try:
        _Server(config, app.state.traffic, announce, drain_s).run(sockets=[sock])
    except SystemExit:  # uvicorn exits if the app fails to start
        if plain.failure is None:
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:  # another process bound the port too, and listened first
            raise _port_in_use(*sock.getsockname()[:2]) from error
        raise
    finally:
        sock.close()
    if plain.failure is not None:
        raise plain.failure


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind a socket to `host:port` (port 0: any free port) without listening, so clients are refused until `serve`.
    Raises PortInUseError, or ConfigurationError if the address is unusable."""
    sock = None
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # reuse ports in TIME_WAIT
        sock.bind(address)
    except (OSError, OverflowError) as error:
        if sock is not None:
            sock.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise _port_in_use(host, port) from error
        raise ConfigurationError(
            f"Cannot listen on {host}:{port}: {error}. Choose another --host or --port."
        ) from error
    return sock


def exit_with_parent(drain_s: float = DRAIN_S) -> None:
    """Stop this process when its parent dies: send SIGTERM, and SIGKILL after the drain. Polls, because Linux's
    PR_SET_PDEATHSIG follows the parent's *thread*, which may end long before the process."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(drain_s + _SHUTDOWN_S)
        os.kill(os.getpid(), KILL)

    threading.Thread(target=watch, name="updraft-parent-watch", daemon=True).start()


class _StartupErrors:
    """ASGI wrapper that stores an UpdraftError of the app's startup in `failure`, instead of logging a traceback."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.failure: UpdraftError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return

        async def send_marked(message: Message) -> None:
            plain = message["type"] == "lifespan.startup.failed" and isinstance(sys.exception(), UpdraftError)
            await send({**message, "message": ""} if plain else message)

        try:
            await self._app(scope, receive, send_marked)
        except UpdraftError as error:
            self.failure = error


class _Server(uvicorn.Server):
    """uvicorn server with a readiness announcement, and a drain during which new requests get 503."""

    def __init__(self, config: uvicorn.Config, traffic: Traffic, announce: Callable[[], None], drain_s: float) -> None:
        super().__init__(config)
        self._drain_s = drain_s
        self._traffic = traffic
        self._announce = announce
        self._parent = os.getppid()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(_BACKLOG)
        if not self.started:
            return
        try:
            self._announce()
        except ConfigurationError:  # shut the app down first: a cancelled lifespan would log a traceback
            await super().shutdown(sockets)
            raise

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._traffic.draining = True
        if os.getppid() != self._parent:  # the parent died, so free the port for a successor
            for server in self.servers:
                server.close()
        leaving = None if self._traffic.at_drain is None else asyncio.create_task(self._traffic.at_drain())
        deadline = time.monotonic() + self._drain_s
        while self._traffic.in_flight and time.monotonic() < deadline and not self.force_exit:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        if self._traffic.in_flight and self._traffic.at_deadline is not None:
            await self._traffic.at_deadline()
        if leaving is not None:
            await leaving
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handle signals like uvicorn, but do not raise them again at the end, which would set exit status -15."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def url_of(sock: socket.socket, scheme: str) -> str:
    """Return the URL of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _port_in_use(host: str, port: int) -> PortInUseError:
    holder = listener_on(port)
    return PortInUseError(
        f"Port {port} on {host} is in use{f' by {holder}' if holder else ''}: choose another --port, or --port 0 "
        "for any free port.",
        param="port",
    )
