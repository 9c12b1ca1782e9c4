"""Sends private requests through a router on all paths and says which sockets were opened, for `test_no_sockets.py`."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]

OPENED: list[str] = []


def watch_sockets() -> None:
    sys.addaudithook(_watch)


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    away = event == "socket.__new__" and arguments[1] in (socket.AF_INET, socket.AF_INET6)
    if away or event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.sendmsg"):
        OPENED.append(event)
        raise PermissionError(f"{event}: no sockets here")


SECRET = "my card is 4111 1111 1111 1111"
PICTURE = [{"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}]


async def main() -> int:
    from updraft.protocol.errors import EngineError
    from updraft.protocol.http.wire import WireRequest
    from updraft.router.config import RouterConfig
    from updraft.router.factory import load_tiers
    from updraft.router.privacy.rules import Privacy
    from updraft.router.router import Router
    from updraft.router.server.endpoints import Endpoints

    watch_sockets()
    common: dict[str, Any] = {"local": "pocket", "cloud_url": "http://127.0.0.1:9", "ledger": None, "confidence": 0.999}
    common |= {"cloud_model": "big", "privacy": Privacy(builtin=("credit_card",))}
    common["experience"] = Path(tempfile.mkdtemp()) / "experience.sqlite3"  # what answers teach is kept

    async def ask(router: Router, path: str, content: Any, **fields: Any) -> int:
        key = "input" if path.endswith("embeddings") else "messages"
        value = content if key == "input" else [{"role": "user", "content": content}]
        body = json.dumps({"model": "auto", key: value, **({} if key == "input" else {"max_tokens": 4}), **fields})
        response = await Endpoints(router).handle(WireRequest("POST", path, {}, body.encode()))
        if not isinstance(response.body, bytes):
            async for _ in response.body:
                pass
        return response.status

    async def paths(name: str, router: Router) -> None:
        chat, embeddings = "/v1/chat/completions", "/v1/embeddings"
        for what, sent in {
            "whole": ask(router, chat, SECRET),
            "stream": ask(router, chat, SECRET, stream=True),
            "named cloud": ask(router, chat, SECRET, model="cloud"),
            "flag": ask(router, chat, "hi", updraft={"private": True}),
            "beyond the device": ask(router, chat, SECRET, n=2),
            "tools": ask(router, chat, SECRET, tools=[{"type": "function", "function": {"name": "f"}}]),
            "quality": ask(router, chat, SECRET, updraft={"quality": 0.9}),
            "picture": ask(router, chat, PICTURE),
            "too long for the rules": ask(router, chat, "a" * 5_000_000),
            "too long for the device": ask(router, chat, SECRET * 2000),
            "embeddings": ask(router, embeddings, [SECRET]),
            "token ids": ask(router, embeddings, [1, 2]),
            "completion": ask(router, "/v1/completions", "hi", messages=None, prompt=SECRET),
            "named completion": ask(router, "/v1/completions", "hi", model="gpt-9", messages=None, prompt=SECRET),
            "moderation": ask(router, "/v1/moderations", "hi", messages=None, input=SECRET),
        }.items():
            status = await sent
            print(f"{name}, {what}: {status}", *(f"SOCKET {event}" for event in OPENED), flush=True)

    for name, options in {
        "plain": {},
        "race": {"race_above": 0.0},
        "shadow": {"shadow": True},
        "exploration": {"exploration": 0.5},
        "offline": {"offline": True},
        "no local": {"local": None},
    }.items():
        router = Router(RouterConfig(**(common | options)))
        await paths(name, router)
        await router.close()

    tiers = await load_tiers(RouterConfig(**common))
    router = Router(RouterConfig(**common), tiers)

    async def fails(*_: Any, **__: Any) -> Any:
        raise EngineError("the device failed")

    assert tiers.local is not None
    tiers.local.start = fails  # type: ignore[method-assign]
    await paths("device fails", router)
    if OPENED:
        return 1
    await ask(router, "/v1/chat/completions", "Who was the first emperor of Rome?")
    print("a request that is not private:", "seen" if OPENED else "not seen")
    await router.close()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
