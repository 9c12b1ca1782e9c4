"""Tiers of recent conversations: within a conversation, the tier changes only towards the cloud.

A cloud that answered once has the conversation's prefix in its cache, and a user sees no better answers followed by
worse ones. Apps send the whole conversation each time, so the messages before the last answer identify it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from ..protocol.http.lenient_json import tables
from ..protocol.safety.bounded_cache import BoundedCache
from .request.chat_request import Caller

_REMEMBERED = 10_000
Tier = Literal["local", "cloud"]


class ConversationDigests:
    """Digests of a request's messages: of all, and of those before the last answer."""

    def __init__(self, body: Mapping[str, Any], caller: Caller) -> None:
        messages = tables(body.get("messages")) or []
        answers = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
        digest = hashlib.blake2b(caller.key.encode(), digest_size=16)
        self.before: bytes | None = None
        for at, message in enumerate(messages):
            if answers and at == answers[-1]:
                self.before = digest.digest()
            digest.update(msgspec.json.encode(_without_hints(message)))
        self.now = digest.digest()


class ConversationTiers:
    """The tiers that answered recent requests, by the digests of their messages. No text is kept."""

    def __init__(self) -> None:
        self._tiers: BoundedCache[bytes, Tier] = BoundedCache(_REMEMBERED)

    def earlier(self, conversation: ConversationDigests) -> Tier | None:
        """Return the tier of the conversation's last answer; None if it is unknown."""
        return None if conversation.before is None else self._tiers.get(conversation.before)

    def answered(self, conversation: ConversationDigests, tier: Tier) -> None:
        """Note the tier of the newest answer to these messages."""
        self._tiers.put(conversation.now, tier)


def _without_hints(value: Any) -> Any:
    """Return a message without `cache_control`, which agents move from message to message."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value).items()
        return {name: _without_hints(inner) for name, inner in fields if name != "cache_control"}
    return [_without_hints(inner) for inner in cast("list[Any]", value)] if isinstance(value, list) else value
