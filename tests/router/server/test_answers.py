"""Background responses: what cancelling interrupts, how many there may be, and what closing leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from updraft.protocol.errors import OverloadedError
from updraft.router.config import RouterConfig
from updraft.router.server.answers import MAX_BACKGROUND, AnswerService, BackgroundResponse


def response(number: int = 0, status: str = "in_progress") -> BackgroundResponse:
    return BackgroundResponse("me", {"id": f"resp_{number}", "status": status}, [], streamed=True)


def test_complete_response_is_stored_despite_a_cancel() -> None:
    async def go() -> tuple[list[str], list[str]]:
        done: list[str] = []
        may_store = asyncio.Event()

        async def make(running: BackgroundResponse, status: str) -> None:
            running.response["status"] = status
            await may_store.wait()
            done.append(running.response["id"])

        service = AnswerService(RouterConfig())
        complete, begun = response(1), response(2)
        service.begin(complete, make(complete, "completed"))
        service.begin(begun, make(begun, "in_progress"))
        await asyncio.sleep(0)
        await begun.cancel()
        cancelling = asyncio.create_task(complete.cancel())
        await asyncio.sleep(0)
        may_store.set()
        await cancelling
        await asyncio.sleep(0)
        left = [each for each in ("resp_1", "resp_2") if service.running("me", each)]
        return done, left

    assert asyncio.run(go()) == (["resp_1"], [])


def test_one_more_than_the_most_is_refused_and_closing_ends_all(tmp_path: Path) -> None:
    async def go() -> list[Any]:
        service = AnswerService(RouterConfig(store=tmp_path / "answers.sqlite3"))
        await service.start()
        all_of_them = [response(number) for number in range(MAX_BACKGROUND)]
        for each in all_of_them:
            service.begin(each, asyncio.sleep(3600))
        with pytest.raises(OverloadedError):
            service.begin(response(MAX_BACKGROUND), asyncio.sleep(3600))
        followed = [asyncio.create_task(anext(each.follow(-1), None)) for each in all_of_them]
        await service.close()
        return await asyncio.gather(*followed)

    assert asyncio.run(go()) == [None] * MAX_BACKGROUND


def test_followers_get_every_event_from_where_they_want() -> None:
    async def go() -> tuple[bytes, bytes]:
        running = response()
        may_go_on = asyncio.Event()

        async def make() -> None:
            for number in range(6):
                running.add([b"%d" % number])
                await asyncio.sleep(0)
                if number == 2:
                    await may_go_on.wait()

        async def followed(after: int) -> bytes:
            received = b""
            async for events in running.follow(after):
                received += events
                may_go_on.set()
            return received

        AnswerService(RouterConfig()).begin(running, make())
        first, second = await asyncio.gather(followed(-1), followed(3))
        return first, second

    assert asyncio.run(go()) == (b"012345", b"45")
