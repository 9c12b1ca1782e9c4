"""A router under test: sends requests as an app does, and reads the router's ledger."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router_fakes import ScriptedLocal
from updraft.protocol.http.wire import WireRequest, WireResponse
from updraft.router.accounting.ledger import Ledger, LedgerRow
from updraft.router.router import Router
from updraft.router.server.endpoints import Endpoints


@dataclass
class Bench:
    router: Router
    local: ScriptedLocal
    ledger: Path

    async def handle(self, request: WireRequest) -> WireResponse:
        return await Endpoints(self.router).handle(request)

    async def ask(
        self, model: str = "auto", *, timeout_s: float | None = None, key: str | None = None, **fields: Any
    ) -> WireResponse:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}], **fields}
        return await self.handle(
            WireRequest("POST", "/v1/chat/completions", headers, json.dumps(body).encode(), timeout_s)
        )

    async def answer(self, model: str = "auto", **fields: Any) -> dict[str, Any]:
        response = await self.ask(model, **fields)
        assert isinstance(response.body, bytes)
        return json.loads(response.body)

    async def stream(self, model: str = "auto", **fields: Any) -> tuple[WireResponse, list[dict[str, Any]], bool]:
        """Return the response, its events, and whether the stream ended with `[DONE]`."""
        response = await self.ask(model, stream=True, **fields)
        assert not isinstance(response.body, bytes), response.body
        raw = b"".join([chunk async for chunk in response.body])
        payloads = [part.removeprefix(b"data: ") for part in raw.split(b"\n\n") if part]
        done = payloads[-1] == b"[DONE]"
        return response, [json.loads(part) for part in payloads if part != b"[DONE]"], done

    def rows(self) -> list[LedgerRow]:
        self.router.flush_ledger()
        reader = Ledger(self.ledger)
        try:
            return reader.rows()
        finally:
            reader.close()


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event.get("choices", []))


def updraft_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    (event_info,) = [event["updraft"] for event in events if "updraft" in event]
    return event_info


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))
