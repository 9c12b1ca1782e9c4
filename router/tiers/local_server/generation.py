"""One streamed answer of a model server: tokens with signals as they arrive, tool calls once complete."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from ....accounting.reported_usage import ReportedUsage
from ....protocol.dialects.chat_chunks import text_of
from ....protocol.errors import UnsupportedFeatureError, UpdraftError, UpstreamError
from ....protocol.http import sse
from ....protocol.http.lenient_json import error_in, json_bytes, json_of, object_of, rows, tables
from ....protocol.structured import CalledFunction, NamedTool, ToolUse
from ..answer_shapes import CallIndices, Continuation
from ..interfaces import LocalAnswer, Token

TOP = 8
"""Alternatives requested per token, to estimate the entropy."""

_MOST = 2**20  # maximum number of distinct tokens; no vocabulary has more
#: First character of the marker before tool calls. No model writes it, so text cannot contain the marker.
NONCHARACTER = "\ufdd0"


@dataclass(frozen=True, slots=True)
class ServerSignals:
    """`Signals` of a token from the server's alternatives. The entropy is a lower bound: other tokens count as one."""

    logprob: float
    entropy: float
    margin: float

    @staticmethod
    def of(logprob: float, alternatives: Sequence[float]) -> ServerSignals:
        """Build the signals. `alternatives`: log-probabilities of the most likely tokens."""
        known = sorted(alternatives or (logprob,), reverse=True)
        shares = [math.exp(each) for each in known]
        rest = 1 - sum(shares)
        entropy = -sum(share * each for share, each in zip(shares, known, strict=True) if share > 0)
        entropy -= rest * math.log(rest) if rest > 1e-9 else 0.0
        runner_up = known[1] if len(known) > 1 else math.log(max(rest, 1e-9))
        return ServerSignals(logprob, max(0.0, entropy), max(0.0, known[0] - runner_up))


NO_SIGNALS = ServerSignals(math.nan, math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class ServerToken:
    """Token of a server's answer, in the form that gates and streams read."""

    id: int
    text: str
    signals: ServerSignals
    top: tuple[tuple[int, float], ...] = ()


class SeenVocabulary:
    """Vocabulary of the tokens seen so far. It assigns IDs, since the server sends token bytes without IDs."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._bytes: list[bytes] = []

    def id_of(self, token: bytes) -> int:
        """Return the token's ID. Raises UpstreamError if there are too many tokens for a vocabulary."""
        token_id = self._ids.get(token)
        if token_id is None:
            if len(self._bytes) >= _MOST:
                raise UpstreamError("The local server sent too many distinct tokens for a vocabulary.")
            token_id = self._ids[token] = len(self._bytes)
            self._bytes.append(token)
        return token_id

    def bytes_of(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def tokens(self, text: str, reported: list[dict[str, Any]], shown: int | None) -> list[ServerToken]:
        """Return the tokens of one event; the last one has all `text`. `shown`: number of alternatives to report."""
        if not reported:  # the server reported only text
            return [ServerToken(self.id_of(b""), text, NO_SIGNALS)] if text else []
        tokens: list[ServerToken] = []
        for at, entry in enumerate(reported):
            named = [(other, _logprob(other)) for other in tables(entry.get("top_logprobs")) or []]
            top = [(other, value) for other, value in named if value is not None]
            logprob = _logprob(entry)
            signals = NO_SIGNALS if logprob is None else ServerSignals.of(logprob, [value for _, value in top])
            alternatives = tuple((self.id_of(_raw(other)), value) for other, value in top[: shown or 0])
            own = text if at == len(reported) - 1 else ""
            tokens.append(ServerToken(self.id_of(_raw(entry)), own, signals, alternatives))
        return tokens


def reported_in(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the log-probability entries of an event, one per token."""
    logprobs = object_of(choice.get("logprobs"))
    return [entry for entry in tables(logprobs.get("content")) or [] if _logprob(entry) is not None]


def _logprob(entry: dict[str, Any]) -> float | None:
    value = entry.get("logprob")
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return None
    return max(-1e4, min(0.0, float(value)))


def _raw(entry: dict[str, Any]) -> bytes:
    raw = rows(entry.get("bytes"))
    if raw is not None and all(isinstance(byte, int) and 0 <= byte < 256 for byte in raw):
        return bytes(raw)
    return str(entry.get("token") or "").encode(errors="replace")


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
