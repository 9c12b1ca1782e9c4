"""From an app to a process: bind first, say when ready, leave gracefully, never outlive the parent unasked."""

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
from .connection import Connection
from .connection_limits import usual_limits
from .shell import Traffic
from .tls import Certificate, Handshake, TlsFiles

DRAIN_S = 10.0
"""Seconds that requests in flight get to finish after SIGTERM or SIGINT, where nothing else is said."""

WEBSOCKET_MESSAGE_BYTES = 8 * 2**20  # as long as the body of a request
_ACCEPTED = 32  # connections in a turn of the event loop, two turns before they count
_BACKLOG = 1024
_LEAVE_S = 5.0  # from the end of the drain to that of the process
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
    """Serve `app`, made by `create_app`, until SIGTERM or SIGINT; then finish what is in flight and return.

    `sock` comes from `bind_socket`, so that heavy work may be done in between. What is not finished `drain_s` seconds
    later is ended by the app's `Traffic.at_deadline`, or else cut off.

    Once connections are accepted, prints `ready http://HOST:PORT` (https with `tls`), writes that URL to `ready_file`
    and calls `on_ready` with it. `announces`: whether it says so at all, for several processes behind one port.
    `websockets`: whether connections may become some.
    Raises PortInUseError or ConfigurationError, and what `app` itself failed to start with.
    """
    if not (drain_s >= 0 and math.isfinite(drain_s)):
        raise ConfigurationError(f"drain_seconds must be a number of at least 0, got {drain_s}.", param="drain_seconds")
    log_to_stderr()

    def announce() -> None:
        if not announces:
            return
        url = url_of(sock, "http" if tls is None else "https")
        if ready_file is not None:
            write_private(ready_file, f"{url}\n")  # who could change it would be sent what is for us
        sys.stdout.write(f"ready {url}\n")
        sys.stdout.flush()
        if on_ready is not None:
            on_ready(url)

    limits = usual_limits()
    http: Any = partial(Connection, limits=limits) if tls is None else partial(Handshake, Certificate(tls), limits)
    plain = _Plain(app)
    config = uvicorn.Config(
        plain,
        http=http,
        ws="websockets-sansio" if websockets else "none",
        ws_max_size=WEBSOCKET_MESSAGE_BYTES,
        ws_per_message_deflate=False,  # a few bytes could become many
        loop="asyncio",  # not uvloop wherever some other package has brought it (decision 063)
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing depends on what a proxy says of the client
        timeout_graceful_shutdown=1,
        backlog=_ACCEPTED,
    )
    try:
        _Server(config, app.state.traffic, announce, drain_s).run(sockets=[sock])
    except SystemExit:  # uvicorn's way to say that the app did not start
        if plain.failure is None:
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:  # bound by both, but the other was first to listen
            raise _port_in_use(*sock.getsockname()[:2]) from error
        raise
    finally:
        sock.close()
    if plain.failure is not None:
        raise plain.failure


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket bound to `host:port` (port 0: a free one), not yet listening: clients are refused until `serve`.

    Raises PortInUseError, or ConfigurationError if the address cannot be used at all.
    """
    sock = None
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ports of finished connections are free again
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
    """From now on, stop this process when its parent is gone, however that died: SIGTERM, and after the drain SIGKILL.

    Polls, because Linux' PR_SET_PDEATHSIG follows the parent's *thread*, which may end long before its process.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(drain_s + _LEAVE_S)
        os.kill(os.getpid(), KILL)

    threading.Thread(target=watch, name="updraft-parent-watch", daemon=True).start()


class _Plain:
    """`app`; if it cannot start for a reason that it has a plain word for, that is kept in `failure`, not logged."""

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
    """uvicorn with a readiness announcement and a drain that answers new requests with 503 while it lasts."""

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
        if self.started:
            self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._traffic.draining = True
        if os.getppid() != self._parent:  # an orphan leaves the port to whoever comes in its place
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
        """As uvicorn's, but a graceful end stays one: uvicorn would raise the signal again and exit with -15."""
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
    """The address of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _port_in_use(host: str, port: int) -> PortInUseError:
    holder = listener_on(port)
    return PortInUseError(
        f"Port {port} on {host} is in use{f' by {holder}' if holder else ''}: choose another with --port, or --port 0 "
        "for any free one.",
        param="port",
    )
