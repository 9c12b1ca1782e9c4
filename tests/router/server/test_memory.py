"""Memory stays flat: what a stream leaves behind is counted, and a daemon under load is weighed."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import psutil
import pytest
from cascade_bench import run
from router_fakes import FakeCloud
from updraft.router.tiers.cloud import CloudEndpoint, HttpCloudTier

# A child that collects its garbage and gives freed memory back when it is asked for its health: what is left is held.
CODE = """
import ctypes, gc, sys
from updraft.router.config import RouterConfig
from updraft.router.server.app import DaemonOptions, run_daemon
from updraft.router.server.endpoints import Endpoints

handle = Endpoints.handle
async def weighed(self, request):
    if request.path == "/health":
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
    return await handle(self, request)
Endpoints.handle = weighed
settings = dict(cloud_url=sys.argv[1], local=sys.argv[2] if sys.argv[2] != "none" else None, cloud_connect_timeout_s=60)
run_daemon(DaemonOptions(RouterConfig(**settings, cloud_model="big", confidence=0.6), port=0))
"""


def test_a_stream_leaves_nothing_to_the_garbage_collector_and_its_connection_to_the_next(cloud: FakeCloud) -> None:
    """Abandoned generators are cycles: until the collector comes they hold the buffers of their connection."""
    left: Counter[str] = Counter()
    connections: set[Any] = set()

    async def test() -> None:
        began, ended = sys.get_asyncgen_hooks()

        def abandoned(generator: AsyncGenerator[Any]) -> None:
            left[generator.__qualname__] += 1
            if ended is not None:
                ended(generator)

        sys.set_asyncgen_hooks(began, abandoned)
        tier = HttpCloudTier(CloudEndpoint(f"{cloud.url}/v1"))
        for _ in range(5):
            body = {"model": "big", "messages": [], "stream": True}
            stream = await tier.open("chat/completions", body, timeout_s=30)
            assert [event async for event in stream]
            connections.add(stream._response.extensions["network_stream"].get_extra_info("client_addr"))
            await stream.aclose()
            del stream
        await tier.aclose()
        await asyncio.sleep(0.1)  # closed sockets are let go of by later turns of the loop

    run(test())
    assert not left
    assert len(connections) == 1


@pytest.mark.parametrize(
    ("model", "local", "requests"),
    [
        ("cloud", "none", 300),
        pytest.param("cloud", "none", 3000, marks=pytest.mark.soak),
        pytest.param("auto", "pocket", 3000, marks=pytest.mark.soak),
    ],
)
def test_a_daemon_does_not_grow(cloud: FakeCloud, model: str, local: str, requests: int) -> None:
    """Of three rounds after a first one, the last two add little: a leak of a kilobyte a stream would show."""
    command = [sys.executable, "-c", CODE, cloud.url, local]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[1]
            weights: list[int] = []
            for number in range(4):
                asyncio.run(
                    stream(f"{url}/v1/chat/completions", model, range(number * requests, (number + 1) * requests))
                )
                cloud.requests.clear()
                assert httpx.get(f"{url}/health", timeout=60).status_code == 200
                weights.append(psutil.Process(process.pid).memory_info().rss)
        finally:
            process.kill()
    grown = [after - before for before, after in itertools.pairwise(weights)]
    print(model, requests, [f"{each / 2**20:.2f} MB" for each in grown])
    assert sum(grown[1:]) < 2**20, f"{grown} bytes in rounds of {requests} requests"


async def stream(url: str, model: str, numbers: range) -> None:
    """One streamed request for each number, eight at a time."""
    left = iter(numbers)
    async with httpx.AsyncClient(timeout=120) as client:

        async def ask() -> None:
            for number in left:
                messages = [{"role": "user", "content": f"What is {number} + 1?"}]
                body = {"model": model, "stream": True, "max_tokens": 8, "messages": messages}
                async with client.stream("POST", url, json=body) as response:
                    assert response.status_code == 200
                    assert b"[DONE]" in await response.aread()

        await asyncio.gather(*[ask() for _ in range(8)])
