"""Local tier over an OpenAI-compatible server: streamed tokens, with log-probabilities if the server reports them.

Hidden states are unavailable. Tool calls are converted to the text that an on-device model would generate, because
gates and streams look for tool calls in the text.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Unpack

import httpx
import msgspec

from ....model_files.identity import SERVED, ModelIdentity
from ....protocol.errors import ConfigurationError, ModelLoadError, UnsupportedFeatureError, UpstreamError
from ....protocol.http.lenient_json import error_in, json_of, object_of, tables
from ....protocol.requests import Message
from ....protocol.safety.redaction import shown_url
from ....protocol.sampling import SamplingParams
from ....protocol.structured import AnswerOptions, Constraint, ToolUse
from ..interfaces import ChatOnlyTier
from .generation import NONCHARACTER, TOP, AnswerForm, SeenVocabulary, ServerGeneration, failed, reported_in

if TYPE_CHECKING:
    from ....text.templates.reasoning import ReasoningStyle
    from ....text.tool_formats import ToolFormat


OLLAMA_PORT = 11434
_PRIVATE = [
    ipaddress.ip_network(each)
    for each in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"),
        *("::1/128", "fc00::/7", "fe80::/10"),
    )
]
_CONNECT_S = 2.0
_ANSWER_S = 300.0  # long, because the server may have to load the model first
_CONTEXT = 4096  # context length in tokens, if the server reports none
_WEIGHTS = ("vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params", "size")  # reported by llama-server
_CALLS = f"{NONCHARACTER}[TOOL_CALLS]"
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed")
_BEYOND = (
    *("typical_p", "repetition_penalty", "logit_bias", "stop_token_ids", "min_tokens", "ignore_eos"),
    "prompt_logprobs",
)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of a model server with an OpenAI-compatible API."""

    url: str
    # Model name. None: the server's only model.
    model: str | None = None
    # Setting or environment variable that names the server.
    source: str = "local"


def server_address(local: str | None, model: str | None = None) -> ServerAddress | None:
    """Return the server in `local` (`ollama:MODEL` or a URL), or None for a model file. `model`: model name for a URL.
    `OLLAMA_HOST` sets the address of Ollama. Raises ConfigurationError."""
    if local is None:
        return None
    if local.startswith("ollama:"):
        name = local.removeprefix("ollama:")
        if not name:
            raise ConfigurationError("local must name a model after ollama:, for example ollama:qwen3.", param="local")
        host = os.environ.get("OLLAMA_HOST", "").strip(" \t\r\n\"'")
        return _checked(_ollama_url(host), host, name, "OLLAMA_HOST" if host else "local")
    return _checked(local, local, model, "local") if local.startswith(("http://", "https://")) else None


def _ollama_url(host: str) -> str:
    """Return the URL for `OLLAMA_HOST`, as Ollama reads it: each part of `scheme://host:port/path` is optional."""
    scheme, separator, rest = host.rpartition("://")
    port = {"http": "80", "https": "443"}.get(scheme, "") if separator else str(OLLAMA_PORT)
    rest, _, path = rest.partition("/")
    user, at, rest = rest.rpartition("@")
    if parts := re.fullmatch(r"(\[.*\]|[^:\[\]]*):([^:]*)", rest):
        rest, port = parts[1], parts[2] or port
    name = rest.strip("[]")
    name = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(name, name)  # wildcard addresses
    path = f"/{path}".rstrip("/")
    return f"{scheme or 'http'}://{user}{at}{f'[{name}]' if ':' in name else name}:{port}{path}/v1"


def checked_url(url: str) -> httpx.URL:
    """Parse a URL. Raises httpx.InvalidURL or ValueError if no client can use it."""
    parsed = httpx.URL(url)
    _ = parsed.host  # httpx reports an invalid host only here
    if (parsed.port or 0) > 65_535:
        raise ValueError("a port must be at most 65535")
    return parsed


def _checked(url: str, given: str, model: str | None, source: str) -> ServerAddress:
    """Validate the server's URL. `given`: the setting as written, for messages."""
    try:
        parsed = checked_url(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigurationError(f"{source} {shown_url(given)!r} is not a URL.", param="local") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo or parsed.query or parsed.fragment:
        raise ConfigurationError(
            f"{source} {shown_url(given)!r} must be a URL of host, port and path. Name the model with local_model and "
            "omit credentials.",
            param="local",
        )
    path = parsed.path.rstrip("/") or "/v1"
    return ServerAddress(str(parsed.copy_with(path=path)), model, source)


def check_private(address: ServerAddress) -> None:
    """Raise ConfigurationError if the server is not on this machine or in its private network. The server receives
    private prompts. Only localhost and IPs are accepted, since a name may resolve elsewhere later."""
    host = httpx.URL(address.url).host
    if not is_private(host):
        raise ConfigurationError(
            f"{address.source} names {shown_url(address.url)}, but {host} is not a private address: data that "
            "privacy rules keep on this device would be sent there. Name the server by IP address, make it the cloud "
            "(cloud_url), or set local_public=true if you trust it like this device.",
            param="local",
        )


def is_private(host: str) -> bool:
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in network for network in _PRIVATE)


@dataclass(frozen=True, slots=True)
class LocalServerModel:
    address: ServerAddress
    name: str
    context_length: int
    # Whether the server reports log-probabilities.
    has_signals: bool
    # Identity of the model, derived from what the server reports about the weights.
    identity: ModelIdentity


def open_client() -> httpx.AsyncClient:
    """Return a client that ignores proxies and redirects, so that prompts reach only the configured server."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S), trust_env=False, follow_redirects=False
    )


async def find_model(client: httpx.AsyncClient, address: ServerAddress) -> LocalServerModel:
    """Select the model on the server and test it by generating one token. Raises ModelLoadError."""
    cards = tables((await _json(client, address, "GET", "models")).get("data")) or []
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
    card = next((card for card in cards if card.get("id") == name), dict[str, Any]())
    identity = await _identity(client, address, name, card)
    return LocalServerModel(address, name, _context(card), bool(reported_in(choices[0])), identity)


def _context(card: dict[str, Any]) -> int:
    """Return the context length, as reported by vLLM, Updraft or llama-server."""
    meta = object_of(card.get("meta"))
    for value in (card.get("max_model_len"), meta.get("n_ctx"), meta.get("n_ctx_train")):
        if isinstance(value, int) and 0 < value < 2**31:
            return value
    return _CONTEXT


async def _identity(
    client: httpx.AsyncClient, address: ServerAddress, name: str, card: dict[str, Any]
) -> ModelIdentity:
    """Return the model's identity, from Ollama's digest or the sizes that llama-server reports."""
    owner = str(card.get("owned_by") or "a server")[:100]
    is_ollama = owner == "library" or httpx.URL(address.url).port == OLLAMA_PORT
    known: dict[str, Any] = {key: object_of(card.get("meta")).get(key) for key in _WEIGHTS}
    if is_ollama:
        ollama = ServerAddress(address.url.removesuffix("/v1"))
        listed = tables((await _json(client, ollama, "GET", "api/tags")).get("models")) or []
        same = (f"{name}:latest", name)
        known["digest"] = next((each.get("digest") for each in listed if each.get("name") in same), None)
    weights = sha256(msgspec.json.encode([owner, name, known])).hexdigest()
    return ModelIdentity(f"{SERVED}{'Ollama' if is_ollama else owner}", weights, "")


async def _json(
    client: httpx.AsyncClient, address: ServerAddress, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    try:
        response = await client.request(method, f"{address.url}/{path}", json=body)
    except (httpx.HTTPError, ValueError) as error:  # ValueError for an invalid redirect URL
        raise ModelLoadError(
            f"The local server at {address.url} does not answer ({str(error) or type(error).__name__}): start it, or "
            "correct the setting `local`."
        ) from error
    if response.status_code != 200:
        refusal = error_in(response.content, response.status_code, f"{path} answered {response.status_code}")
        raise ModelLoadError(f"The local server at {address.url} refuses: {refusal['message']}")
    try:
        return object_of(json_of(response.content))
    except ValueError as error:
        raise ModelLoadError(f"The local server at {address.url} is not an OpenAI-compatible server.") from error


async def open_server(address: ServerAddress, max_tokens: int) -> ServerLocalTier:
    """Connect to a model server. Raises ModelLoadError if the server or its model does not answer."""
    client = open_client()
    try:
        return ServerLocalTier(client, await find_model(client, address), max_tokens)
    except BaseException:
        await client.aclose()
        raise


class ServerLocalTier(ChatOnlyTier):
    """A `LocalTier` that uses one model of a server. `max_tokens`: default limit of an answer."""

    reasoning: ReasoningStyle | None = None

    def __init__(self, client: httpx.AsyncClient, model: LocalServerModel, max_tokens: int) -> None:
        from ....text.tool_calls import ToolSyntax
        from ....text.tool_formats import ToolFormat

        self._client = client
        self._model = model
        # Mistral's format, because every chat template accepts the call IDs of that format.
        self.tool_format: ToolFormat | None = ToolFormat(
            "mistral", ToolSyntax(_CALLS, lists=True, keeps_blanks=True), {}
        )
        self._max_tokens = max_tokens
        self._vocabulary = SeenVocabulary()
        self.model_id = model.name
        self.identity = model.identity
        self.context_length = model.context_length
        self.has_signals = model.has_signals

    async def start(
        self, messages: Sequence[Message], params: SamplingParams, **options: Unpack[AnswerOptions]
    ) -> ServerGeneration:
        body, begun, tools = self._body(messages, params), None, options.get("tools")
        constraint = options.get("constraint")
        if tools is not None:
            if constraint is not None and constraint.param != "tools":  # the server enforces the tools' own schemas
                raise UnsupportedFeatureError(
                    "A local server cannot combine tools with a response format.", param=constraint.param
                )
            body |= _offered(tools, params)
        elif constraint is not None:
            body["response_format"] = _response_format(constraint)
        if template_options := options.get("template_options"):
            body["chat_template_kwargs"] = dict(template_options)
        if options.get("continue_final_message"):  # llama-server and Ollama ignore these fields and continue it
            body |= {"continue_final_message": True, "add_generation_prompt": False}
            begun = messages[-1].text
        form = AnswerForm(params.logprobs, tools, _CALLS, begun)
        url = self._model.address.url
        request = self._client.build_request("POST", f"{url}/chat/completions", json=body)
        try:
            response = await self._client.send(request, stream=True)
            if response.status_code == 200:
                return ServerGeneration(response, url, self._vocabulary, form)
            try:
                raw = await response.aread()
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise failed(url, error) from error
        refusal = error_in(raw, response.status_code, f"it answered {response.status_code}")
        raise UpstreamError(f"The local server at {url} refused: {refusal['message']}")

    def token_bytes(self, token_id: int, *, skip_special: bool = False) -> bytes:  # noqa: ARG002 - the server sends only text
        return self._vocabulary.bytes_of(token_id)

    async def aclose(self) -> None:
        await self._client.aclose()

    def _body(self, messages: Sequence[Message], params: SamplingParams) -> dict[str, Any]:
        neutral = SamplingParams()
        for name in _BEYOND:
            if getattr(params, name) != getattr(neutral, name):
                raise UnsupportedFeatureError(f"{name}: not supported with a server as the local model.", param=name)
        if params.logprobs is not None and not self.has_signals:
            raise UnsupportedFeatureError("logprobs: the local server does not report any.", param="logprobs")
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


def _wire(message: Message) -> dict[str, Any]:
    named = {"name": message.name} if message.name else {}
    calls = {} if message.tool_calls is None else {"tool_calls": msgspec.to_builtins(message.tool_calls)}
    answered = {} if message.tool_call_id is None else {"tool_call_id": message.tool_call_id}
    thoughts = {"reasoning_content": message.thoughts} if message.thoughts else {}
    return {"role": message.role, "content": message.text, **named, **calls, **answered, **thoughts}


def _offered(use: ToolUse, params: SamplingParams) -> dict[str, Any]:
    """Return the request fields that offer tools."""
    if params.logprobs is not None:
        raise UnsupportedFeatureError("logprobs: not supported with tools on a local server.", param="logprobs")
    offered: dict[str, Any] = {"tools": msgspec.to_builtins(use.tools)}
    if use.choice is not None:
        offered["tool_choice"] = msgspec.to_builtins(use.choice)
    return offered if use.parallel else offered | {"parallel_tool_calls": False}


def _response_format(constraint: Constraint) -> dict[str, Any]:
    if constraint.kind != "json_schema":
        raise UnsupportedFeatureError(
            f"{constraint.kind}: a server as the local model supports only JSON schemas.", param=constraint.param
        )
    schema = msgspec.json.decode(constraint.source)
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
