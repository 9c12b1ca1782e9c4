"""Translation of requests to Anthropic's Messages API, and of its answers to chat completion chunks."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from ....accounting.reported_usage import ReportedUsage
from ....protocol.dialects.chat_chunks import PAUSES, UNFINISHED, citations_of
from ....protocol.dialects.messages_request import is_vendor_block
from ....protocol.http.forwarding import NativeRequest
from ....protocol.http.lenient_json import object_of, table, tables
from .chat_fields import BLANK, ChatFields, Image, add_turn, with_user_turns
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

_FINISHES = {
    "max_tokens": "length",
    **dict.fromkeys(UNFINISHED, "length"),  # of OpenAI's reasons, the only one that means an unfinished answer
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_PAUSED_NOTE = "the cloud paused its answer: send the answer back unchanged to continue"
_SHOWN = {"text": "content", "thinking": "reasoning_content"}  # names in chat completions
#: Fields of blocks that only Anthropic reads. The last field is its signature, encrypted data, or summary of the turns
#: before.
_SIGNED = {"thinking": ("thinking", "signature"), "redacted_thinking": ("data",), "compaction": ("content",)}
_VERSION = "2023-06-01"
_NO_RESULT = "No result."  # result of a call that the conversation leaves unanswered
_REPAIRED = "messages: tool calls and results that do not match were repaired"
#: Characters to escape in tool names: those that the API refuses, and underscores that look like an escape.
_UNACCEPTED = re.compile(r"[^a-zA-Z0-9_-]|_(?=x[0-9a-f]{2})")
_ESCAPED = re.compile(r"_x((?:[0-9a-f]{2})+)_")
_MAX_TOKENS = 8192  # default limit of an answer, because the API requires a limit
#: Anthropic's fields that are sent as the caller wrote them, if the router has not changed the listed chat fields.
_OWN: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "system": ("messages",),
    "tools": ("tools",),
    "tool_choice": ("tools", "tool_choice", "parallel_tool_calls"),
    "thinking": ("reasoning_effort", "max_tokens", "max_completion_tokens"),
    "output_config": ("reasoning_effort", "response_format"),
    "metadata": ("user",),
    **dict.fromkeys(("service_tier", "cache_control", "context_management", "diagnostics", "inference_geo"), ()),
}
_SAME = {name: name for name in ("temperature", "top_p", "top_k", "thinking", "cache_control")}
_ERRORS: ErrorCodes = {
    "invalid_request_error": (400, None),
    "authentication_error": (401, "invalid_api_key"),
    "billing_error": (402, "insufficient_quota"),
    "permission_error": (403, None),
    "not_found_error": (404, "model_not_found"),
    "request_too_large": (413, None),
    "rate_limit_error": (429, "rate_limit_exceeded"),
    "api_error": (500, None),
    "timeout_error": (504, None),
    "overloaded_error": (529, "overloaded"),
}


def signed_thoughts(blocks: Any) -> list[dict[str, Any]]:
    """Return the blocks that only Anthropic reads, with only the fields that its API accepts."""
    return [
        {"type": kind, **{name: block.get(name) for name in _SIGNED[kind]}}
        for block in tables(blocks) or []
        if (kind := str(block.get("type"))) in _SIGNED and block.get(_SIGNED[kind][-1])
    ]


def _sent_name(name: Any) -> str:
    """Return a tool's name in the alphabet of the API: `a.b` as `a_x2e_b`."""
    return _UNACCEPTED.sub(lambda match: f"_x{match[0].encode('utf-8', 'replace').hex()}_", str(name))


def _given_name(name: Any) -> str:
    """Return the caller's name of a tool from the name that `_sent_name` returned."""
    return _ESCAPED.sub(lambda match: bytes.fromhex(match[1]).decode("utf-8", "replace"), str(name))


@dataclass(slots=True)
class _Block:
    """One content block of an answer."""

    # Block as its first event has it.
    begun: dict[str, Any] = field(default_factory=dict[str, Any])
    # Place of its text in the text of the whole answer, in characters.
    begin_at: int = 0
    # Texts of the first event and the deltas, by field.
    texts: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict[str, list[str]](list))
    citations: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    # Index of its tool call.
    call: int = 0


class MessageEvents:
    """Translator of a message or of the events of its stream. Some servers alternate between blocks."""

    def __init__(self) -> None:
        self._chunks = ChunkMaker()
        self._counts: dict[str, Any] = {}
        self._blocks = defaultdict[int, _Block](_Block)  # by index
        self._end_at = 0  # length of the answer's text, in characters
        self._is_text_open = False  # whether the text of the next chunk would continue an uncited text block
        self._lost: dict[str, None] = {}  # types of blocks without an equivalent, in order

    def read(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        kind, index = event.get("type"), whole(event.get("index"))
        current = index if index in self._blocks else next(reversed(self._blocks), index)  # some servers count wrongly
        if kind == "message":
            made = self._start(event)
            for block in tables(event.get("content")) or []:
                made += [*self._begin(block, 0), *self._end(self._blocks[0])]
            return [*made, *self._finish(event, event.get("usage"))]
        if kind == "message_start":
            return self._start(object_of(event.get("message")))
        if kind == "content_block_start":
            return self._begin(object_of(event.get("content_block")), index)
        if kind == "content_block_delta":
            return self._delta(object_of(event.get("delta")), self._blocks[current])
        if kind == "content_block_stop":
            return self._end(self._blocks.pop(current, _Block()))
        if kind == "message_delta":
            return self._finish(object_of(event.get("delta")), event.get("usage"))
        return []  # a ping, `message_stop`, or an unknown event

    def _start(self, begun: dict[str, Any]) -> list[dict[str, Any]]:
        self._chunks.id, self._chunks.model = str(begun.get("id") or self._chunks.id), str(begun.get("model"))
        self._counts = {**object_of(begun.get("usage")), "output_tokens": None}  # counted at the end
        return [self._chunks.delta({"role": "assistant", "content": ""}), self._chunks.usage(_usage(self._counts))]

    def _begin(self, block: dict[str, Any], index: int) -> list[dict[str, Any]]:
        kind, continues_text = str(block.get("type")), self._is_text_open
        opened = self._blocks[index] = _Block(block, self._end_at, citations=[*(tables(block.get("citations")) or ())])
        text = str(block.get(kind) or "")
        opened.texts[kind].append(text)
        if kind in ("text", "tool_use", *_SIGNED):
            self._is_text_open = kind == "text"
        else:
            self._lost[kind] = None
        if kind == "tool_use":
            call = tool_call(str(block.get("id") or ""), _given_name(block.get("name")), "")
            calls = self._chunks.entries("tool_calls", [call])
            opened.call = calls[0]["index"]
            return [self._chunks.delta({"tool_calls": calls})]
        ended = [self._chunks.delta({"citations": []})] if kind == "text" and continues_text else []
        return [*ended, *self._shown(kind, text)]

    def _delta(self, delta: dict[str, Any], block: _Block) -> list[dict[str, Any]]:
        block.citations += [citation] if (citation := table(delta.get("citation"))) else []
        name = str(delta.get("type")).removesuffix("_delta").replace("input_json", "partial_json")
        name = "content" if name == "compaction" else name
        text = str(delta.get(name) or "")
        block.texts[name].append(text)
        is_call = block.begun.get("type") == "tool_use"
        return (
            [self._arguments(block, text)] if is_call and name == "partial_json" and text else self._shown(name, text)
        )

    def _shown(self, kind: str, text: str) -> list[dict[str, Any]]:
        """Return the chunk of a text or thought; none for an empty text and other kinds."""
        if not text or kind not in _SHOWN:
            return []
        self._end_at += len(text) if kind == "text" else 0
        return [self._chunks.delta({_SHOWN[kind]: text})]

    def _end(self, ended: _Block) -> list[dict[str, Any]]:
        block = ended.begun | {name: "".join(texts) for name, texts in ended.texts.items()}
        if signed := signed_thoughts([block]):
            return [self._chunks.delta({"thinking_blocks": self._chunks.entries("thinking_blocks", signed)})]
        if ended.citations:
            self._is_text_open = False
            return [self._chunks.delta(self._cited(ended))]
        lacks_arguments = block.get("type") == "tool_use" and not block.get("partial_json")
        return [self._arguments(ended, arguments_of(block.get("input")))] if lacks_arguments else []

    def _cited(self, block: _Block) -> dict[str, Any]:
        """Return the citations of a text block in Anthropic's form, and in OpenAI's form if they have a URL."""
        place = {"start_index": block.begin_at, "end_index": self._end_at}
        cited = [
            {"type": "url_citation", "url_citation": {"url": url, "title": str(each.get("title") or ""), **place}}
            for each in block.citations
            if (url := str(each.get("url") or each.get("source"))).startswith(("http://", "https://"))
        ]
        annotations = {"annotations": self._chunks.entries("annotations", cited)} if cited else {}
        return {"citations": self._chunks.entries("citations", block.citations), **annotations}

    def _arguments(self, block: _Block, text: str) -> dict[str, Any]:
        return self._chunks.delta({"tool_calls": [{"index": block.call, "function": {"arguments": text}}]})

    def _finish(self, ended: dict[str, Any], counts: Any) -> list[dict[str, Any]]:
        self._counts |= object_of(counts)
        usage, reason = self._chunks.usage(_usage(self._counts)), ended.get("stop_reason")
        if reason is None:
            return [usage]
        last = self._chunks.delta({}, _FINISHES.get(str(reason), "stop"))
        notes = [_PAUSED_NOTE] if reason in PAUSES else []
        if self._lost:
            notes.append(f"blocks of the answer were left out: {', '.join(self._lost)}")
        if notes:
            last["updraft"] = {"notes": notes}
        stopped_by = reason if reason in UNFINISHED else ended.get("stop_sequence")
        if stopped_by is not None:  # vLLM's field for the stop sequence that ended the answer
            last["choices"][0]["stop_reason"] = stopped_by
        if reason == "stop_sequence":
            last["choices"][0]["stop_sequence"] = stopped_by
        return [last, usage]


def _usage(counts: dict[str, Any]) -> dict[str, Any]:
    """Convert token counts to OpenAI's form, with cache reads and writes as prompt tokens."""
    usage = usage_of(*(ReportedUsage.of({"usage": counts}) or ReportedUsage()).priced)
    return {name: usage[name] for name in (usage if counts.get("output_tokens") is not None else PROMPT_USAGE)}


class AnthropicProvider(Provider):
    """Anthropic's Messages API. `cloud_url` is https://api.anthropic.com/v1 or a compatible server."""

    name = "anthropic"
    hints = ("user", "safety_identifier")
    raw_member = "input"
    end_event = "message_stop"
    capabilities = Capabilities(continuation=True, deltas=True, all_endpoints=False)
    errors = _ERRORS

    def headers(self, api_key: str | None) -> dict[str, str]:
        return {"anthropic-version": _VERSION} | ({"x-api-key": api_key} if api_key else {})

    def call(self, path: str, body: dict[str, Any], query: Mapping[str, str]) -> ProviderCall:
        self.check(path, body)
        return ProviderCall(with_query("messages", query), *_request(body, self))

    def with_native(self, call: ProviderCall, body: dict[str, Any], native: NativeRequest) -> ProviderCall:
        sent, own, notes = dict(call.body), dict(native.fields), list(call.notes)
        tools = [tool for tool in tables(own.get("tools")) or [] if tool.get("type") in (None, "custom")]
        own["tools"] = [_with_sent_name(tool) for tool in tools]
        own["tool_choice"] = _with_sent_name(object_of(own.get("tool_choice")))
        turns = tables(own.get("messages")) or []
        if all(turn.get("role") in ("user", "assistant") for turn in turns):
            own |= {"messages": _accepted(turns, notes), "system": _without_blanks(own.get("system"))}
        else:
            own |= {name: sent.get(name) for name in ("messages", "system")}
        for name, sources in _OWN.items():
            if all(body.get(each) == native.chat.get(each) for each in sources):
                sent.pop(name, None)
                sent |= {name: own[name]} if own.get(name) else {}
        if "tools" not in sent:
            sent.pop("tool_choice", None)
        for name in () if native.headers else ("context_management", "diagnostics"):  # these need a beta header
            sent.pop(name, None)
        return replace(call, body=sent, notes=tuple(dict.fromkeys(notes)))

    def events(self) -> Translator:
        return MessageEvents().read


def _with_sent_name(holder: dict[str, Any]) -> dict[str, Any]:
    return {**holder, "name": _sent_name(holder["name"])} if "name" in holder else holder


def _request(body: dict[str, Any], provider: Provider) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the request and the notes on its changes."""
    fields = ChatFields(body, provider)
    system, turns = _turns(fields)
    limit = fields.take("max_completion_tokens", "max_tokens")
    sent: dict[str, Any] = {"model": body.get("model"), "messages": _accepted(turns, fields.notes)}
    sent |= {"max_tokens": limit or _MAX_TOKENS, **({"system": system} if system else {})}
    if body.get("stream"):
        sent["stream"] = True
    fields.move(sent, _SAME)
    if stop := fields.stop():
        sent["stop_sequences"] = stop
    if (user := fields.take("safety_identifier", "user")) is not None:
        sent["metadata"] = {"user_id": user}
    fields.take("continue_final_message")  # dropped, because a final assistant message implies it
    _add_tools(sent, fields, tables(body.get("tools")) or [])
    _add_output(sent, fields, provider)
    fields.end()
    return sent, tuple(dict.fromkeys(fields.notes))


class _CallIds:
    """IDs of tool calls as the API accepts them: unique, and in its alphabet. Other models make others."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self.unanswered = defaultdict[str, deque[str]](deque)  # calls of the last turn, by the client's ID

    def of_call(self, given: str) -> str:
        made = re.sub("[^A-Za-z0-9_-]", "_", given)[:64]
        if not made or made in self._used:
            made = f"{made[:32]}_{blake2b(f'{len(self._used)} {given}'.encode(), digest_size=8).hexdigest()}"
        self._used.add(made)
        self.unanswered[given].append(made)
        return made

    def of_result(self, given: str) -> str | None:
        """Return the ID of the call that a result answers; None if no call of the last turn waits for a result."""
        return calls.popleft() if (calls := self.unanswered[given]) else None


def _turns(fields: ChatFields) -> tuple[str | list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the system prompt and the turns, one per message or piece of a message."""
    system: list[list[dict[str, Any]]] = []
    turns: list[dict[str, Any]] = []
    for message in fields.messages():
        role = str(message.get("role"))
        blocks = [_block(part) | _cache_hint(given) for part, given in fields.given_parts(message)]
        if role in ("system", "developer"):
            fields.text(message)  # refuses images
            system.append(blocks)
            continue
        if role == "tool":
            hints = [hint for block in blocks if (hint := block.pop("cache_control", None))]
            result = {"type": "tool_result", "tool_use_id": str(message.get("tool_call_id")), "content": blocks}
            blocks = [result | ({"cache_control": hints[-1]} if hints else {})]  # the API caches whole results
        if blocks and (cited := citations_of(message)):
            blocks[-1]["citations"] = cited
        calls = [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} | _cache_hint(call.raw)
            for call in fields.calls(message)
        ]
        content = [*signed_thoughts(message.get("thinking_blocks")), *blocks, *calls]
        turns.append({"role": "assistant" if role == "assistant" else "user", "content": content})
    return _system_prompt(system), turns


def _system_prompt(messages: list[list[dict[str, Any]]]) -> str | list[dict[str, Any]]:
    """Return the system messages as one text, or as blocks if a block has a cache hint."""
    blocks = [block for message in messages for block in message]
    if any("cache_control" in block for block in blocks):
        return _without_blanks(blocks)
    texts = ("".join(block["text"] for block in message) for message in messages)
    return "\n\n".join(text for text in texts if text.strip())


def _cache_hint(given: dict[str, Any]) -> dict[str, Any]:
    """Return the cache hint of the client's part, call or tool, as a field."""
    hint = given.get("cache_control")
    return {"cache_control": hint} if hint else {}


def _accepted(messages: list[dict[str, Any]], notes: list[str]) -> list[dict[str, Any]]:
    """Return messages as the API accepts them: valid IDs and names, one result per call, no blank texts, no unsigned
    thoughts, alternating roles."""
    ids, turns, given = _CallIds(), list[dict[str, Any]](), list[dict[str, Any]]()
    for message in messages:
        content, role = message.get("content"), str(message.get("role"))
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else tables(content) or []
        given.append({**message, "content": blocks})
        if role == "assistant" and turns and turns[-1]["role"] == "user":
            ids.unanswered.clear()
        add_turn(turns, role, "content", [made for block in blocks for made in _accepted_blocks(block, ids, notes)])
    if turns and turns[-1]["role"] == "assistant" and "text" in (last := turns[-1]["content"][-1]):
        turns[-1]["content"][-1] = {**last, "text": last["text"].rstrip()}  # the API refuses blanks at the end
    is_users = bool(messages) and messages[-1].get("role") == "user"
    turns = with_user_turns(turns, {"content": [{"type": "text", "text": BLANK}]}, notes, user_is_last=is_users)
    turns = _answered(turns, notes)
    return messages if turns == given else turns


def _accepted_blocks(block: dict[str, Any], ids: _CallIds, notes: list[str]) -> list[dict[str, Any]]:
    match block.get("type"):
        case "text":
            return [_with_own_citations(block)] if str(block.get("text") or "").strip() else []
        case "thinking" | "redacted_thinking" | "compaction":
            return signed_thoughts([block])
        case "tool_use":
            return [{**_with_sent_name(block), "id": ids.of_call(str(block.get("id")))}]
        case "tool_result":
            content: Any = _without_blanks(block.get("content") or "")
            if (call_id := ids.of_result(str(block.get("tool_use_id")))) is None:
                notes.append(_REPAIRED)
                return [{"type": "text", "text": content}] if isinstance(content, str) else content
            return [{**block, "tool_use_id": call_id, **({"content": content} if block.get("content") else {})}]
        case _:
            return [] if is_vendor_block(block) else [block]


def _answered(turns: list[dict[str, Any]], notes: list[str]) -> list[dict[str, Any]]:
    """Return the turns with results for all calls, at the start of the turn after the calls."""
    made: list[dict[str, Any]] = []
    end: dict[str, Any] = {"role": "user", "content": []}
    for turn in turns if not turns or turns[-1]["role"] == "user" else [*turns, end]:
        before: list[dict[str, Any]] = made[-1]["content"] if made else []
        blocks: list[dict[str, Any]] = turn["content"]
        results = [block for block in blocks if block.get("type") == "tool_result"]
        answered = [result["tool_use_id"] for result in results]
        missing = [block["id"] for block in before if block.get("type") == "tool_use" and block["id"] not in answered]
        if missing:
            notes.append(_REPAIRED)
        results += [{"type": "tool_result", "tool_use_id": each, "content": _NO_RESULT} for each in missing]
        content = [*results, *(block for block in blocks if block.get("type") != "tool_result")]
        made += [{**turn, "content": content}] if content else []
    return made


def _with_own_citations(block: dict[str, Any]) -> dict[str, Any]:
    """Return a text block without citations of other clouds, which lack the index that the API has encrypted."""
    given = tables(block.get("citations")) or []
    own = [citation for citation in given if citation.get("encrypted_index") != ""]
    rest = {name: value for name, value in block.items() if name != "citations"}
    return block if len(own) == len(given) else {**rest, "citations": own} if own else rest


def _without_blanks(content: Any) -> Any:
    """Return a text, or content blocks without blank texts."""
    if isinstance(content, str):
        return content if content.strip() else []
    return [block for block in tables(content) or [] if block.get("type") != "text" or str(block.get("text")).strip()]


def _block(part: str | Image) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.url:
        return {"type": "image", "source": {"type": "url", "url": part.url}}
    return {"type": "image", "source": {"type": "base64", "media_type": part.media_type, "data": part.data}}


def _add_tools(sent: dict[str, Any], fields: ChatFields, given: list[dict[str, Any]]) -> None:
    tools, choice = fields.tools(), fields.tool_choice()
    parallel = fields.take("parallel_tool_calls")
    if not tools:
        return
    functions = [table(tool.get("function")) or {} for tool in given]
    hints = {each.get("name"): _cache_hint({**each, **tool}) for each, tool in zip(functions, given, strict=True)}
    sent["tools"] = [
        {
            "name": _sent_name(tool.get("name")),
            "input_schema": table(tool.get("parameters")) or {"type": "object", "properties": {}},
            **{name: tool[name] for name in ("description", "strict") if tool.get(name) is not None},
            **hints.get(tool.get("name"), {}),
        }
        for tool in tools
    ]
    chosen: dict[str, Any] = {"type": "any" if choice == "required" else choice}
    if choice.startswith("="):
        chosen = {"type": "tool", "name": _sent_name(choice[1:])}
    if parallel is False and choice != "none":
        chosen["disable_parallel_tool_use"] = True
    sent["tool_choice"] = chosen


def _add_output(sent: dict[str, Any], fields: ChatFields, provider: Provider) -> None:
    output: dict[str, Any] = object_of(fields.take("output_config"))
    schema = fields.schema()
    if schema == {}:  # Anthropic needs a schema with named fields
        raise provider.unsupported("response_format of type json_object")
    if schema is not None:
        output["format"] = {"type": "json_schema", "schema": schema}
    effort = fields.effort()
    if effort == "none":
        sent.setdefault("thinking", {"type": "disabled"})
    elif effort is not None:
        sent.setdefault("thinking", {"type": "adaptive"})
        output["effort"] = "low" if effort == "minimal" else effort
    if output:
        sent["output_config"] = output
