"""Prompt tokens from the device's prefix cache, in the usage of every endpoint. The scripted device caches 5 of 7."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cascade_bench import run
from updraft.protocol.http.wire import WireRequest

_SAID = [{"role": "user", "content": "hello"}]
_ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _SAID, "stream_options": {"include_usage": True}},
    "/v1/completions": {"prompt": "hello", "stream_options": {"include_usage": True}},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": _SAID, "max_tokens": 50},
}


def cached_in(value: Any) -> set[int]:
    """Every count of cached tokens above 0, at any depth: streams of some endpoints begin with zeros."""
    if isinstance(value, list):
        return set().union(*map(cached_in, value))
    if not isinstance(value, dict):
        return set()
    names = ("cached_tokens", "cache_read_input_tokens")
    return {value[name] for name in names if value.get(name)}.union(*map(cached_in, value.values()))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", _ASKED)
@pytest.mark.parametrize("n", [1, 2])
def test_usage_says_which_prompt_tokens_the_device_had_cached(bench: Any, path: str, stream: bool, n: int) -> None:
    async def test() -> None:
        asked = {"model": "local", **_ASKED[path], "stream": stream}
        if not stream:
            asked.pop("stream_options", None)
        if n > 1:
            asked["n"] = n
        async with bench() as b:
            response = await b.handle(WireRequest("POST", path, {}, json.dumps(asked).encode()))
            if isinstance(response.body, bytes):
                events = [json.loads(response.body)]
            else:
                raw = b"".join([chunk async for chunk in response.body]).decode()
                lines = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: {")]
                events = list(map(json.loads, lines))
        assert response.status == 200, events
        assert cached_in(events) == {5 * n if path == "/v1/completions" else 5}

    if n == 1 or "completions" in path:
        run(test())
