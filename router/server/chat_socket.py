"""WebSocket endpoints: concurrent chats at `/v1/chat/ws`, and OpenAI's protocol for responses at `/v1/responses`.

Chats: a client message is a chat request with an `id` of the client's choice, or `{"type": "cancel", "id"}`. The server
sends `chunk` (with `chunk`), `completion` (with `completion`), `error` (with `error`) and `cancelled` messages with the
same `id`; a stream ends with `done`. Closing the socket cancels the chats still running.
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
from ...protocol.http.app import Traffic
from ...protocol.http.wire import PrivacyMark, WireRequest, WireResponse, close_body, off_event_loop
from ..responses import completion as answer

PATH, RESPONSES = "/v1/chat/ws", "/v1/responses"
MAX_AT_ONCE = 32  # concurrent chats per socket
_MAX_ID = 128  # characters
log = logging.getLogger("updraft.router")


class ChatSocket:
    """Chats over one WebSocket. `handle` answers each chat as a copy of `template` with the chat's body."""

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
        """Answer requests until the client or the server closes the socket, then cancel the remaining chats."""
        await self._socket.accept()
        try:
            while (message := await self._socket.receive())["type"] == "websocket.receive":
                await self._handle_command(message.get("bytes") or (message.get("text") or "").encode())
        except WebSocketDisconnect:  # the client disconnected while an error was sent
            pass
        finally:
            chats = list(self._chats.values())
            for chat in chats:
                chat.cancel()
            await asyncio.gather(*chats, return_exceptions=True)

    async def _handle_command(self, message: bytes) -> None:
        chat_id: Any = None
        try:
            fields = await off_event_loop(message, lambda: read_object(message))
            chat_id, kind = fields.pop("id", None), fields.pop("type", "chat")
            if not isinstance(chat_id, str) or not 0 < len(chat_id) <= _MAX_ID:
                chat_id = None
                raise invalid_value("id", f"each message needs an id of 1 to {_MAX_ID} characters")
            if kind == "cancel":
                if (chat := self._chats.get(chat_id)) is not None:  # otherwise the chat has already finished
                    chat.cancel()
            elif kind == "chat":
                await self._begin(chat_id, fields)
            else:
                raise invalid_value("type", "the type must be chat or cancel")
        except UpdraftError as error:
            await self._send("error", chat_id, error=error.to_body()["error"])

    async def _begin(self, chat_id: str, fields: dict[str, Any]) -> None:
        if chat_id in self._chats:
            raise invalid_value("id", f"a chat with the id {chat_id!r} is still running")
        if len(self._chats) >= MAX_AT_ONCE:
            raise OverloadedError(f"{MAX_AT_ONCE} chats are running over this socket. Wait for one to finish.")
        if self._traffic.draining:
            raise OverloadedError("This server is shutting down. Try again later.", code="draining")
        request = replace(self._template, body=msgspec.json.encode(fields), mark=PrivacyMark())
        self._chats[chat_id] = asyncio.create_task(self._chat(chat_id, request))

    async def _chat(self, chat_id: str, request: WireRequest) -> None:
        self._traffic.in_flight += 1
        try:
            await self._answer(chat_id, await self._handle(request))
        except asyncio.CancelledError:
            del self._chats[chat_id]
            await self._send("cancelled", chat_id)
        except WebSocketDisconnect:
            log.info("%s: client disconnected", PATH)
        except Exception:
            log.exception("a chat over %s failed", PATH)
            await self._send("error", chat_id, error=answer.internal_error().to_body()["error"])
        finally:
            self._chats.pop(chat_id, None)
            self._traffic.in_flight -= 1

    async def _answer(self, chat_id: str, response: WireResponse) -> None:
        body = response.body
        if isinstance(body, bytes):
            if response.status != 200:
                await self._send("error", chat_id, error=msgspec.json.decode(body)["error"])
            else:
                await self._send("completion", chat_id, completion=msgspec.Raw(body))
            return
        failed = False
        try:
            async for payload in sse.parse(body):
                failed = payload.startswith(b'{"error":')
                if failed:
                    await self._send("error", chat_id, error=msgspec.json.decode(payload)["error"])
                else:
                    await self._send("chunk", chat_id, chunk=msgspec.Raw(payload))
        finally:
            await close_body(body)
        if not failed:
            await self._send("done", chat_id)

    async def _send_raw(self, message: bytes) -> None:
        await self._socket.send_text(message.decode())

    async def _send(self, kind: str, chat_id: str | None, **fields: Any) -> None:
        """Send a message to the client. Raises WebSocketDisconnect if the client has disconnected."""
        await self._send_raw(msgspec.json.encode({"type": kind, "id": chat_id, **fields}))


class ResponsesSocket(ChatSocket):
    """Responses over one WebSocket, one after the other. Each client message is `response.create`. The server sends the
    events of the stream, or an `error` event. A request may continue the previous response, even if that response is
    not stored. After a failure it cannot be continued."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._template = replace(self._template, unstored={})
        self._turn = asyncio.Lock()
        self._number = 0

    async def _handle_command(self, message: bytes) -> None:
        try:
            fields = await off_event_loop(message, lambda: read_object(message))
            if fields.pop("type", None) != "response.create":
                raise invalid_value("type", "must be response.create")
            self._number += 1
            await self._begin(str(self._number), {**fields, "stream": True})
        except UpdraftError as error:
            await self._send("error", None, error=error.to_body()["error"], status=error.status)

    async def _chat(self, chat_id: str, request: WireRequest) -> None:
        async with self._turn:
            await super()._chat(chat_id, request)

    async def _answer(self, chat_id: str, response: WireResponse) -> None:  # noqa: ARG002
        if isinstance(response.body, bytes):
            body = msgspec.json.decode(response.body)
            await self._send("error", None, error=body["error"], status=response.status)
            return
        try:
            async for payload in sse.parse(response.body):
                await self._send_raw(payload)
        finally:
            await close_body(response.body)

    async def _send(self, kind: str, chat_id: str | None, **fields: Any) -> None:  # noqa: ARG002
        if kind == "error":
            await self._send_raw(msgspec.json.encode({"type": kind, "status": 500, **fields}))
