"""Checks and normalization of cloud answers: completions, stream events and embeddings."""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

from ...accounting.reported_usage import ReportedUsage
from ...protocol.dialects.chat_chunks import are_complete, index_of, text_of
from ...protocol.embeddings import base64_of, vector_of
from ...protocol.http.lenient_json import json_bytes, json_of, object_in, object_of, rows, table, tables
from ...protocol.http.wire import new_id
from .failures import invalid_answer
from .providers.provider import Provider

# OpenAI's finish reasons, by the lower-case spellings of several APIs.
_FINISH_REASONS = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn", "stop_sequence"), "stop"),
    **dict.fromkeys(("length", "max_tokens"), "length"),
    **dict.fromkeys(("tool_calls", "tool_call", "tool_use"), "tool_calls"),
    **{name: name for name in ("content_filter", "function_call")},
}
_PLAIN = "reasoning_content"
#: Other names of the reasoning: Ollama's `thinking`, and `reasoning` of vLLM and OpenRouter, which callers also get.
_FIELDS = ("thinking", "reasoning")
#: Texts of messages.
_GROWING = {"content", "refusal", _PLAIN, *_FIELDS}
Event = tuple[bytes, dict[str, Any]]
ContinuationVerdict = Literal["unknown", "continues", "repeats", "differs"]
_ALIKE = 12  # characters at the start of the answer; a stream that repeats them is rarely a continuation


def completion_in(
    raw: bytes, url: str, provider: Provider, redact: Callable[[Any], Any], *, is_text: bool = False
) -> dict[str, Any]:
    """Return the answer as a completion. `is_text`: the request was a bare prompt. `redact`: hides keys in errors.
    Raises CloudFailure if the body is no completion, or if it is an error with status 200."""
    body = _table(raw, url, provider.read)
    if body.get("error") and not body.get("choices"):
        raise provider.reported(url, redact(body["error"]))
    body = provider.answer(body)
    choices, usage = tables(body.get("choices")), ReportedUsage.of(body)
    if usage and usage.prompt_tokens:
        body["usage"] = usage.standard(body.get("usage"))
    silent = ("content_filter", "length", "stop") if usage and usage.completion_tokens else ("content_filter", "length")
    if not choices or not all(_is_text(each) if is_text else _is_choice(each, silent) for each in choices):
        raise invalid_answer(url, "the answer is not a completion")
    return body


def embeddings_in(raw: bytes, url: str, encoding: Any) -> dict[str, Any]:
    """Return the answer with vectors in the requested encoding, in order. Raises CloudFailure without vectors."""
    answer = _table(raw, url)
    entries = tables(answer.get("data"))
    if not entries:
        raise invalid_answer(url, "the answer has no embeddings")
    try:
        for entry in entries:
            if encoding == "base64" and (numbers := rows(entry.get("embedding"))) is not None:
                entry["embedding"] = base64_of(numbers)
            elif encoding in (None, "float") and isinstance(text := entry.get("embedding"), str):
                entry["embedding"] = vector_of(text)
    except (OverflowError, ValueError, struct.error) as error:
        raise invalid_answer(url, "the answer has an embedding that is neither numbers nor base64") from error
    entries.sort(key=lambda entry: index_of(entry, 0))
    return answer


def models_in(raw: bytes, owner: str | None = None) -> frozenset[str]:
    """Return the model IDs in a model list, only those of `owner` if given. Empty if `raw` is not a list."""
    cards = tables(object_in(raw).get("data")) or []
    return frozenset(str(card.get("id")) for card in cards if owner in (None, card.get("owned_by")))


def has_content(event: dict[str, Any]) -> bool:
    return any(choice.get("finish_reason") or _has_content(choice) for choice in event["choices"])


def is_piece(choice: dict[str, Any]) -> bool:
    delta, reason = choice.get("delta"), choice.get("finish_reason") or None
    return isinstance(reason, str | None) and (delta is None or (table(delta) is not None and _is_content(delta)))


class CallIndices:
    """Indices and IDs of one answer's tool calls. Some servers omit them, or send the same ones for every call."""

    def __init__(self) -> None:
        self._indices: dict[tuple[int, str], int] = {}  # by server index and call ID; "" means the latest ID
        self._arguments: list[str] = []  # arguments so far, by index of the call
        self._ids: set[str] = set()

    def numbered(self, pieces: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield pieces of calls with the index of their call. Only the first piece has the ID. A name starts a call if
        its ID is new, or after complete arguments if it has no ID or complete arguments too."""
        for place, piece in enumerate(map(_with_text, pieces)):
            function = object_of(piece.get("function") or piece.get("custom"))
            name, arguments = function.get("name"), function.get("arguments") or ""
            latest = (index_of(piece, place), "")
            call = (latest[0], str(piece.get("id") or ""))
            if call not in self._indices and not name:
                call = latest
            made, known = dict(piece), self._indices.get(call)
            may_follow = bool(name) and (call == latest or are_complete(arguments))
            if known is None or (may_follow and are_complete(self._arguments[known])):
                self._indices[call] = len(self._arguments)
                self._arguments.append("")
                made["id"] = self.unused(piece.get("id"))
            else:
                made.pop("id", None)
            made["index"] = self._indices[latest] = self._indices[call]
            self._arguments[made["index"]] += arguments
            yield made

    def added_by(self, calls: list[dict[str, Any]], *, has_deltas: bool) -> Iterator[dict[str, Any]]:
        """Yield pieces for `numbered` with the calls of a whole message that are new, and with new arguments."""
        for place, call in enumerate(map(_with_text, calls)):
            if place >= len(self._arguments):
                yield {**call, "index": place}
                continue
            self._indices[place, ""] = place
            arguments = object_of(call.get("function")).get("arguments") or ""
            if added := _added(arguments, self._arguments[place], has_deltas=has_deltas):
                yield {"index": place, "function": {"arguments": added}}

    def unused(self, identifier: Any) -> str:
        """Return the ID of a new call, or another ID if it is missing or belongs to an earlier call."""
        made = str(identifier or new_id("call"))
        made = new_id("call") if made in self._ids else made
        self._ids.add(made)
        return made


class StreamedChoices:
    """Choices of one stream, with the roles, call indices and finish reasons that clouds leave out. `request`: body of
    the chat request."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._request = request
        self._last: dict[str, Any] = {}
        self._begun: set[int] = set()  # indices of choices whose role was sent
        self._calls = defaultdict[int, CallIndices](CallIndices)
        self._unfinished: dict[int, bool] = {}  # by index of each choice without a finish reason: whether it is text
        self._said = defaultdict[int, dict[str, list[str]]](dict)  # texts so far, by choice and field
        self._has_deltas: set[int] = set()  # indices of choices with content in deltas

    def unfold(self, event: dict[str, Any]) -> bool:
        """Replace the whole messages in `event` with deltas that hold only what is new. Some clouds end a stream with
        the whole message, or stream messages that grow. Return whether `event` changed."""
        is_changed = False
        for place, choice in enumerate(event["choices"]):
            index, message = index_of(choice, place), table(choice.get("message"))
            if _has_content(choice):
                self._has_deltas.add(index)
            elif message:
                choice["delta"] = self._added_by(message, index)
            if message is not None:
                del choice["message"]
                event["object"], is_changed = "chat.completion.chunk", True
        return is_changed

    def _added_by(self, message: dict[str, Any], index: int) -> dict[str, Any]:
        said, has_deltas = self._said[index], index in self._has_deltas
        added = {name: value for name, value in message.items() if name not in said}
        for name in said.keys() & message.keys() & _GROWING:
            added[name] = _added(text_of(message[name]), "".join(said[name]), has_deltas=has_deltas)
        if calls := tables(message.get("tool_calls")):
            added["tool_calls"] = list(self._calls[index].added_by(calls, has_deltas=has_deltas))
        return {name: value for name, value in added.items() if value or not said}

    def normalize(self, event: dict[str, Any]) -> bool:
        """Normalize `event` in place. Only the first delta of a choice has a role. Return whether `event` changed."""
        is_changed = False
        for place, choice in enumerate(event["choices"]):
            self._last, index = event, index_of(choice, place)
            if (delta := table(choice.get("delta"))) is not None:
                is_changed |= _move_function_call(delta, self._request)
                if index in self._begun:
                    is_changed |= delta.pop("role", None) is not None
                elif delta.get("role") != "assistant":
                    choice["delta"], is_changed = {**delta, "role": "assistant"}, True
                self._begun.add(index)
                if delta.get("content") == []:
                    choice["delta"]["content"], is_changed = None, True
                if calls := tables(delta.get("tool_calls")):
                    numbered = list(self._calls[index].numbered(calls))
                    is_changed |= numbered != calls
                    choice["delta"]["tool_calls"] = numbered
                for name, value in delta.items():
                    if value:
                        self._said[index].setdefault(name, []).append(text_of(value))
            if reason := choice.get("finish_reason"):
                self._unfinished.pop(index, None)
                usual = _finish_reason(reason, self._request, has_calls=index in self._calls)
                choice["finish_reason"], is_changed = usual, is_changed or usual != reason
            elif _has_content(choice):
                self._unfinished[index] = "text" in choice
        return is_changed

    def finish(self) -> dict[str, Any] | None:
        """Return an event with the finish reasons that are missing at the end of the stream, or None."""
        choices: list[dict[str, Any]] = []
        for index, is_text in self._unfinished.items():
            piece: dict[str, Any] = {"text": ""} if is_text else {"delta": {}}
            choices.append({"index": index, **piece, "finish_reason": "tool_calls" if index in self._calls else "stop"})
        self._unfinished.clear()
        return {**self._last, "choices": choices, "usage": None} if choices else None


def _has_content(choice: dict[str, Any]) -> bool:
    """Return whether a streamed choice has text or other content besides its role."""
    delta = object_of(choice.get("delta"))
    return bool(choice.get("text")) or any(value for name, value in delta.items() if name != "role")


def _added(whole: str, earlier: str, *, has_deltas: bool) -> str:
    """Return the text that a message adds to the text `earlier`. A message that does not begin with `earlier` repeats
    it in other words if there were deltas; otherwise the message is the next piece."""
    if whole.startswith(earlier):
        return whole[len(earlier) :]
    return "" if has_deltas else whole


def _move_function_call(said: dict[str, Any], request: Mapping[str, Any]) -> bool:
    """Move the legacy `function_call` of a message or delta to `tool_calls`, unless the request has the legacy field
    `functions`. Return whether `said` changed."""
    call = None if request.get("functions") else table(said.get("function_call"))
    if call is None or said.get("tool_calls"):
        return False
    said["tool_calls"] = [{"type": "function", "function": said.pop("function_call")}]
    return True


def _finish_reason(reason: str, request: Mapping[str, Any], *, has_calls: bool) -> str:
    """Return OpenAI's name of a finish reason. As at OpenAI, a call that the request forces may end with `stop`."""
    forces_call = not {"function", "custom"}.isdisjoint(object_of(request.get("tool_choice")))
    usual = _FINISH_REASONS.get(reason.lower(), reason)
    is_call = has_calls and (usual == "function_call" or (usual == "stop" and not forces_call))
    return "tool_calls" if is_call else usual


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as JSON text; some servers send an object."""
    function = object_of(call.get("function"))
    if isinstance(arguments := function.get("arguments"), str | None):
        return call
    return {**call, "function": {**function, "arguments": json_bytes(arguments).decode()}}


def _table(raw: bytes, url: str, read: Callable[[bytes], Any] = json_of) -> dict[str, Any]:
    try:
        return object_of(read(raw))
    except ValueError as error:
        raise invalid_answer(url, "the answer is not JSON") from error


def _is_text(choice: dict[str, Any]) -> bool:
    return isinstance(choice.get("text"), str) and isinstance(choice.get("finish_reason"), str | None)


def normalize(choice: dict[str, Any], request: Mapping[str, Any]) -> None:
    """Fill in the role, finish reason and call IDs of a whole choice, and write the arguments of tool calls as text.
    `request`: body of the chat request."""
    message, indices = object_of(choice.get("message")), CallIndices()
    _move_function_call(message, request)
    calls = tables(message.get("tool_calls"))
    for call in calls or ():
        call.update(_with_text(call), id=indices.unused(call.get("id")))
        call.pop("index", None)  # some clouds send the index 0 for every call
    message["role"] = message.get("role") or "assistant"
    if message.get("content") == []:
        message["content"] = None
    reason = choice.get("finish_reason") or ("tool_calls" if calls else "stop")
    choice["finish_reason"] = _finish_reason(reason, request, has_calls=bool(calls))


def _is_choice(choice: dict[str, Any], silent: Collection[str]) -> bool:
    """Return whether the choice has a message with content, even an empty string, or one of the finish reasons that may
    end an answer without content. Any other empty message must not replace a good local answer.
    """
    message = table(choice.get("message"))
    if message is None or not _is_content(message) or not isinstance(choice.get("finish_reason"), str | None):
        return False
    return tables(message.get("tool_calls") or []) is not None and (
        message.get("content") not in (None, [])
        or choice.get("finish_reason") in silent
        or any(value for name, value in message.items() if name not in ("role", "content"))
    )


def _is_content(message: dict[str, Any]) -> bool:
    """Return whether the message's content is a string, a list of parts, or missing."""
    content = message.get("content")
    return content is None or isinstance(content, str) or tables(content) is not None


class ThoughtForm:
    """Form of the reasoning in one cloud's messages, learned from its answers."""

    def __init__(self) -> None:
        self._field = _PLAIN  # field with the reasoning; "content" if content parts hold it, as at Mistral

    def read(self, said: dict[str, Any]) -> bool:
        """Move the reasoning of a message or delta to `reasoning_content`. Return whether `said` changed."""
        parts, details = tables(said.get("content")) or [], tables(said.get("reasoning_details"))
        given = next((name for name in (_PLAIN, *_FIELDS) if said.get(name)), None)
        self._field = given or ("reasoning" if details else self._field)
        thoughts = ""
        if is_split := {"text", "thinking"}.issuperset(str(part.get("type")) for part in parts) and bool(parts):
            thoughts = "".join(text_of(part.get("thinking")) for part in parts)
            self._field = "content" if thoughts else self._field
        if is_split and self._field == "content":
            said["content"] = text_of(parts)
        elif given == "thinking":
            thoughts = text_of(said.pop("thinking"))
        elif given is None and details:
            thoughts = "".join(text_of(each.get("text") or each.get("summary")) for each in details)
        if thoughts and not said.get(_PLAIN):
            said[_PLAIN] = thoughts
        return bool(thoughts or is_split)

    def written(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a chat request with the reasoning of earlier answers in the cloud's form."""
        if self._field == _PLAIN:
            return body
        messages = tables(body.get("messages"))
        return body if messages is None else {**body, "messages": [self._written(each) for each in messages]}

    def _written(self, message: dict[str, Any]) -> dict[str, Any]:
        thoughts, name = message.get(_PLAIN), self._field
        if not isinstance(thoughts, str) or not thoughts:
            return message
        made = {key: value for key, value in message.items() if key != _PLAIN}
        if name != "content":
            return {name: thoughts, **made}
        content: Any = made.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else tables(content) or []
        return {**made, "content": [{"type": "thinking", "thinking": [{"type": "text", "text": thoughts}]}, *parts]}


class Continuation:
    """Check of a stream that should continue `begun`. Pass its events to `take()` while the result is "unknown".

    "repeats": the stream repeats all of `begun`; the events omit the repetition. "differs": the stream restarts like
    `begun` and then deviates. "continues" is also the result for a `begun` that is short or repeats its own start
    ("0, 0, 0, 0, "), since a genuine continuation may then look like a restart.
    """

    def __init__(self, begun: str) -> None:
        self.events: deque[Event] = deque()
        self._begun = begun.lstrip()
        start = self._begun[:_ALIKE]
        self._is_distinctive = len(start) == _ALIKE and start not in self._begun[1:]
        self._received = ""

    def take(self, event: Event) -> ContinuationVerdict:
        choices = event[1]["choices"]
        self.events.append(event)
        text = "".join(text_of(object_of(choice.get("delta")).get("content")) for choice in choices)
        self._received = (self._received + text).lstrip()
        verdict = self._verdict(ended=any(choice.get("finish_reason") for choice in choices))
        if verdict == "repeats":
            self.events = deque([_with_first_text(event[1], self._received[len(self._begun) :])])
        return verdict

    def _verdict(self, *, ended: bool) -> ContinuationVerdict:
        received, begun = self._received, self._begun
        if not self._is_distinctive:
            return "continues"
        if received.startswith(begun):
            return "repeats"
        if begun.startswith(received) and not ended:
            return "unknown"
        return "differs" if received[:_ALIKE] == begun[:_ALIKE] else "continues"


def _with_first_text(event: dict[str, Any], text: str) -> Event:
    """Return `event` with `text` in its first choice and no text in the others."""
    choices = [
        {**choice, "delta": {**object_of(choice.get("delta")), "content": "" if at else text}}
        for at, choice in enumerate(tables(event["choices"]) or ())
    ]
    received = {**event, "choices": choices}
    return json_bytes(received), received
