"""Continuation of a stream on another node after the first node fails, transparent to the client.

An Updraft node reports its token ids, and another Updraft node continues exactly after them: sampling depends only on
the seed and the token position. Other servers get the text so far as a partial assistant message.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

import msgspec

from ....protocol.decoding import UNREADABLE
from ....protocol.hints import object_of
from ....protocol.http import sse
from ....protocol.responses import Usage
from ..upstream.failures import UpstreamFailure

_TEXT = re.compile(rb'"(?:content|text)":\s?"([^"\\]*+(?:\\.[^"\\]*+)*+)"')
_TOKENS = re.compile(rb',\s?"token_ids":\s?\[([0-9, ]*)\]')
_MORE_THAN_TEXT = re.compile(
    rb'"(?:tool_calls|function_call|reasoning|reasoning_content|refusal|audio)":\s?(?!null|""|\[\])'
)
_MAX_TEXT = 2**20  # maximum text to continue from, in bytes of JSON
_DEFAULT_COMPLETION = 16  # default max_tokens of text completions in OpenAI's API
#: Request fields that prevent another node from continuing the stream, unless a field has one of its neutral values.
_INEXACT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    # The continuation's prompt is longer, so that another part of the conversation would be cut off.
    "truncation": ("disabled", False),
    **dict.fromkeys(("truncate_prompt_tokens", "truncate", "transforms", "context_management"), (False, "NONE", [])),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    **dict.fromkeys(("structured_outputs", "grammar", "json_schema", "regex", "ebnf"), ()),
    **{f"guided_{name}": () for name in ("json", "regex", "choice", "grammar")},
}
_OF_PREDICTION = ("accepted_prediction_tokens", "rejected_prediction_tokens")
_CHAT, _COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"
#: Fields of a stream event that are not part of the answer.
_ABOUT = frozenset(
    ("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "obfuscation", "timings")
)


class PartialAnswer:
    """The part of a stream that the client has received, stored compactly."""

    def __init__(self, path: bytes, body: bytes) -> None:
        self._is_chat = path.partition(b"?")[0].endswith(_CHAT)
        self._is_known = self._is_chat or path.partition(b"?")[0].endswith(_COMPLETIONS)
        self._body = body
        self._shows_tokens = b'"return_token_ids"' in body  # whether the client may have asked for token ids
        self._head: dict[str, Any] | None = None  # first event, without its choices and usage
        self._text = bytearray()
        self._tokens = bytearray()  # token ids in JSON, each followed by a comma
        self._has_all_tokens = True  # whether `_tokens` covers all of `_text`
        self._is_text = True  # whether the answer is plain text within the size limit
        self._before: tuple[int, int, int] | None = None  # prompt, answer and cached tokens of earlier nodes
        self.is_finished = False

    @property
    def size(self) -> int:
        """Length of the text received, in bytes."""
        return len(self._text)

    @property
    def is_empty(self) -> bool:
        """Return whether no event of the answer has arrived, only comments."""
        return self._is_known and self._head is None

    @property
    def num_tokens_before(self) -> int:
        """Number of tokens that earlier nodes have generated."""
        return 0 if self._before is None else self._before[1]

    def read(self, event: bytes) -> bytes | None:
        """Record `event`, and return it as the client should see it; None if the client must not see it."""
        if self._before is not None:
            adopted = self._adapt(event, self._before)
            if adopted is None:
                return None
            event = adopted
        if not self._is_known or not event.startswith(b"data: {"):
            return event
        tokens = _TOKENS.search(event)
        self._head = _head_of(event) if self._head is None else self._head
        self._is_text = self._is_text and len(event) <= _MAX_TEXT
        if self._is_text:
            self._keep(event, b"" if tokens is None else tokens[1] + b",")
        if tokens is None or self._shows_tokens:
            return event
        return event[: tokens.start()] + event[tokens.end() :]

    def without_usage(self, event: bytes) -> bytes | None:
        """Return an event that has no choices without its usage; None if nothing in the rest is new to the client."""
        head, rest = self._head or {}, _head_of(event) or {}
        if not any(value and value != head.get(name) for name, value in rest.items() if name not in _ABOUT):
            return None
        fields = msgspec.json.decode(event[6:], type=dict[str, msgspec.Raw])  # other fields keep their bytes
        return sse.event({name: fields[name] for name in fields if name != "usage"})

    def _keep(self, event: bytes, tokens: bytes) -> None:
        self._tokens += tokens
        if (match := _TEXT.search(event)) is not None and match[1]:
            self._text += match[1]
            self._has_all_tokens = self._has_all_tokens and bool(tokens)
        self._is_text = _MORE_THAN_TEXT.search(event) is None and len(self._text) <= _MAX_TEXT

    def continued(self, counts: tuple[int, int, int], *, takes_tokens: bool, takes_text: bool) -> bytes | None:
        """Return the request with which another node continues the stream; None if the node cannot.

        `counts`: prompt, answer and cached tokens so far. `takes_tokens`: the node can continue from token ids.
        `takes_text`: the node supports `continue_final_message`.
        """
        if not self._is_known or not self._is_text:
            return None
        fields = msgspec.json.decode(self._body, type=dict[str, Any])
        if any(fields.get(name) not in (None, *neutral) for name, neutral in _INEXACT.items()):
            return None
        tokens = cast("list[int]", msgspec.json.decode(b"[%b]" % self._tokens.rstrip(b",")))
        exact = bool(takes_tokens and self._has_all_tokens and not fields.get("tools"))
        num_given = len(tokens) if exact else counts[1]
        if exact:
            fields["answer_token_ids"] = [*(fields.get("answer_token_ids") or []), *tokens]
        elif not self._with_text(fields, takes_text=takes_text):
            return None
        if not _reduce_limits(fields, num_given, None if self._is_chat else _DEFAULT_COMPLETION):
            return None
        self._before, self._has_all_tokens = (counts[0], num_given, counts[2]), exact
        return msgspec.json.encode(fields)

    def ending(self, usage: Usage | None) -> bytes:
        """Return the last events of a stream that broke off after its finish reason. `usage`: None to send no usage."""
        if usage is None:
            return sse.DONE
        return sse.event({**(self._head or {}), "choices": [], "usage": usage}) + sse.DONE

    def finish(self, answers: int, reason: str, *notes: str) -> bytes:
        """Return the event that ends a stream of `answers` answers with the finish reason `reason`."""
        piece: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        choices = [{"index": index, **piece, "finish_reason": reason} for index in range(answers)]
        return sse.event({**(self._head or {}), "choices": choices, **({"updraft": {"notes": notes}} if notes else {})})

    def _with_text(self, fields: dict[str, Any], *, takes_text: bool) -> bool:
        """Append the answer's text so far to the prompt. Return False if that is impossible."""
        try:
            text = msgspec.json.decode(b'"%b"' % self._text, type=str)
        except UNREADABLE:
            return False
        if fields.get("answer_token_ids"):
            return False
        if not self._is_chat:
            prompt = fields.get("prompt")
            if isinstance(prompt, str):
                fields["prompt"] = prompt + text
            return isinstance(prompt, str)
        if not text:
            return True
        messages = cast("list[dict[str, Any]]", fields["messages"])
        if fields.get("continue_final_message") is True:
            last = messages[-1]
            if not isinstance(last.get("content"), str):
                return False
            messages[-1] = {**last, "content": last["content"] + text}
        else:
            messages.append({"role": "assistant", "content": text})
        fields.update(continue_final_message=True, add_generation_prompt=False)
        return takes_text

    def _adapt(self, event: bytes, before: tuple[int, int, int]) -> bytes | None:
        """Fit a continuing node's event into the first node's stream; None drops it. Raises UpstreamFailure."""
        if not event.startswith(b"data: {") or event.startswith(b'data: {"error"'):
            return event
        try:
            chunk: dict[str, Any] = json.loads(event[6:])  # unlike msgspec, accepts lone surrogates
        except (ValueError, RecursionError) as error:
            raise UpstreamFailure("a stream event is not valid JSON") from error
        head = self._head or {}
        chunk.update({name: head[name] for name in ("id", "created", "model", "system_fingerprint") if name in head})
        choices = cast("list[dict[str, Any]]", chunk.get("choices") or [])
        for choice in choices:
            if self._head is not None and isinstance(delta := choice.get("delta"), dict):
                delta.pop("role", None)
        if choices and not any(map(_has_content, choices)):
            return None
        if isinstance(usage := chunk.get("usage"), dict):
            _count_once(cast("dict[str, Any]", usage), *before)
        return sse.event(chunk)


def _count_once(usage: dict[str, Any], prompt: int, before: int, cached: int) -> None:
    """Count text from earlier nodes as part of the answer. The continuing node has counted it as prompt.

    `cached`: prompt tokens that the first node read from its cache.
    """
    answer = usage.get("completion_tokens") or 0
    prompt = prompt or max(0, (usage.get("prompt_tokens") or 0) - before)
    if (details := object_of(usage.get("prompt_tokens_details"))) or cached:
        usage["prompt_tokens_details"] = {**details, "cached_tokens": min(prompt, cached)}
    for name in _OF_PREDICTION:  # no node compares the whole answer with the prediction
        object_of(usage.get("completion_tokens_details")).pop(name, None)
    usage.update(prompt_tokens=prompt, completion_tokens=before + answer, total_tokens=prompt + before + answer)


def _head_of(event: bytes) -> dict[str, Any] | None:
    """Return the event without its choices and usage; None if its JSON is invalid."""
    try:
        fields = msgspec.json.decode(event[6:], type=dict[str, msgspec.Raw])
        return {name: msgspec.json.decode(fields[name]) for name in fields if name not in ("choices", "usage")}
    except UNREADABLE:
        return None


def _has_content(choice: dict[str, Any]) -> bool:
    delta = cast("dict[str, Any]", choice.get("delta") or {})
    return bool(choice.get("finish_reason") or choice.get("text") or any(delta.values()))


def _reduce_limits(fields: dict[str, Any], spent: int, default: int | None) -> bool:
    """Subtract the `spent` tokens from the request's token limits. Return False if no tokens are left."""
    limits = [name for name in ("max_tokens", "max_completion_tokens") if fields.get(name) is not None]
    if not limits and default is not None:
        fields["max_tokens"], limits = default, ["max_tokens"]
    fields.update({name: fields[name] - spent for name in limits})
    if fields.get("min_tokens"):
        fields["min_tokens"] = max(0, fields["min_tokens"] - spent)
    return all(fields[name] > 0 for name in limits)
