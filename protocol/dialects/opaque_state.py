"""Signatures that clouds add to reasoning and tool calls. APIs without a field for them carry them in texts and IDs."""

from __future__ import annotations

import base64
from typing import Any, cast

from ..http.lenient_json import json_bytes, json_of, object_of, objects_of

#: Fields of chat messages that only the cloud that wrote them can read: Anthropic's, OpenRouter's and Google's.
OPAQUE = ("thinking_blocks", "reasoning_details", "extra_content")
_SEALED = "updraft-state-1."
_IN_ID = "__updraft_"


def seal(message: dict[str, Any]) -> str:
    """Encode the `OPAQUE` fields of a message as one text, or as "" if the message has none of these fields."""
    state = {name: message[name] for name in OPAQUE if message.get(name)}
    return _SEALED + base64.urlsafe_b64encode(json_bytes(state)).decode() if state else ""


def blocks_of(sealed: Any) -> list[dict[str, Any]]:
    """Return a thinking block that carries the result of `seal`, for `restored` to read; none for another value."""
    is_sealed = isinstance(sealed, str) and sealed.startswith(_SEALED)
    return [{"type": "redacted_thinking", "data": sealed}] if is_sealed else []


def id_of(call: dict[str, Any], otherwise: str) -> str:
    """Return the ID of a tool call, with its signature if it has one."""
    extra = object_of(call.get("extra_content"))
    written = base64.urlsafe_b64encode(json_bytes(extra)).decode().rstrip("=")
    return f"{call.get('id') or otherwise}{_IN_ID + written if extra else ''}"


def restored(message: dict[str, Any]) -> dict[str, Any]:
    """Return a chat message, and the pieces in its `deltas`, with the fields that thinking blocks and IDs carry."""
    made, blocks = dict(message), list[dict[str, Any]]()
    given = objects_of(message.get("thinking_blocks"))
    for block in given:
        if not blocks_of(block.get("data")):
            blocks.append(block)
            continue
        state = _decoded(block["data"][len(_SEALED) :])
        blocks += objects_of(state.get("thinking_blocks"))
        details = [*objects_of(made.get("reasoning_details")), *objects_of(state.get("reasoning_details"))]
        made |= {"reasoning_details": details, "extra_content": state.get("extra_content") or made.get("extra_content")}
    if given:
        made["thinking_blocks"] = blocks
    if deltas := objects_of(message.get("deltas")):
        made["deltas"] = [restored(delta) for delta in deltas]
    if isinstance(calls := message.get("tool_calls"), list):
        made["tool_calls"] = [_call(call) for call in cast("list[Any]", calls)]
    if isinstance(answered := message.get("tool_call_id"), str):
        made["tool_call_id"] = answered.partition(_IN_ID)[0]
    return {name: value for name, value in made.items() if value or name not in OPAQUE}


def add_details(details: list[dict[str, Any]], pieces: list[dict[str, Any]]) -> None:
    """Add streamed pieces of OpenRouter's `reasoning_details`. Pieces of one text are joined."""
    for piece in pieces:
        last = details[-1] if details else {"type": None}
        if "data" in piece or any(last.get(name) != piece.get(name) for name in ("type", "index")):
            details.append(piece)
            continue
        texts = {name: f"{last.get(name) or ''}{piece[name]}" for name in ("text", "summary") if piece.get(name)}
        details[-1] = last | {name: value for name, value in piece.items() if value is not None} | texts


def _call(call: Any) -> Any:
    identifier, _, state = str(object_of(call).get("id")).partition(_IN_ID)
    return {**call, "id": identifier, "extra_content": _decoded(state)} if state else call


def _decoded(text: str) -> dict[str, Any]:
    """Decode fields from Base64 of JSON. Return no fields for invalid text, which the caller has changed."""
    try:
        return object_of(json_of(base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)))
    except ValueError:
        return {}
