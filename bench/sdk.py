"""The SDK's overhead over a plain openai client: the same calls over an instant transport and a stub engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import openai

from ..local_engine.sampling.signals import TokenSignals
from ..router.config import RouterConfig
from ..router.router import Router
from ..router.state import Tiers
from ..sdk.caller_keys import BASE_URL
from ..sdk.runtime_pool import RuntimeLease, RuntimePool
from ..sdk.transport import httpx_of_openai, sync_transport
from .shared.recorded_tier import RecordedAnswer, RecordedTier

_MODEL = "stub"
_TEXT = "Yes."
_QUESTION = "Is this quick?"
_MESSAGES: Any = [{"role": "user", "content": _QUESTION}]
_WARM = 50
_HEAD = {"id": "chatcmpl-1", "created": 1, "model": _MODEL}
_WHOLE = {
    **_HEAD,
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": _TEXT}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8},
}


def measure(calls: int) -> dict[str, Any]:
    """Return milliseconds per call by kind of call. Kinds take turns, so that other load slows all of them alike."""
    httpx = httpx_of_openai()
    with TemporaryDirectory() as folder:
        ways = {
            "instant": httpx.MockTransport(lambda request: _instant(httpx, request)),
            "sdk": sync_transport(httpx, _lease(None)),
            "sdk_ledger": sync_transport(httpx, _lease(Path(folder) / "ledger.sqlite3")),
        }
        clients = {name: _client(httpx, way) for name, way in ways.items()}
        asks: dict[str, Callable[[], object]] = {}
        for name, client in clients.items():
            ask = partial(client.chat.completions.create, model="local", messages=_MESSAGES)
            asks |= {name: ask, f"{name}_stream": lambda ask=ask: list(ask(stream=True))}
        times = _timed(asks, calls)
        for client in clients.values():
            client.close()
    results: dict[str, Any] = {
        name: {f"p{percent}_ms": float(np.percentile(values, percent)) for percent in (10, 50, 95)}
        for name, values in times.items()
    }
    for name in ("sdk", "sdk_ledger"):
        for kind in ("", "_stream"):
            for at in ("p10_ms", "p50_ms"):
                results[f"{name}{kind}"][f"added_{at}"] = results[f"{name}{kind}"][at] - results[f"instant{kind}"][at]
    return results


def _timed(asks: dict[str, Callable[[], object]], calls: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in asks}
    for turn in range(_WARM + calls):
        for name, ask in asks.items():
            began = time.perf_counter()
            ask()
            if turn >= _WARM:
                times[name].append((time.perf_counter() - began) * 1e3)
    return times


def _client(httpx: Any, transport: Any) -> openai.OpenAI:
    return openai.OpenAI(
        api_key="none", base_url=BASE_URL, http_client=httpx.Client(transport=transport), max_retries=0
    )


def _instant(httpx: Any, request: Any) -> Any:
    if not json.loads(request.content).get("stream"):
        return httpx.Response(200, json=_WHOLE)
    deltas = (({"role": "assistant", "content": ""}, None), ({"content": _TEXT}, None), ({}, "stop"))
    chunks = [
        {**_HEAD, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        for delta, reason in deltas
    ]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=body)


def _lease(ledger: Path | None) -> RuntimeLease:
    """Return a lease of a router whose local tier returns its only token immediately."""
    config = RouterConfig(local="pocket", ledger=ledger)
    answer = RecordedAnswer(_TEXT, [TokenSignals(-0.1, 0.2, 2.0)] * 2, prompt_tokens=7)
    tier = RecordedTier(_MODEL, {_QUESTION: answer})
    return RuntimeLease(config, RuntimePool(lambda config: Router(config, Tiers(tier, None, None))))
