"""Endpoint definition (method, path, handler, summary for generated documents), and pagination as in OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from ....protocol.decoding import prepare_types
from ....protocol.errors import InvalidRequestError, NotFoundError, UpdraftError
from ....protocol.http.lenient_json import json_of
from ....protocol.http.wire import WireRequest, WireResponse
from ...request.chat_request import caller_of
from ...responses.direct import DirectCall, DirectReply
from ...router import Router
from ...storage.answer_store import Kind, Page, StoredAnswer
from ..answers import AnswerService
from ..batches.service import BatchService

Handler = Callable[["RequestContext"], Awaitable[WireResponse]]
_MAX_LIMIT = 100
_SWITCHES = {"": True, "true": True, "1": True, "false": False, "0": False}
PAGE_PARAMETERS = ("limit", "after", "order")


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

    # Method and path template, such as `GET /v1/files/{file}`: `{name}` matches one segment, `{name:path}` one or more.
    target: str
    # Function that answers requests. Raises UpdraftError to refuse a request.
    handler: Handler
    # One line for the generated reference.
    summary: str
    # Structs of the request body, whose type is prepared at import (see `prepare_types`), and of the answer, if any.
    request_type: type | None = None
    response_type: type | None = None
    # Whether the answer may be streamed, as server-sent events or (in Ollama's API) as lines.
    streams: bool = False
    # Names of the query parameters.
    query: tuple[str, ...] = ()
    # Whether the body is a form with a file.
    form: bool = False

    method: str = field(init=False)
    path: str = field(init=False)
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        method, _, path = self.target.partition(" ")
        for name, value in (("method", method), ("path", path), ("_pattern", _pattern(path))):
            object.__setattr__(self, name, value)
        if self.request_type is not None:
            prepare_types(self.request_type)

    def match(self, path: str) -> Mapping[str, str] | None:
        """Return the values of the placeholders if `path` matches, else None."""
        match = self._pattern.fullmatch(path)
        return None if match is None else match.groupdict()


def recorded(handler: Handler) -> Handler:
    """Return `handler` with a ledger row for each request that it refuses before the router reads the request."""

    async def answer(context: RequestContext) -> WireResponse:
        try:
            return await handler(context)
        except UpdraftError as error:
            refusal = error

        def refuse(_: WireRequest) -> tuple[dict[str, Any], str]:
            raise refusal

        async def unreached(_: DirectCall) -> DirectReply:
            raise refusal

        return await context.router.direct(context.request, unreached, read=refuse)

    return answer


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


def query_of(raw: str, known: Collection[str]) -> dict[str, str]:
    """Return the query parameters, with the last value of each name. Raises InvalidRequestError for an unknown name."""
    given = dict(parse_qsl(raw, keep_blank_values=True))
    for name in given:
        if name.partition("[")[0] not in known:
            raise InvalidRequestError(f"Unknown query parameter {name[:100]!r}. Known: {', '.join(known)}.", param=name)
    return given


def switch_of(query: dict[str, str], name: str) -> bool:
    """Return whether a switch is on; a name without a value switches it on. Raises InvalidRequestError."""
    if (on := _SWITCHES.get(query.get(name, "false").lower())) is None:
        raise InvalidRequestError(f"{name} must be true or false, got {query[name][:40]!r}.", param=name)
    return on


def page_of(query: dict[str, str], *, newest_first: bool, most: int = _MAX_LIMIT, usual: int = 20) -> Page:
    """Return the requested page. `newest_first` and `usual`: default order and limit. Raises InvalidRequestError."""
    limit, order = query.get("limit", str(usual)), query.get("order", "desc" if newest_first else "asc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 6 and 1 <= int(limit) <= most):
        raise InvalidRequestError(f"limit must be 1 to {most}, got {limit[:40]!r}.", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order must be asc or desc, got {order[:40]!r}.", param="order")
    return Page(int(limit), query.get("after"), order == "desc")


def page_in(entries: Sequence[dict[str, Any]], page: Page) -> WireResponse:
    """Return a page of `entries` (oldest first). Raises NotFoundError if `after` is unknown."""
    ordered = list(reversed(entries)) if page.newest_first else list(entries)
    begin = 0
    if page.after is not None:
        ids = [entry["id"] for entry in ordered]
        if page.after not in ids:
            raise NotFoundError(f"after: {page.after[:100]!r} is not in this list.", param="after")
        begin = ids.index(page.after) + 1
    return list_of(ordered[begin : begin + page.limit], has_more=len(ordered) > begin + page.limit)


def list_of(entries: Sequence[dict[str, Any]], *, has_more: bool) -> WireResponse:
    first, last = (entries[0]["id"], entries[-1]["id"]) if entries else (None, None)
    return WireResponse.json(
        {"object": "list", "data": entries, "first_id": first, "last_id": last, "has_more": has_more}
    )
