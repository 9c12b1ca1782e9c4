"""An endpoint: a method and a path, a handler, and a description for documents made from the table."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ....protocol.http.wire import WireRequest, WireResponse
from ...request.caller import caller_of
from ...router import Router
from ..answers import AnswerService
from ..batches.service import BatchService

Handler = Callable[["RequestContext"], Awaitable[WireResponse]]


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request, with everything its handler may use."""

    router: Router
    answers: AnswerService
    batches: BatchService
    request: WireRequest
    # What the path's placeholders stand for: `{model}` is `parameters["model"]`.
    parameters: Mapping[str, str]
    # The whole table.
    routes: Sequence[Route] = ()

    @property
    def owner(self) -> str:
        """Digest of the caller's key: whose files, batches and answers are meant."""
        return caller_of(self.request.headers).key


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path."""

    method: str
    # `{name}` stands for one segment, `{name:path}` for one or more.
    path: str
    # Raises UpdraftError for what it refuses.
    handler: Handler
    # One line for the reference.
    summary: str
    # Structs of the body and of the answer, where there are some.
    request_type: type | None = None
    response_type: type | None = None
    # True where the answer may be a stream: of server-sent events, or in Ollama's API of lines.
    streams: bool = False
    # Names of the query parameters.
    query: tuple[str, ...] = ()
    # True where the body is a form with a file.
    form: bool = False

    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_pattern", _pattern(self.path))

    def match(self, path: str) -> Mapping[str, str] | None:
        """The placeholders' values, where `path` is one of this route."""
        found = self._pattern.fullmatch(path)
        return None if found is None else found.groupdict()


def _pattern(template: str) -> re.Pattern[str]:
    parts = [
        _placeholder(part) if part.startswith("{") else re.escape(part)
        for part in re.split(r"(\{\w+(?::path)?\})", template)
    ]
    return re.compile("".join(parts), re.DOTALL)


def _placeholder(part: str) -> str:
    name, _, kind = part.strip("{}").partition(":")
    return f"(?P<{name}>{'.+' if kind else '[^/]+'})"
