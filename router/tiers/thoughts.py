"""Reasoning in the messages of clouds: always `reasoning_content` for callers, and the cloud's own form in requests."""

from __future__ import annotations

from typing import Any

from ...protocol.dialects.chat_chunks import text_of
from ..request.json_narrowing import tables

_PLAIN = "reasoning_content"
#: Other names of the reasoning: Ollama's `thinking`, and `reasoning` of vLLM and OpenRouter, which callers also get.
_FIELDS = ("thinking", "reasoning")


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
