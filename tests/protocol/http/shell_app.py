"""A server for test_server.py: every way a route can behave, in a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.websockets import WebSocket
from updraft.protocol.errors import ContextLengthError
from updraft.protocol.http.app import create_app, read_wire_request, send
from updraft.protocol.http.server import bind_socket, exit_with_parent, serve
from updraft.protocol.http.wire import WireResponse

app = create_app("test", max_body_bytes=1000)
closed_at: list[float] = []


@app.get("/typed")
async def typed() -> None:
    raise ContextLengthError("Too long.", param="messages")


@app.get("/bug")
async def bug() -> None:
    raise ZeroDivisionError("secret detail")


@app.post("/echo")
async def echo(request: Request) -> Response:
    wire = await read_wire_request(request)
    return send(WireResponse(200, {"content-type": "application/octet-stream"}, wire.body), request)


@app.websocket("/chat")
async def chat(socket: WebSocket) -> None:
    await socket.accept()
    while True:
        await socket.send_text(await socket.receive_text())


@app.get("/slow")
async def slow() -> Response:
    await asyncio.sleep(1.5)
    return PlainTextResponse("finished")


@app.get("/endless")
async def endless(request: Request) -> Response:
    async def body() -> AsyncIterator[bytes]:
        try:
            yield b"data: 1\n\n"
            await asyncio.sleep(3600)
        finally:
            closed_at.append(time.time())

    return send(WireResponse(200, {"content-type": "text/event-stream"}, body()), request)


@app.get("/broken-stream")
async def broken_stream(request: Request) -> Response:
    async def body() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        raise ZeroDivisionError("in the stream")

    return send(WireResponse(200, {"content-type": "text/event-stream"}, body()), request)


@app.get("/closed")
async def closed() -> dict[str, object]:
    return {"closed_at": closed_at, "in_flight": app.state.traffic.in_flight}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--exit-with-parent", action="store_true")
    parser.add_argument("--websockets", action="store_true")
    options = parser.parse_args()
    if options.exit_with_parent:
        exit_with_parent()
    serve(
        app, sock=bind_socket("127.0.0.1", options.port), ready_file=options.ready_file, websockets=options.websockets
    )
