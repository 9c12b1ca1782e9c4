"""One streamed answer of a model server. Text and signals are read as they arrive, tool calls once complete."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

from ....accounting.reported_usage import ReportedUsage
from ....protocol.dialects.chat_chunks import text_of
from ....protocol.errors import UnsupportedFeatureError, UpdraftError, UpstreamError
from ....protocol.http import sse
from ....protocol.http.lenient_json import error_in, json_bytes, json_of
from ....protocol.structured import CalledFunction, NamedTool, ToolUse
from ...request.json_narrowing import object_of, tables
from ..answer_shapes import CallIndices
from ..continuation_check import Continuation
from ..interfaces import LocalAnswer, Token
from .tokens import SeenVocabulary, ServerToken, reported_in

#: First character of the marker before tool calls. No model writes it, so text cannot contain the marker.
NONCHARACTER = "\ufdd0"


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Facts about a request that are needed to read its answer."""

    # Number of alternative tokens to report per token. None: report no log-probabilities.
    shown: int | None = None
    tools: ToolUse | None = None
    # Marker text to put before tool calls.
    opener: str = ""
    # Text of the message that the answer continues, if any.
    begun: str | None = None


class ServerGeneration(AsyncIterator[Token]):
    """`LocalGeneration` over one streamed response."""

    def __init__(self, response: httpx.Response, url: str, vocabulary: SeenVocabulary, form: AnswerForm) -> None:
        self.answer = LocalAnswer(ignores_effort=True)
        self._response = response
        self._url = url
        self._vocabulary = vocabulary
        self._form = form
        self._calls = _Calls()
        self._continuation = None if form.begun is None else Continuation(form.begun)
        self._chunks: AsyncIterator[bytes] = response.aiter_bytes()
        self._parser = sse.EventParser()
        self._ready: deque[ServerToken] = deque()
        self._finish: str | None = None
        self._ended = False

    async def __anext__(self) -> Token:
        while not self._ready:
            if self._ended or not await self._read():
                self._ended = True
                raise StopAsyncIteration
        token = self._ready.popleft()
        answer = self.answer
        answer.tokens.append(token)
        if token.signals.logprob == token.signals.logprob:  # not NaN
            answer.signals.append(token.signals)
        answer.text += token.text
        return token

    async def aclose(self) -> None:
        """Close the connection, which stops the server's work. Idempotent."""
        self._ended = True
        await self._response.aclose()

    async def _read(self) -> bool:
        """Process the next chunk. Return False at the end of the answer. Raises UpstreamError if the stream is cut."""
        try:
            chunk = None if self._parser.done else await anext(self._chunks, None)
        except httpx.HTTPError as error:
            raise failed(self._url, error) from error
        if chunk is None:
            return self._end()
        try:
            for payload in self._parser.feed(chunk):
                self._take(payload, object_of(json_of(payload, exact=True)))
        except ValueError as error:
            raise UpstreamError(f"The local server at {self._url} sent no event stream.") from error
        return True

    def _end(self) -> bool:
        """Finish the answer. Return True if tool calls are still to be delivered as tokens."""
        if self._finish is None and not self._parser.done:
            raise UpstreamError(f"The answer of the local server at {self._url} was cut before its end.")
        if self._form.tools is not None:
            text = self._calls.text(self._form.opener, self._form.tools)
            self._form = AnswerForm()
            self._ready.extend(self._vocabulary.tokens(text, [], None))
        if self._ready:
            return True
        self.answer.finish_reason = "length" if self._finish == "length" else "stop"
        return False

    def _take(self, payload: bytes, event: dict[str, Any]) -> None:
        if event.get("error"):
            failure = error_in(json_bytes(event), 502, "the server gave no reason")
            raise UpstreamError(f"The local server at {self._url} failed: {failure['message']}")
        if usage := ReportedUsage.of(event):
            self.answer.prompt_tokens, self.answer.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        choices = tables(event.get("choices")) or []
        if self._continuation is None or not choices:
            self._take_choices(choices)
            return
        verdict = self._continuation.take((payload, {"choices": choices}))
        if verdict == "differs":
            raise UnsupportedFeatureError(
                "continue_final_message: the local server restarted the message.", param="continue_final_message"
            )
        if verdict != "unknown":
            events, self._continuation = self._continuation.events, None
            for _, held in events:
                self._take_choices(held["choices"])

    def _take_choices(self, choices: list[dict[str, Any]]) -> None:
        for choice in choices:
            delta = object_of(choice.get("delta"))
            text = text_of(delta.get("content"))
            calls = tables(delta.get("tool_calls")) or []
            self._calls.add(calls)
            reported = reported_in(choice) if text or calls else []  # skip tokens of reasoning
            self._ready.extend(self._vocabulary.tokens(text, reported, self._form.shown))
            self._finish = choice.get("finish_reason") or self._finish


class _Calls:
    """Collector of an answer's tool calls. Pieces of several calls may interleave."""

    def __init__(self) -> None:
        self._indices = CallIndices()
        self._calls: dict[int, CalledFunction] = {}

    def add(self, pieces: list[dict[str, Any]]) -> None:
        for piece in self._indices.numbered(pieces):
            call = self._calls.setdefault(piece["index"], CalledFunction("", ""))
            function = object_of(piece.get("function"))
            call.name += str(function.get("name") or "")
            call.arguments += function.get("arguments") or ""

    def text(self, opener: str, use: ToolUse) -> str:
        """Return the calls as a JSON list after `opener`, or "" without calls. Calls that the request does not allow
        are dropped. Raises UpstreamError if a required call is missing."""
        named = use.choice.function.name if isinstance(use.choice, NamedTool) else None
        calls = [call for call in self._calls.values() if named in (None, call.name)][: None if use.parallel else 1]
        if not calls and (named or use.choice == "required"):
            raise UpstreamError("The local server made no tool call, but tool_choice requires one.")
        if not {call.name for call in calls} & {tool.function.name for tool in use.tools}:
            opener = opener.removeprefix(NONCHARACTER)  # without this mark, calls of unknown tools are shown as text
        listed = [{"name": call.name, "arguments": call.arguments or "{}"} for call in calls]
        return opener + json_bytes(listed).decode() if listed else ""


def failed(url: str, error: httpx.HTTPError) -> UpdraftError:
    return UpstreamError(f"The local server at {url} does not answer: {error or type(error).__name__}.")
