"""One relayed request: the fields needed for routing and metering, and the connection to the client."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.types import Send

from ....accounting.surcharges import PRICED, surcharge_of
from ....accounting.token_estimate import ATTACHED_TOKENS, STEP_TOKENS, AnswerSize
from ....protocol.decoding import (
    UNREADABLE,
    check_entries,
    prepare_types,
    read_switches,
    refusal,
    unreadable,
    unsupported,
)
from ....protocol.dialects.multipart import read_upload
from ....protocol.errors import WrongTypeError
from ....protocol.http.body_memory import SMALL_BYTES
from ....protocol.http.forwarding import forwarded
from ....protocol.safety.names import MAX_NAME, check_models
from ....protocol.telemetry.tracing import Span
from ..balancing.node import Node
from ..balancing.request_queue import QueuePlace
from ..ledger.metering import RESPONSE_CACHE, UsageRow
from ..limits.accounting import Account
from ..limits.request_size import RequestSize, SizeFields, size_of
from ..upstream.client import JSON, Response
from .answer_checks import CHAT, COMPLETIONS, RESPONSES
from .budget_cap import BudgetCap
from .continuation import PartialAnswer
from .field_names import OFFICIAL, checked_names
from .passthrough import COUNTS, PATHS, UPLOADS, PassthroughUsage
from .usage import UsageOptions

_RELAYED_HEADERS = frozenset(
    {b"content-type", b"retry-after", b"x-should-retry", b"cache-control", b"x-accel-buffering"}
)
# Headers that choose the account or replay an answer at a provider, where all callers share the operator's key.
_OF_THE_OPERATOR = frozenset(("openai-organization", "openai-project", "idempotency-key"))
MAX_COPIED = 4 * 2**20
Header = tuple[bytes, bytes]


class _RequestFields(SizeFields, kw_only=True):
    """The request fields that the gateway reads. All others are passed to the node unread."""

    model: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    stream: bool | None = False
    stream_options: UsageOptions | None = None
    prompt_cache_key: str | None = None
    # At a node with --scheduling-policy priority, lower values run first: a caller can only lower its own rank.
    priority: Annotated[int, msgspec.Meta(ge=0)] | None = None
    background: bool | None = None
    service_tier: Any = None
    speed: Any = None
    inference_geo: Any = None
    provider: Any = None


prepare_types(_RequestFields)
_KNOWN = OFFICIAL.union(_RequestFields.__struct_fields__)
_STREAMED = frozenset((CHAT, COMPLETIONS, *PATHS))
_SWITCHES = ("stream", "stream_options", "background", "logprobs")


@dataclass(slots=True)
class Call:
    """The state of one relayed request."""

    # The request id, as in `x-request-id`.
    id: str
    # Path at the node, including the query.
    path: bytes
    # Client headers that are forwarded to the node.
    forwarded: list[tuple[bytes, bytes]]
    body: bytes
    model: str
    # Whether the client asked for a stream.
    stream: bool
    # Usage reports that the client asked for in a stream.
    usage_options: UsageOptions
    row: UsageRow
    # Time of arrival, by `time.perf_counter()`.
    started: float
    send: Send
    # Priority and tenant in the queue; the tenant also decides which cached prefixes the request may share.
    place: QueuePlace = field(default_factory=QueuePlace)
    # Upper bounds on the tokens of prompt and answer, for the limits.
    size: RequestSize = field(default_factory=RequestSize)
    # Account that the request's cost is booked to.
    account: Account | None = None
    # Reserves bytes of memory for an answer (or a stream's buffers) until the client has read the answer.
    hold: Callable[[int], None] = lambda _: None
    # Bytes that a stream may buffer without another reservation.
    reserved: int = 4 * SMALL_BYTES
    # `x-ratelimit-*` headers for the client.
    limit_headers: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    # Cap that the budget has written into `body`, or that replaces it in the attempt whose answer is relayed.
    cap: BudgetCap | None = None
    # Whether any bytes of the answer were sent.
    answered: bool = False
    # Nodes that were tried; the current node is last.
    tried: list[Node] = field(default_factory=list[Node])
    # Name of the conversation, from the client's `prompt_cache_key`.
    session: str = ""
    span: Span = field(default_factory=Span)
    # Headers of the node's answer that are relayed.
    answer_headers: list[Header] = field(default_factory=list[Header])
    # Copy of the bytes sent to the client, if the answer may be cached; else None.
    copied: bytearray | None = None
    # Called before the answer is sent. The argument is the body of a whole answer, or None for a stream.
    starts: Callable[[bytes | None], None] = lambda _: None
    content_type: bytes = JSON
    # Usage reader for APIs that are relayed unchanged; None for chat and text completions.
    passthrough: PassthroughUsage | None = None
    # The part of a stream that the client has received.
    begun: PartialAnswer = field(init=False)

    def __post_init__(self) -> None:
        self.begun = PartialAnswer(self.path, self.body)

    @property
    def attempt(self) -> bytes:
        """Id of this request at the node, for querying how many tokens the request has used."""
        return b"try-" + self.row.id.encode()

    def limit(self, tokens: int) -> None:
        """Cap each answer at `tokens` tokens. A header tells the client about the cap."""
        self.cap = BudgetCap.of(self.path, self.body, tokens)
        if self.cap is not None:
            self.body = self.cap.body
            self.begun = PartialAnswer(self.path, self.body)

    def hold_stream(self, buffered: int) -> None:
        """Reserve memory for a stream: twice its largest event, and the kept text. Raises the errors of `hold`."""
        size = 2 * buffered + self.begun.size + len(self.copied or b"")
        if size > self.reserved:
            self.hold(size - self.reserved)
            self.reserved = size

    def sent(self) -> None:
        """Record that a node has received the request, and may have processed the prompt."""
        if self.account is not None:
            self.account.is_sent = True

    def book(self) -> None:
        """Record the cost in the ledger row. Call before the client gets the end of the answer."""
        if self.account is not None:
            self.account.book()

    async def start(self, response: Response, whole: bytes | None) -> None:
        """Send the status and headers of a node's answer. `whole`: the answer's body, or None for a stream."""
        self.answer_headers = [(name, value) for name, value in response.headers if name in _RELAYED_HEADERS]
        if whole is not None:
            self.answer_headers.append((b"content-length", b"%d" % len(whole)))
        self.starts(whole)
        await self._start(response.status, self.answer_headers)

    async def repeat(self, headers: list[Header], body: bytes) -> None:
        """Send a cached answer at once. It costs no tokens."""
        self.row.status, self.row.node, self.answer_headers = 200, RESPONSE_CACHE, headers
        await self._start(200, [*headers, (b"x-updraft-cache", b"hit")])
        await self.emit(body, more=False)

    async def _start(self, status: int, headers: list[Header]) -> None:
        self.row.ttft_ms = (time.perf_counter() - self.started) * 1e3
        self.answered = True
        own = [*self.limit_headers, *([] if self.cap is None else self.cap.headers)]
        await self.send({"type": "http.response.start", "status": status, "headers": [*headers, *own]})

    async def emit(self, data: bytes, *, more: bool) -> None:
        self.row.bytes += len(data)
        if self.copied is not None:
            self.copied += data
            if len(self.copied) > MAX_COPIED:
                self.copied = None
        if not more:
            self.book()
        await self.send({"type": "http.response.body", "body": data, "more_body": more})


def read_call(request: Request, body: bytes, row: UsageRow, started: float, send: Send) -> Call:
    """Parse a request. Raises InvalidRequestError if the body is malformed or a field is out of bounds."""
    route, content_type = request.scope["path"], JSON
    along = forwarded(request.headers, request.scope["query_string"].decode())
    if route in UPLOADS:
        upload = read_upload(request.headers.get("content-type", ""), body)
        check_models(upload.names)
        content_type = upload.content_type.encode()
        peek = _RequestFields(model=upload.model, stream=upload.stream)
        size = RequestSize(ATTACHED_TOKENS, AnswerSize(STEP_TOKENS))
    else:
        received = body
        try:
            peek = _peek(body)
        except WrongTypeError:
            peek = _peek(body := _with_booleans(body))
        if route == RESPONSES and peek.background:  # the answer's cost would be known only after this request has ended
            raise unsupported("background")
        size = size_of(body, peek, route.removeprefix("/v1/"), checked_names(received, _KNOWN))
        surcharge = surcharge_of({name: getattr(peek, name) for name in PRICED}, along.headers)
        size = RequestSize() if route in COUNTS else replace(size, surcharge=surcharge)
    row.model = peek.model
    usage_options = peek.stream_options or UsageOptions()
    path, own = along.target(route).encode(), along.headers.keys() - _OF_THE_OPERATOR
    headers = [(name.encode(), value.encode("latin-1")) for name, value in along.headers.items() if name in own]
    is_stream = bool(peek.stream) and route in _STREAMED  # no other route streams
    about = row.request_id, path, headers, body, peek.model, is_stream, usage_options, row, started, send
    usage = PassthroughUsage(route, row, size.prompt_tokens) if route in PATHS else None
    return Call(*about, session=peek.prompt_cache_key or "", size=size, content_type=content_type, passthrough=usage)


def _peek(body: bytes) -> _RequestFields:
    check_entries(body)
    try:
        _ = body.isascii() or body.decode()  # msgspec does not validate UTF-8 in fields that it skips
        return msgspec.json.decode(body, type=_RequestFields)
    except msgspec.ValidationError as error:
        raise refusal(str(error)) from error
    except UNREADABLE as error:
        raise unreadable(body, error) from error


def _with_booleans(body: bytes) -> bytes:
    """Replace texts such as "false" by booleans, because a node may read any text as true."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])  # other fields stay unchanged
        switches = {name: msgspec.json.decode(fields[name]) for name in _SWITCHES if name in fields}
    except UNREADABLE:
        return body
    read_switches(switches, _RequestFields)
    return msgspec.json.encode({**fields, **switches})
