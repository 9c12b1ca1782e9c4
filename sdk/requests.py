"""Explanations of answers, and feedback on them: typed methods for openai's clients."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import quote

import msgspec
import openai

from ..protocol.responses import UpdraftInfo
from ..router.accounting.explanation import Explanation, FeedbackNote
from .caller_keys import BASE_URL

_REQUESTS = f"{BASE_URL.removesuffix('/v1')}/updraft/requests"

Thumb = Literal["up", "down"]


def routing(reply: Any) -> UpdraftInfo | None:
    """Return the `updraft` object of a completion, an embedding, or the last chunk of a stream: tier, reason, cost.

    Returns None for other chunks, and for replies of other servers.
    """
    extra: dict[str, Any] | None = getattr(reply, "model_extra", None)
    info = (extra or {}).get("updraft")
    return None if info is None else msgspec.convert(info, UpdraftInfo)


class Requests:
    """`client.updraft`: explains answers and records feedback. An answer's id is `routing(reply).request_id`."""

    def __init__(self, client: openai.OpenAI) -> None:
        self._client = client

    def why(self, request_id: str) -> Explanation:
        """Return every decision behind an answer. Raises openai.NotFoundError if the ledger lacks the request."""
        return msgspec.convert(self._client.get(_path(request_id), cast_to=object), Explanation)

    def feedback(self, request_id: str, thumb: Thumb) -> FeedbackNote:
        """Record whether an answer was good ("up" or "down"), replacing earlier feedback. Raises like `why`."""
        path = f"{_path(request_id)}/feedback"
        return msgspec.convert(self._client.post(path, cast_to=object, body={"thumb": thumb}), FeedbackNote)


class AsyncRequests:
    """`Requests` for `AsyncOpenAI`."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client

    async def why(self, request_id: str) -> Explanation:
        """See `Requests.why`."""
        return msgspec.convert(await self._client.get(_path(request_id), cast_to=object), Explanation)

    async def feedback(self, request_id: str, thumb: Thumb) -> FeedbackNote:
        """See `Requests.feedback`."""
        path = f"{_path(request_id)}/feedback"
        return msgspec.convert(await self._client.post(path, cast_to=object, body={"thumb": thumb}), FeedbackNote)


def _path(request_id: str) -> str:
    return f"{_REQUESTS}/{quote(request_id, safe='')}"
