"""Local tier over a server's OpenAI-compatible API: streamed tokens, with log-probabilities if the server has them.

There are no hidden states. Tool calls are rewritten into the text as an on-device model writes them, because gates and
streams look for them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

import httpx
import msgspec

from ....protocol.errors import UnsupportedFeatureError, UpstreamError
from ....protocol.http.foreign import error_in
from ....protocol.requests import Message
from ....protocol.sampling import SamplingParams
from ....protocol.structured import AnswerOptions, Constraint, ToolUse
from ..interfaces import ChatsOnly
from .address import ServerAddress
from .generation import AnswerForm, ServerGeneration, failed
from .models import LocalServerModel, find_model, open_client
from .tokens import TOP, SeenVocabulary

if TYPE_CHECKING:
    from ....text.templates.reasoning import ReasoningStyle
    from ....text.tool_formats import ToolFormat

_CALLS = "[TOOL_CALLS]"
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed")
_BEYOND = (
    *("typical_p", "repetition_penalty", "logit_bias", "stop_token_ids", "min_tokens", "ignore_eos"),
    "prompt_logprobs",
)


async def open_server(address: ServerAddress, max_tokens: int) -> ServerLocalTier:
    """Connect to a model server. Raises ModelLoadError if the server or its model does not answer."""
    client = open_client()
    try:
        return ServerLocalTier(client, await find_model(client, address), max_tokens)
    except BaseException:
        await client.aclose()
        raise


class ServerLocalTier(ChatsOnly):
    """`LocalTier` over one model of a server. `max_tokens`: default limit of an answer."""

    reasoning: ReasoningStyle | None = None

    def __init__(self, client: httpx.AsyncClient, model: LocalServerModel, max_tokens: int) -> None:
        from ....text.tool_calls import ToolSyntax
        from ....text.tool_formats import ToolFormat

        self._client = client
        self._model = model
        # Every chat template accepts the call IDs of the Mistral format.
        self.tool_format: ToolFormat | None = ToolFormat("mistral", ToolSyntax(_CALLS, lists=True), {})
        self._max_tokens = max_tokens
        self._vocabulary = SeenVocabulary()
        self.model_id = model.name
        self.identity = model.identity
        self.context_length = model.context_length
        self.has_signals = model.has_signals

    async def start(
        self, messages: Sequence[Message], params: SamplingParams, **options: Unpack[AnswerOptions]
    ) -> ServerGeneration:
        """Start an answer. A `constraint` that comes with `tools` is ignored, since the server enforces its own."""
        body, begun, tools = self._body(messages, params), None, options.get("tools")
        if tools is not None:
            body |= _offered(tools, params)
        elif (constraint := options.get("constraint")) is not None:
            body["response_format"] = _response_format(constraint)
        if template_options := options.get("template_options"):
            body["chat_template_kwargs"] = dict(template_options)
        if options.get("continue_final_message"):  # llama-server and Ollama continue such a message in any case
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
        told = error_in(raw, response.status_code, f"it answered {response.status_code}")
        raise UpstreamError(f"The local server at {url} refused: {told['message']}")

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
            raise UnsupportedFeatureError("logprobs: the local server reports none.", param="logprobs")
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
    return {"role": message.role, "content": message.text, **named, **calls, **answered}


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
