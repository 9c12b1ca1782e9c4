"""Memory stays flat: what a stream leaves behind is counted, and a daemon under load is weighed."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from cascade_bench import run
from router_fakes import FakeCloud
from updraft.router.tiers.cloud import CloudEndpoint, HttpCloudTier
from weighed_daemon import weighed_daemon


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
    with weighed_daemon(cloud.url, local) as daemon:
        weights: list[int] = []
        for number in range(4):
            numbers = range(number * requests, (number + 1) * requests)
            asyncio.run(stream(f"{daemon.url}/v1/chat/completions", model, numbers))
            cloud.requests.clear()
            weights.append(daemon.weight())
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
