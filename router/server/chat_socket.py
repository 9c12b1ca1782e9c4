"""Chats over one WebSocket, `/v1/chat/ws`: many at once, each with an id, and each can be cancelled.

A message of the client is a chat request with an `id` of its choice, or `{"type": "cancel", "id"}`. The answers are
`chunk` (with `chunk`), `completion` (with `completion`), `error` (with `error`) and `cancelled`; a stream ends in
`done`. Each has the `id`. Closing the socket cancels what is not finished.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from ...protocol.decoding import read_object
from ...protocol.errors import OverloadedError, UpdraftError, invalid_value
from ...protocol.http import sse
from ...protocol.http.shell import Traffic
from ...protocol.http.wire import WireRequest, WireResponse, off_event_loop
from ..responses import completion as answer

PATH = "/v1/chat/ws"
MAX_AT_ONCE = 32  # chats of one socket
_MAX_ID = 128  # characters
log = logging.getLogger("updraft.router")


class ChatSocket:
    """`template`: the request that each chat is, but for its body. `handle` answers it."""

    def __init__(
        self,
        socket: WebSocket,
        template: WireRequest,
        handle: Callable[[WireRequest], Awaitable[WireResponse]],
        traffic: Traffic,
    ) -> None:
        self._socket = socket
        self._template = template
        self._handle = handle
        self._traffic = traffic
        self._chats: dict[str, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Until the client, or the server, closes the socket."""
        await self._socket.accept()
        try:
            while (message := await self._socket.receive())["type"] == "websocket.receive":
                await self._obey(message.get("bytes") or (message.get("text") or "").encode())
        except WebSocketDisconnect:  # while an error was told
            pass
        finally:
            chats = list(self._chats.values())
            for chat in chats:
                chat.cancel()
            await asyncio.gather(*chats, return_exceptions=True)

    async def _obey(self, message: bytes) -> None:
        chat_id: Any = None
        try:
            fields = await off_event_loop(message, lambda: read_object(message))
            chat_id, kind = fields.pop("id", None), fields.pop("type", "chat")
            if not isinstance(chat_id, str) or not 0 < len(chat_id) <= _MAX_ID:
                chat_id = None
                raise invalid_value("id", f"each message has an id, a text of 1 to {_MAX_ID} characters")
            if kind == "cancel":
                if (chat := self._chats.get(chat_id)) is not None:  # one that has ended is none to complain about
                    chat.cancel()
            elif kind == "chat":
                await self._begin(chat_id, fields)
            else:
                raise invalid_value("type", "it must be chat or cancel")
        except UpdraftError as error:
            await self._tell("error", chat_id, error=error.to_body()["error"])

    async def _begin(self, chat_id: str, fields: dict[str, Any]) -> None:
        if chat_id in self._chats:
            raise invalid_value("id", f"{chat_id!r} is that of a chat that goes on")
        if len(self._chats) >= MAX_AT_ONCE:
            raise OverloadedError(f"{MAX_AT_ONCE} chats go on over this socket: let one of them end first.")
        if self._traffic.draining:
            raise OverloadedError("This server is draining to shut down: try again later.", code="draining")
        request = replace(self._template, body=msgspec.json.encode(fields))
        self._chats[chat_id] = asyncio.create_task(self._chat(chat_id, request))

    async def _chat(self, chat_id: str, request: WireRequest) -> None:
        self._traffic.in_flight += 1
        try:
            await self._answer(chat_id, await self._handle(request))
        except asyncio.CancelledError:
            del self._chats[chat_id]
            await self._tell("cancelled", chat_id)
        except WebSocketDisconnect:
            log.info("%s: the client went away", PATH)
        except Exception:
            log.exception("a chat over %s failed", PATH)
            await self._tell("error", chat_id, error=answer.internal_error().to_body()["error"])
        finally:
            self._chats.pop(chat_id, None)
            self._traffic.in_flight -= 1

    async def _answer(self, chat_id: str, response: WireResponse) -> None:
        body = response.body
        if isinstance(body, bytes):
            if response.status != 200:
                await self._tell("error", chat_id, error=msgspec.json.decode(body)["error"])
            else:
                await self._tell("completion", chat_id, completion=msgspec.Raw(body))
            return
        failed = False
        try:
            async for payload in sse.parse(body):
                failed = payload.startswith(b'{"error":')
                if failed:
                    await self._tell("error", chat_id, error=msgspec.json.decode(payload)["error"])
                else:
                    await self._tell("chunk", chat_id, chunk=msgspec.Raw(payload))
        finally:
            close: Any = getattr(body, "aclose", None)
            if close is not None:
                await close()
        if not failed:
            await self._tell("done", chat_id)

    async def _tell(self, kind: str, chat_id: str | None, **fields: Any) -> None:
        """Raises WebSocketDisconnect."""
        message = msgspec.json.encode({"type": kind, "id": chat_id, **fields})
        await self._socket.send_text(message.decode())
