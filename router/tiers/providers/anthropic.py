"""Translation of requests to Anthropic's Messages API."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from ...request.json_narrowing import table
from .anthropic_answers import MessageEvents, completion_of, signed_thoughts
from .chat_fields import ChatFields, Image, add_turn
from .provider import Capabilities, ErrorMap, Provider, ProviderCall, with_query

_VERSION = "2023-06-01"
_MAX_TOKENS = 8192  # default limit of an answer, because the API requires a limit
_SAME = {name: name for name in ("temperature", "top_p", "top_k", "thinking", "cache_control")}


class AnthropicProvider(Provider):
    """Anthropic's Messages API. `cloud_url` is https://api.anthropic.com/v1 or a compatible server."""

    name = "anthropic"
    raw_member = "input"
    capabilities = Capabilities(continuation=True, all_endpoints=False)
    errors = ErrorMap(
        statuses={
            "invalid_request_error": 400, "authentication_error": 401, "billing_error": 402, "permission_error": 403,
            "not_found_error": 404, "request_too_large": 413, "rate_limit_error": 429, "api_error": 500,
            "timeout_error": 504, "overloaded_error": 529,
        },
        codes={
            "authentication_error": "invalid_api_key", "billing_error": "insufficient_quota",
            "not_found_error": "model_not_found", "rate_limit_error": "rate_limit_exceeded",
            "overloaded_error": "overloaded",
        },
    )  # fmt: skip

    def headers(self, api_key: str | None) -> dict[str, str]:
        return {"anthropic-version": _VERSION} | ({"x-api-key": api_key} if api_key else {})

    def call(self, path: str, body: dict[str, Any], query: Mapping[str, str]) -> ProviderCall:
        self.check(path, body)
        return ProviderCall(with_query("messages", query), _request(body, self))

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        return completion_of(body)

    def events(self) -> MessageEvents:
        return MessageEvents()


def _request(body: dict[str, Any], provider: Provider) -> dict[str, Any]:
    fields = ChatFields(body, provider)
    system, turns = _turns(fields)
    limit = fields.take("max_completion_tokens", "max_tokens")
    sent: dict[str, Any] = {"model": body.get("model"), "messages": turns, "max_tokens": limit or _MAX_TOKENS}
    if system:
        sent["system"] = system
    if body.get("stream"):
        sent["stream"] = True
    fields.move(sent, _SAME)
    if stop := fields.stop():
        sent["stop_sequences"] = stop
    if (user := fields.take("safety_identifier", "user")) is not None:
        sent["metadata"] = {"user_id": user}
    fields.take("continue_final_message")  # dropped, because a final assistant message implies it
    _add_tools(sent, fields)
    _add_output(sent, fields, provider)
    fields.end()
    return sent


class _CallIds:
    """IDs of tool calls as the API accepts them: unique, and in its alphabet. Other models make others."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._unanswered = defaultdict[str, deque[str]](deque)  # by the client's ID

    def of_call(self, given: str) -> str:
        made = re.sub("[^A-Za-z0-9_-]", "_", given)[:64]
        if not made or made in self._used:
            made = f"{made[:32]}_{blake2b(f'{len(self._used)} {given}'.encode(), digest_size=8).hexdigest()}"
        self._used.add(made)
        self._unanswered[given].append(made)
        return made

    def of_result(self, given: str) -> str:
        return calls.popleft() if (calls := self._unanswered[given]) else self.of_call(given)


def _turns(fields: ChatFields) -> tuple[str, list[dict[str, Any]]]:
    """Return the system prompt and the turns; consecutive messages of one role are merged."""
    system: list[str] = []
    turns: list[dict[str, Any]] = []
    ids = _CallIds()
    for message in fields.messages():
        role = str(message.get("role"))
        if role in ("system", "developer"):
            system.append(fields.text(message))
            continue
        blocks = _tool_result(message, fields, ids) if role == "tool" else _blocks(message, fields, ids)
        add_turn(turns, "assistant" if role == "assistant" else "user", "content", blocks)
    if turns and turns[-1]["role"] == "assistant" and "text" in (last := turns[-1]["content"][-1]):
        last["text"] = last["text"].rstrip()  # the API refuses blanks at the end
    return "\n\n".join(text for text in system if text.strip()), turns


def _blocks(message: dict[str, Any], fields: ChatFields, ids: _CallIds) -> list[dict[str, Any]]:
    blocks = signed_thoughts(message.get("thinking_blocks")) + _content(message, fields)
    for call in fields.calls(message):
        blocks.append({"type": "tool_use", "id": ids.of_call(call.id), "name": call.name, "input": call.arguments})
    return blocks


def _tool_result(message: dict[str, Any], fields: ChatFields, ids: _CallIds) -> list[dict[str, Any]]:
    identifier = ids.of_result(str(message.get("tool_call_id")))
    return [{"type": "tool_result", "tool_use_id": identifier, "content": _content(message, fields)}]


def _content(message: dict[str, Any], fields: ChatFields) -> list[dict[str, Any]]:
    return [_block(part) for part in fields.parts(message) if isinstance(part, Image) or part.strip()]


def _block(part: str | Image) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.url:
        return {"type": "image", "source": {"type": "url", "url": part.url}}
    return {"type": "image", "source": {"type": "base64", "media_type": part.media_type, "data": part.data}}


def _add_tools(sent: dict[str, Any], fields: ChatFields) -> None:
    tools, choice = fields.tools(), fields.tool_choice()
    parallel = fields.take("parallel_tool_calls")
    if not tools:
        return
    sent["tools"] = [
        {
            "name": tool.get("name"),
            "input_schema": table(tool.get("parameters")) or {"type": "object", "properties": {}},
            **{name: tool[name] for name in ("description", "strict") if tool.get(name) is not None},
        }
        for tool in tools
    ]
    chosen: dict[str, Any] = {"type": "any" if choice == "required" else choice}
    if choice.startswith("="):
        chosen = {"type": "tool", "name": choice[1:]}
    if parallel is False and choice != "none":
        chosen["disable_parallel_tool_use"] = True
    sent["tool_choice"] = chosen


def _add_output(sent: dict[str, Any], fields: ChatFields, provider: Provider) -> None:
    output: dict[str, Any] = table(fields.take("output_config")) or {}
    schema = fields.schema()
    if schema == {}:  # Anthropic needs a schema with named fields
        raise provider.unsupported("response_format of type json_object")
    if schema is not None:
        output["format"] = {"type": "json_schema", "schema": schema}
    effort = fields.take("reasoning_effort")
    if effort == "none":
        sent.setdefault("thinking", {"type": "disabled"})
    elif effort is not None:
        sent.setdefault("thinking", {"type": "adaptive"})
        output["effort"] = "low" if effort == "minimal" else effort
    if output:
        sent["output_config"] = output
