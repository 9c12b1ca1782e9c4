"""The origin of an answer, and its reader's opinion of it: typed, over the openai clients."""

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
    """The `updraft` object of a completion, of an embedding, or of the last chunk of a stream: tier, reason, cost.

    None where the reply has none: it is another chunk, or came from elsewhere.
    """
    extra: dict[str, Any] | None = getattr(reply, "model_extra", None)
    found = (extra or {}).get("updraft")
    return None if found is None else msgspec.convert(found, UpdraftInfo)


class Requests:
    """`client.updraft`: the router's own record of a request, by the answer's `routing(reply).request_id`."""

    def __init__(self, client: openai.OpenAI) -> None:
        self._client = client

    def why(self, request_id: str) -> Explanation:
        """Every decision behind an answer. Raises openai.NotFoundError for a request that is not in the ledger."""
        return msgspec.convert(self._client.get(_path(request_id), cast_to=object), Explanation)

    def feedback(self, request_id: str, thumb: Thumb) -> FeedbackNote:
        """Keep whether an answer was good; the last thumb counts. Raises as `why` does."""
        path = f"{_path(request_id)}/feedback"
        return msgspec.convert(self._client.post(path, cast_to=object, body={"thumb": thumb}), FeedbackNote)


class AsyncRequests:
    """The same of `AsyncOpenAI`."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client

    async def why(self, request_id: str) -> Explanation:
        """As `Requests.why`."""
        return msgspec.convert(await self._client.get(_path(request_id), cast_to=object), Explanation)

    async def feedback(self, request_id: str, thumb: Thumb) -> FeedbackNote:
        """As `Requests.feedback`."""
        path = f"{_path(request_id)}/feedback"
        return msgspec.convert(await self._client.post(path, cast_to=object, body={"thumb": thumb}), FeedbackNote)


def _path(request_id: str) -> str:
    return f"{_REQUESTS}/{quote(request_id, safe='')}"
