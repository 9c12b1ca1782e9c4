"""The local tier over a server's OpenAI-compatible API: tokens as they come, with log-probabilities where it has them.

It reports no hidden states. Tools and continued messages are left to the cloud.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from ....protocol.errors import ModelLoadError, UnsupportedFeatureError, UpdraftError, UpstreamError
from ....protocol.http import sse
from ....protocol.http.foreign import error_in, json_of
from ....protocol.requests import Message
from ....protocol.sampling import SamplingParams
from ....protocol.structured import Constraint, ToolUse
from ...request.json_narrowing import table, tables
from ..interfaces import ChatsOnly, LocalAnswer, Token
from .address import ServerAddress
from .tokens import TOP, SeenVocabulary, ServerToken, reported_in

if TYPE_CHECKING:
    from ....text.templates.reasoning import ReasoningStyle
    from ....text.tool_formats import ToolFormat

_CONNECT_S = 2.0
_ANSWER_S = 300.0  # it may have to load the model first
_CONTEXT = 4096  # tokens, of a server that does not say
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed")
_BEYOND = (
    *("typical_p", "repetition_penalty", "logit_bias", "stop_token_ids", "min_tokens", "ignore_eos"),
    "prompt_logprobs",
)


@dataclass(frozen=True, slots=True)
class LocalServerModel:
    """A model on a server."""

    address: ServerAddress
    name: str
    context_length: int
    # Whether the server gives log-probabilities.
    has_signals: bool


async def find_model(client: httpx.AsyncClient, address: ServerAddress) -> LocalServerModel:
    """Ask the server for its models, and the one that is meant for a token. Raises ModelLoadError."""
    cards = await _cards(client, address)
    names = [str(card.get("id")) for card in cards]
    if address.model is None and len(names) != 1:
        listed = ", ".join(name[:100] for name in names[:20]) or "none"
        raise ModelLoadError(f"The local server at {address.url} has these models: {listed}. Set local_model to one.")
    name = address.model or names[0]
    body = {
        "model": name,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": TOP,
    }
    choices = tables((await _json(client, address, "POST", "chat/completions", body)).get("choices")) or [{}]
    known = [_context(card) for card in cards if card.get("id") == name] or [_CONTEXT]
    return LocalServerModel(address, name, known[0], bool(reported_in(choices[0])))


async def _cards(client: httpx.AsyncClient, address: ServerAddress) -> list[dict[str, Any]]:
    return tables((await _json(client, address, "GET", "models")).get("data")) or []


def _context(card: dict[str, Any]) -> int:
    """As vLLM and Updraft say it, or llama-server."""
    meta = table(card.get("meta")) or {}
    for value in (card.get("max_model_len"), meta.get("n_ctx"), meta.get("n_ctx_train")):
        if isinstance(value, int) and 0 < value < 2**31:
            return value
    return _CONTEXT


async def _json(
    client: httpx.AsyncClient, address: ServerAddress, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    try:
        response = await client.request(method, f"{address.url}/{path}", json=body)
    except httpx.HTTPError as error:
        raise ModelLoadError(
            f"The local server at {address.url} does not answer ({error or type(error).__name__}): start it, or "
            "correct local."
        ) from error
    if response.status_code != 200:
        told = error_in(response.content, response.status_code, f"{path} answered {response.status_code}")
        raise ModelLoadError(f"The local server at {address.url} refuses: {told['message']}")
    try:
        return table(json_of(response.content)) or {}
    except ValueError as error:
        raise ModelLoadError(f"The local server at {address.url} is no OpenAI-compatible server.") from error


def open_client() -> httpx.AsyncClient:
    """Past every proxy, and never along a redirect: the prompts stay where the user has put them."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S), trust_env=False, follow_redirects=False
    )


async def open_server(address: ServerAddress, max_tokens: int) -> ServerLocalTier:
    """Raises ModelLoadError where the server or its model does not answer."""
    client = open_client()
    try:
        return ServerLocalTier(client, await find_model(client, address), max_tokens)
    except BaseException:
        await client.aclose()
        raise


class ServerLocalTier(ChatsOnly):
    """`LocalTier` over one model of a server. `max_tokens`: of answers whose request sets none."""

    tool_format: ToolFormat | None = None
    reasoning: ReasoningStyle | None = None

    def __init__(self, client: httpx.AsyncClient, model: LocalServerModel, max_tokens: int) -> None:
        self._client = client
        self._model = model
        self._max_tokens = max_tokens
        self._vocabulary = SeenVocabulary()
        self.model_id = model.name
        self.context_length = model.context_length
        self.has_signals = model.has_signals

    async def start(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        *,
        continue_final_message: bool = False,
        tools: ToolUse | None = None,
        constraint: Constraint | None = None,
    ) -> ServerGeneration:
        if tools is not None or continue_final_message:
            what = "continue_final_message" if tools is None else "tools"
            raise UnsupportedFeatureError(f"{what}: not with a server as the local model.", param=what)
        body = self._body(messages, params)
        if constraint is not None:
            body["response_format"] = _response_format(constraint)
        url = self._model.address.url
        request = self._client.build_request("POST", f"{url}/chat/completions", json=body)
        try:
            response = await self._client.send(request, stream=True)
            if response.status_code == 200:
                return ServerGeneration(response, url, self._vocabulary, params.logprobs)
            try:
                raw = await response.aread()
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise _failed(url, error) from error
        told = error_in(raw, response.status_code, f"it answered {response.status_code}")
        raise UpstreamError(f"The local server at {url} refuses: {told['message']}")

    def token_bytes(self, token_id: int, *, skip_special: bool = False) -> bytes:  # noqa: ARG002 - it sends text only
        return self._vocabulary.bytes_of(token_id)

    async def aclose(self) -> None:
        await self._client.aclose()

    def _body(self, messages: Sequence[Message], params: SamplingParams) -> dict[str, Any]:
        neutral = SamplingParams()
        for name in _BEYOND:
            if getattr(params, name) != getattr(neutral, name):
                raise UnsupportedFeatureError(f"{name}: not with a server as the local model.", param=name)
        if params.logprobs is not None and not self.has_signals:
            raise UnsupportedFeatureError("logprobs: the local server gives none.", param="logprobs")
        body: dict[str, Any] = {
            "model": self._model.name,
            "messages": [_wire(message) for message in messages],
            "max_tokens": params.max_tokens or self._max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {name: value for name in _SAME if (value := getattr(params, name)) is not None}
        body |= {name: value for name in ("frequency_penalty", "presence_penalty") if (value := getattr(params, name))}
        if params.stop:
            body["stop"] = list(params.stop)
        if self.has_signals:
            body |= {"logprobs": True, "top_logprobs": max(TOP, params.logprobs or 0)}
        return body


class ServerGeneration:
    """`LocalGeneration` over one streamed response."""

    def __init__(self, response: httpx.Response, url: str, vocabulary: SeenVocabulary, shown: int | None) -> None:
        self.answer = LocalAnswer()
        self._response = response
        self._url = url
        self._vocabulary = vocabulary
        self._shown = shown
        self._chunks: AsyncIterator[bytes] = response.aiter_bytes()
        self._parser = sse.EventParser()
        self._ready: deque[ServerToken] = deque()
        self._finish: str | None = None
        self._ended = False

    def __aiter__(self) -> ServerGeneration:
        return self

    async def __anext__(self) -> Token:
        while not self._ready:
            if self._ended or not await self._read():
                self._ended = True
                raise StopAsyncIteration
        token = self._ready.popleft()
        answer = self.answer
        answer.tokens.append(token)
        if token.signals.logprob == token.signals.logprob:  # a number
            answer.signals.append(token.signals)
        answer.text += token.text
        return token

    async def aclose(self) -> None:
        """Close the connection, which ends the server's work. Idempotent."""
        self._ended = True
        await self._response.aclose()

    async def _read(self) -> bool:
        """Take what has come; False at the end of the answer. Raises UpstreamError where it is cut."""
        try:
            chunk = None if self._parser.done else await anext(self._chunks, None)
        except httpx.HTTPError as error:
            raise _failed(self._url, error) from error
        if chunk is None:
            if self._finish is None:
                raise UpstreamError(f"The answer of the local server at {self._url} was cut before its end.")
            self.answer.finish_reason = "length" if self._finish == "length" else "stop"
            return False
        try:
            for payload in self._parser.feed(chunk):
                self._take(table(json_of(payload)) or {})
        except ValueError as error:
            raise UpstreamError(f"The local server at {self._url} sent what is no event stream.") from error
        return True

    def _take(self, event: dict[str, Any]) -> None:
        if event.get("error"):
            told = error_in(msgspec.json.encode(event), 502, "no reason was given")
            raise UpstreamError(f"The local server at {self._url} failed: {told['message']}")
        read = (table(event.get("usage")) or {}).get("prompt_tokens")
        if isinstance(read, int) and 0 <= read < 2**31:
            self.answer.prompt_tokens = read
        for choice in tables(event.get("choices")) or []:
            text = str((table(choice.get("delta")) or {}).get("content") or "")
            reported = reported_in(choice) if text else []  # thoughts are no part of the answer
            self._ready.extend(self._vocabulary.tokens(text, reported, self._shown))
            self._finish = choice.get("finish_reason") or self._finish


def _wire(message: Message) -> dict[str, Any]:
    if message.tool_calls is not None or message.role == "tool":
        raise UnsupportedFeatureError("tools: not with a server as the local model.", param="tools")
    return {"role": message.role, "content": message.text, **({"name": message.name} if message.name else {})}


def _response_format(constraint: Constraint) -> dict[str, Any]:
    if constraint.kind != "json_schema":
        raise UnsupportedFeatureError(
            f"{constraint.kind}: a server as the local model takes JSON schemas only.", param=constraint.param
        )
    schema = msgspec.json.decode(constraint.source)
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _failed(url: str, error: httpx.HTTPError) -> UpdraftError:
    return UpstreamError(f"The local server at {url} does not answer: {error or type(error).__name__}.")
