"""A node in a process of its own, `python crowd_node.py CROWD`: it answers nobody before CROWD requests are there."""

from __future__ import annotations

import asyncio
import sys

import uvicorn
from ports import free_port
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


class Crowd:
    def __init__(self, size: int) -> None:
        self._size = size
        self._running = 0
        self._are_there = asyncio.Event()

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "big", "object": "model", "owned_by": "somebody"}]})

    async def chat(self, request: Request) -> Response:
        await request.body()
        self._running += 1
        if self._running >= self._size:
            self._are_there.set()
        await self._are_there.wait()
        return JSONResponse({"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}}]})

    async def running(self, _request: Request) -> Response:
        return JSONResponse(self._running)


async def main(size: int) -> None:
    crowd, port = Crowd(size), free_port()
    routes = [
        Route("/v1/models", crowd.models),
        Route("/v1/chat/completions", crowd.chat, methods=["POST"]),
        Route("/running", crowd.running),
    ]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=port, log_level="critical"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    print(f"ready http://127.0.0.1:{port}", flush=True)
    await serving


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
