"""Translation of requests to Gemini's API (`generateContent`), and of its answers to chat completion chunks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec

from ....accounting.reported_usage import counted
from ....protocol.dialects.chat_chunks import reasoning_of
from ....protocol.http.lenient_json import object_in, object_of, table, tables
from ....protocol.http.wire import new_id
from ..failures import CloudFailure
from .chat_fields import BLANK, ChatFields, EarlierCall, Image, add_turn, with_user_turns
from .provider import (
    PROMPT_USAGE,
    Capabilities,
    ChunkMaker,
    ErrorCodes,
    Provider,
    ProviderCall,
    Translator,
    arguments_of,
    tool_call,
    usage_of,
    whole,
    with_query,
)

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
_FINISHES = {"STOP": "stop", "MAX_TOKENS": "length"}  # all other reasons mean that content was withheld
#: Fields of parts that have an equivalent, or that describe another field.
_KNOWN = frozenset(("text", "thought", "thoughtSignature", "functionCall", "partMetadata", "mediaResolution"))


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

    def events(self) -> Translator:
        return ContentEvents().read

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


@dataclass(slots=True)
class _Candidate:
    """State of one candidate answer."""

    # Whether the candidate has called a tool.
    called: bool = False
    # Kind of each part so far ("text", "thought" or ""), and its text if the text is content.
    parts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    # Latest `groundingMetadata`.
    grounding: dict[str, Any] = field(default_factory=dict[str, Any])
    # All `citationSources`.
    sources: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    # Fields of parts without an equivalent, in order.
    lost: dict[str, None] = field(default_factory=dict[str, None])

    def add(self, part: dict[str, Any], *, is_first: bool) -> None:
        """Add a part. The first part of an event continues the part before it if both have one kind."""
        kind = "thought" if part.get("thought") else "text" if isinstance(part.get("text"), str) else ""
        text = part["text"] if kind == "text" else ""
        if is_first and kind and self.parts and self.parts[-1][0] == kind:
            text = self.parts.pop()[1] + text
        self.parts.append((kind, text))
        self.lost |= dict.fromkeys(name for name in part if name not in _KNOWN)

    def annotations(self) -> list[dict[str, Any]]:
        """Return the citations as OpenAI's annotations, with places in the joined text."""
        chunks = tables(self.grounding.get("groundingChunks")) or []
        made = [
            _annotation(chunk, *self._place(object_of(support.get("segment"))))
            for support in tables(self.grounding.get("groundingSupports")) or []
            for index, chunk in enumerate(chunks)
            if isinstance(cited := support.get("groundingChunkIndices"), list) and index in cited
        ]
        content = "".join(text for _, text in self.parts)
        made += [_annotation({"web": source}, *_span(content, source)) for source in self.sources]
        return [each for each in made if each["url_citation"]["url"]]

    def _place(self, segment: dict[str, Any]) -> tuple[int, int]:
        """Return the place of a segment: its byte offsets in its part or, if `partIndex` is missing or wrong, in the
        whole text. If the segment's text is at neither place, return the first place of this text."""
        texts, at = [text for _, text in self.parts], whole(segment.get("partIndex"))
        content, before = "".join(texts), len("".join(texts[:at]))
        begin, end = _span("".join(texts[at : at + 1]), segment)
        places = [(before + begin, before + end), _span(content, segment)]
        cited = segment.get("text") or None
        if isinstance(cited, str) and (first := content.find(cited)) >= 0:
            places.append((first, first + len(cited)))
        return next((place for place in places if content[slice(*place)] == cited), places[0])


def _span(text: str, segment: dict[str, Any]) -> tuple[int, int]:
    """Return the start and end of a segment in characters, from its offsets in bytes."""
    encoded = text.encode("utf-8", "surrogatepass")
    begin, end = (
        len(encoded[: whole(segment.get(name))].decode("utf-8", "ignore")) for name in ("startIndex", "endIndex")
    )
    return begin, end


def _annotation(chunk: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    source = object_of(next((chunk[name] for name in ("web", "retrievedContext", "maps") if chunk.get(name)), None))
    cited = {"url": str(source.get("uri") or ""), "title": str(source.get("title") or "")}
    return {"type": "url_citation", "url_citation": {**cited, "start_index": begin, "end_index": end}}


class ContentEvents:
    """Translator of one answer. Each event of a stream is an answer object that contains only new parts."""

    def __init__(self) -> None:
        self._chunks = ChunkMaker()
        self._candidates: dict[int, _Candidate] = {}
        self._counts: dict[str, Any] = {}  # latest token counts
        self._is_finished = False  # whether a candidate is finished

    def read(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        chunks = self._chunks
        chunks.id = str(event.get("responseId") or chunks.id)
        chunks.model = str(event.get("modelVersion") or chunks.model)
        made: list[dict[str, Any]] = []
        for candidate in _candidates(event):
            index = whole(candidate.get("index"))
            if index not in self._candidates:
                self._candidates[index] = _Candidate()
                made.append(chunks.delta({"role": "assistant", "content": ""}, index=index))
            state = self._candidates[index]
            for number, part in enumerate(tables(object_of(candidate.get("content")).get("parts")) or []):
                state.add(part, is_first=number == 0)
                made += [chunks.delta(delta, index=index) for delta in self._deltas(part, index)]
            state.grounding = table(candidate.get("groundingMetadata")) or state.grounding
            state.sources += tables(object_of(candidate.get("citationMetadata")).get("citationSources")) or []
            finish = _finish(candidate.get("finishReason"), called=state.called)
            if finish is not None:
                self._is_finished = True
                if cited := chunks.entries("annotations", state.annotations(), index):
                    made.append(chunks.delta({"annotations": cited}, index=index))
                made.append(chunks.delta({}, finish, index))
                if state.lost:
                    made[-1]["updraft"] = {"notes": [f"parts of the answer were left out: {', '.join(state.lost)}"]}
        if counts := object_of(event.get("usageMetadata")):
            self._counts |= counts
            made.append(chunks.usage(_usage(self._counts, is_final=self._is_finished)))
        return made

    def _deltas(self, part: dict[str, Any], index: int) -> list[dict[str, Any]]:
        """Return the deltas of a part of a candidate: its text or tool call, and the signature of the text."""
        call, text, signature = table(part.get("functionCall")), part.get("text"), part.get("thoughtSignature")
        extra = {} if signature is None else {"extra_content": {"google": {"thought_signature": signature}}}
        if call is not None:
            self._candidates[index].called = True
            identifier, arguments = str(call.get("id") or new_id("call")), arguments_of(call.get("args"))
            made = tool_call(identifier, str(call.get("name")), arguments, **extra)
            return [{"tool_calls": self._chunks.entries("tool_calls", [made], index)}]
        said = {"reasoning_content" if part.get("thought") else "content": text} if isinstance(text, str) else {}
        return [delta for delta in (said, extra) if any(delta.values())]


def _candidates(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the candidate answers. A blocked prompt counts as one filtered answer."""
    candidates = tables(body.get("candidates")) or []
    blocked = object_of(body.get("promptFeedback")).get("blockReason")
    return [{"finishReason": blocked}] if blocked and not candidates else candidates


def _finish(reason: Any, *, called: bool) -> str | None:
    if reason is None:
        return None
    finish = _FINISHES.get(str(reason), "content_filter")
    return "tool_calls" if called and finish == "stop" else finish


def _usage(counts: dict[str, Any], *, is_final: bool) -> dict[str, Any]:
    """Convert token counts to OpenAI's form. Thoughts are billed as output. Early counts may have only the prompt."""
    thought = whole(counts.get("thoughtsTokenCount"))
    read = whole(counts.get("promptTokenCount")) + whole(counts.get("toolUsePromptTokenCount"))
    written = whole(counts.get("candidatesTokenCount")) + thought
    written = written or max(0, whole(counts.get("totalTokenCount")) - read)
    cached = whole(counts.get("cachedContentTokenCount"))
    usage = usage_of(read, written, cached, completion_tokens_details={"reasoning_tokens": thought})
    given = [counts[name] for name in ("candidatesTokenCount", "thoughtsTokenCount") if counts.get(name) is not None]
    is_counted = written or (is_final and None not in map(counted, given))  # invalid counts are estimated
    return {name: usage[name] for name in (usage if is_counted else PROMPT_USAGE)}
