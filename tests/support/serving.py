"""Serves an app on a real socket, in a thread of the test process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from waiting import wait_for


@contextmanager
def serving(app: Any, *, lifespan: bool = False, protocol: Any = "auto", loop: Any = "auto") -> Iterator[str]:
    """Serve `app` inside the block, and yield its URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        http=protocol,
        loop=loop,
        log_level="critical",
        lifespan="on" if lifespan else "off",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
