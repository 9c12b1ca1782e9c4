"""Translation of requests to Gemini's API (`generateContent`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from ....protocol.dialects.chat_chunks import reasoning_of
from ...request.json_narrowing import object_in, object_of, table, tables
from ..failures import CloudFailure
from .chat_fields import BLANK, ChatFields, EarlierCall, Image, add_turn, with_user_turns
from .gemini_answers import ContentEvents
from .provider import Capabilities, ErrorCodes, Provider, ProviderCall, with_query

_CONFIG = {
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "seed": "seed",
    "n": "candidateCount",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
}
_MODES = {"auto": "AUTO", "none": "NONE", "required": "ANY"}
_NO_SIGNATURE = "skip_thought_signature_validator"  # Google's placeholder signature for calls by other models
_ERRORS: ErrorCodes = {
    "INVALID_ARGUMENT": (400, None),
    "FAILED_PRECONDITION": (400, None),
    "UNAUTHENTICATED": (401, "invalid_api_key"),
    "PERMISSION_DENIED": (403, None),
    "NOT_FOUND": (404, "model_not_found"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_exceeded"),
    "INTERNAL": (500, None),
    "UNAVAILABLE": (503, "overloaded"),
    "DEADLINE_EXCEEDED": (504, None),
}


class GeminiProvider(Provider):
    """Gemini's API. `cloud_url` is https://generativelanguage.googleapis.com/v1beta."""

    name = "gemini"
    hints = ()
    raw_member = "args"
    capabilities = Capabilities(seeds=True, deltas=True, lists_models=False, all_endpoints=False)
    errors = _ERRORS

    def base_path(self, query: Mapping[str, str]) -> str:  # noqa: ARG002
        return "/v1beta"

    def headers(self, api_key: str | None) -> dict[str, str]:
        return {"x-goog-api-key": api_key} if api_key else {}

    def call(self, path: str, body: dict[str, Any], query: Mapping[str, str]) -> ProviderCall:
        self.check(path, body)
        model = quote(str(body.get("model", "")).removeprefix("models/"), safe="")
        method = "streamGenerateContent" if body.get("stream") else "generateContent"
        query = {**query, "alt": "sse"} if body.get("stream") else query
        return ProviderCall(with_query(f"models/{model}:{method}", query), *_request(body, self))

    def events(self) -> ContentEvents:
        return ContentEvents()

    def refused(self, url: str, status: int, headers: Mapping[str, str], raw: bytes) -> CloudFailure:
        """Return the failure, with the retry delay that Google reports in the error body."""
        delay = _retry_delay(raw)
        more = {"retry-after": delay} if delay and not headers.get("retry-after") else {}
        return super().refused(url, status, {**headers, **more}, raw)


def _retry_delay(raw: bytes) -> str:
    """Return the retry delay in seconds, or "" if the error has none."""
    error = object_of(object_in(raw).get("error"))
    delays = (str(detail.get("retryDelay", "")) for detail in tables(error.get("details")) or [])
    return next((match[1] for delay in delays if (match := re.fullmatch(r"(\d+(?:\.\d+)?)s", delay))), "")


def _request(body: dict[str, Any], provider: Provider) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the request and the notes on its changes."""
    fields = ChatFields(body, provider)
    sent = _contents(fields, str(body.get("model")))
    config: dict[str, Any] = {}
    if (limit := fields.take("max_completion_tokens", "max_tokens")) is not None:
        config["maxOutputTokens"] = limit
    fields.move(config, _CONFIG)
    if stop := fields.stop():
        config["stopSequences"] = stop
    if (schema := fields.schema()) is not None:
        config |= {"responseMimeType": "application/json"} | ({"responseJsonSchema": schema} if schema else {})
    if (effort := fields.effort()) is not None:
        level = {"thinkingBudget": 0} if effort == "none" else {"thinkingLevel": effort, "includeThoughts": True}
        config["thinkingConfig"] = level
    fields.take("user", "safety_identifier", "cache_control")
    if config:
        sent["generationConfig"] = config
    _add_tools(sent, fields)
    fields.end()
    return sent, tuple(fields.notes)


def _contents(fields: ChatFields, model: str) -> dict[str, Any]:
    """Return the system instruction and the turns; consecutive messages of one role are merged."""
    system: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # function names by call ID
    role = None
    for message in fields.messages():
        role = message.get("role")
        if role in ("system", "developer"):
            system += [{"text": text}] if (text := fields.text(message)) else []
            continue
        calls = fields.calls(message)
        names |= {call.id: call.name for call in calls}
        parts = [_part(part) for part in fields.parts(message)] if role != "tool" else []
        if role == "assistant" and (signature := _signature(message)) is not None:
            parts = parts or [_signed_alone(message)]
            parts[-1]["thoughtSignature"] = signature
        is_first = not turns or not any("functionCall" in part for part in turns[-1]["parts"])
        parts += [_call_part(call, model, first=is_first and call is calls[0]) for call in calls]
        if role == "tool":
            identifier = str(message.get("tool_call_id"))
            parts.append(_result(identifier, names.get(identifier, identifier), fields.text(message)))
        add_turn(turns, "model" if role == "assistant" else "user", "parts", parts)
    turns = with_user_turns(turns, {"parts": [{"text": BLANK}]}, fields.notes, user_is_last=role == "user")
    return {"contents": turns} | ({"systemInstruction": {"parts": system}} if system else {})


def _part(part: str | Image) -> dict[str, Any]:
    if isinstance(part, str):
        return {"text": part}
    if part.url:
        return {"fileData": {"fileUri": part.url}}
    return {"inlineData": {"mimeType": part.media_type, "data": part.data}}


def _signed_alone(message: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a signature that signs a thought or no text."""
    thought = reasoning_of(message)
    return {"text": thought, "thought": True} if thought else {"text": ""}


def _call_part(call: EarlierCall, model: str, *, first: bool) -> dict[str, Any]:
    """Return a call with its thought signature, which newer models require on the first call of a turn."""
    signature = _signature(call.raw)
    if signature is None and first and not model.removeprefix("models/").startswith(("gemini-1", "gemini-2")):
        signature = _NO_SIGNATURE
    part: dict[str, Any] = {"functionCall": {"id": call.id, "name": call.name, "args": call.arguments}}
    return part if signature is None else {**part, "thoughtSignature": signature}


def _signature(holder: dict[str, Any]) -> Any:
    """Return the thought signature of a message's text or of a tool call, or None."""
    google = object_of(object_of(holder.get("extra_content")).get("google"))
    return google.get("thought_signature")


def _result(identifier: str, name: str, text: str) -> dict[str, Any]:
    try:
        response = table(msgspec.json.decode(text))
    except msgspec.DecodeError:
        response = None
    result = {"result": text} if response is None else response
    return {"functionResponse": {"id": identifier, "name": name, "response": result}}


def _add_tools(sent: dict[str, Any], fields: ChatFields) -> None:
    tools, choice = fields.tools(), fields.tool_choice()
    if not tools:
        return
    declared = [
        {
            "name": tool.get("name"),
            **({"description": tool["description"]} if tool.get("description") else {}),
            **({"parametersJsonSchema": tool["parameters"]} if tool.get("parameters") else {}),
        }
        for tool in tools
    ]
    config: dict[str, Any] = {"mode": "ANY" if choice.startswith("=") else _MODES[choice]}
    if choice.startswith("="):
        config["allowedFunctionNames"] = [choice[1:]]
    sent["tools"] = [{"functionDeclarations": declared}]
    sent["toolConfig"] = {"functionCallingConfig": config}
