"""64 requests at once while the cloud is killed, slowed and talks nonsense: an answer or typed error each, a row each.

The cloud is a process of its own on a real port, so that killing it is a kill.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from cascade_bench import Bench, run, text_of
from router_fakes import CLOUD_TEXT, LOCAL_TEXT, ScriptedGates
from updraft.router.accounting.budget import BudgetLimits
from updraft.router.config import CacheSettings

SUPPORT = Path(__file__).parents[1] / "support"
# One request in three is well served; the others are slow, refused, cut, or get nonsense, at once or in the middle.
CODE = """
import itertools, sys
sys.path.insert(0, sys.argv[1])
import router_fakes as fakes, uvicorn
from starlette.applications import Starlette
from starlette.routing import Route

cloud, modes = fakes.FakeCloud("unused"), itertools.cycle(
    ["healthy", "garbage", "drip", "cut", "500", "healthy", "slow", "garbage-stream", "reset", "healthy", "garbled"])

async def chat(request):
    cloud.mode = next(modes)
    return await cloud.chat(request)

app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
uvicorn.run(app, fd=int(sys.argv[2]), log_level="critical", lifespan="off")
"""
ERRORS = {"upstream_error", "timeout_error", "rate_limit_error", "engine_error", "invalid_request_error"}


def serving(listener: socket.socket) -> subprocess.Popen[bytes]:
    number = listener.fileno()
    return subprocess.Popen([sys.executable, "-c", CODE, str(SUPPORT), str(number)], pass_fds=[number])


async def fate(bench: Bench, index: int) -> str:
    """The end of one request; raises if that was neither an answer nor a typed error."""
    model = "cloud" if index % 4 == 0 else "auto"
    hold = {"updraft": {"hold_tokens": 1}} if index % 5 == 0 else {}
    fields = {"seed": index, "max_tokens": 20, **hold}
    await asyncio.sleep(index * 0.02)
    if index % 8 == 3:  # some leave
        task = asyncio.create_task(bench.ask(model, timeout_s=60.0, **fields))
        await asyncio.sleep(0.05)
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        return "left" if isinstance(ended, asyncio.CancelledError) else "answered before it left"
    if index % 2:
        response = await bench.ask(model, timeout_s=60.0, stream=True, **fields)
        if isinstance(response.body, bytes):
            return error_of(json.loads(response.body))
        raw = b"".join([chunk async for chunk in response.body])
        payloads = [part.removeprefix(b"data: ") for part in raw.split(b"\n\n") if part]
        if payloads[-1] != b"[DONE]":
            return error_of(json.loads(payloads[-1]))
        text = text_of([json.loads(payload) for payload in payloads[:-1]])
    else:
        answer = await bench.answer(model, timeout_s=60.0, **fields)
        if "error" in answer:
            return error_of(answer)
        text = answer["choices"][0]["message"]["content"]
    assert text in (CLOUD_TEXT, LOCAL_TEXT) or text.startswith(LOCAL_TEXT.split()[0]), text
    return "answer"


def error_of(body: dict[str, Any]) -> str:
    error = body["error"]
    assert error["type"] in ERRORS, body
    assert error["message"]
    return "error"


@pytest.mark.parametrize(
    "settings", [{}, {"cache": CacheSettings(max_mb=1.0), "budget": BudgetLimits(cloud_tokens=9_000)}]
)
def test_every_request_ends_and_has_one_row(bench: Any, settings: dict[str, Any]) -> None:
    async def test(listener: socket.socket) -> None:
        cloud = serving(listener)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await asyncio.to_thread(httpx.get, address, timeout=30)  # 404, but it serves
        async with bench(ScriptedGates(after=True), cloud_url=address, cloud_timeout_s=2.0, **settings) as b:
            b.local.delay_s = 0.005
            requests = [asyncio.create_task(fate(b, index)) for index in range(64)]
            await asyncio.sleep(0.5)
            cloud.send_signal(signal.SIGKILL)  # while requests are in every state, and more are coming
            await asyncio.to_thread(cloud.wait)
            await asyncio.sleep(0.2)
            cloud = serving(listener)
            try:
                fates = Counter(await asyncio.gather(*requests))
            finally:
                cloud.kill()
                cloud.wait()
            assert fates["answer"] >= 24, fates
            assert sum(fates.values()) == 64
        rows = b.rows()
        assert len(rows) == len({row.id for row in rows}) == 64
        assert {row.status for row in rows} <= {200, 429, 499, 500, 502, 504}
        assert {"fallback", "none"} <= {row.route for row in rows}, Counter(row.route for row in rows)
        spent = sum(row.cloud_tokens + row.cloud_prompt_tokens for row in rows)
        assert spent <= 9_000 or not settings

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        run(test(listener))
