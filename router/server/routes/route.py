"""Endpoint definition: method, path, handler, and a summary for generated documents."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....protocol.http.lenient_json import json_of
from ....protocol.http.wire import WireRequest, WireResponse
from ...request.chat_request import caller_of
from ...router import Router
from ...storage.answer_store import Kind, StoredAnswer
from ..answers import AnswerService
from ..batches.service import BatchService

Handler = Callable[["RequestContext"], Awaitable[WireResponse]]


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A request, with everything its handler may use."""

    router: Router
    answers: AnswerService
    batches: BatchService
    request: WireRequest
    # Values of the path's placeholders: `{model}` is `parameters["model"]`.
    parameters: Mapping[str, str]
    # All routes of the server, to describe them in `/openapi.json`.
    routes: Sequence[Route] = ()

    @property
    def owner(self) -> str:
        """Digest of the caller's key, which identifies the owner of files, batches and answers."""
        return caller_of(self.request.headers).key

    async def stored(self, kind: Kind, answer_id: str) -> StoredAnswer:
        """Return a stored answer of the caller. Raises NotFoundError."""
        return await self.answers.use(lambda store: store.get(self.owner, kind, answer_id))


@dataclass(frozen=True, slots=True)
class Route:
    """HTTP method of a path, with the handler of its requests."""

    method: str
    # Path template: `{name}` matches one segment, `{name:path}` one or more.
    path: str
    # Function that answers requests. Raises UpdraftError to refuse a request.
    handler: Handler
    # One line for the generated reference.
    summary: str
    # Structs of the request body and of the answer, if any.
    request_type: type | None = None
    response_type: type | None = None
    # Whether the answer may be streamed, as server-sent events or (in Ollama's API) as lines.
    streams: bool = False
    # Names of the query parameters.
    query: tuple[str, ...] = ()
    # Whether the body is a form with a file.
    form: bool = False

    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_pattern", _pattern(self.path))

    def match(self, path: str) -> Mapping[str, str] | None:
        """Return the values of the placeholders if `path` matches, else None."""
        match = self._pattern.fullmatch(path)
        return None if match is None else match.groupdict()


def translated(made: WireResponse, translate: Callable[[dict[str, Any]], object]) -> WireResponse:
    """Return a JSON answer in the form that `translate` gives it. Errors and streams stay unchanged.

    Call this in the router's `chat` or `direct` if `translate` may fail, so that the request's row has the failure.
    """
    if made.status != 200 or not isinstance(made.body, bytes):
        return made
    return WireResponse.json(translate(json_of(made.body, exact=True)), headers=made.headers)


def _pattern(template: str) -> re.Pattern[str]:
    segments = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(template))
    return re.compile(re.sub(r"\\{(\w+):path\\}", r"(?P<\1>.+)", segments), re.DOTALL)
