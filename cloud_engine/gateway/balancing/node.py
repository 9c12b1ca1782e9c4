"""One node: where it is, what it serves, how it is, and what it is busy with."""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from ....accounting.breaker import Breaker, BreakerRules
from ....accounting.prices import Price
from ....protocol.errors import ConfigurationError
from ....protocol.safety.redaction import SHORTEST_KEY, is_sendable, shown_url
from ..upstream.client import UpstreamAddress
from ..upstream.connection import Patience

_TELL_USAGE = frozenset({"updraft", "vllm", "sglang"})  # owners of models: others may refuse `continuous_usage_stats`
#: A node is tried again after good probes in a row. An error counts only where another node answered the request.
_BREAKER = BreakerRules(failures_to_open=5, recovery=2, max_recovery=64, by_probes=True)
_log = logging.getLogger("updraft.gateway")


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """A node as an operator names it."""

    # Of an OpenAI-compatible server, which may hold a user and a password.
    url: str = field(repr=False)
    # Sent to this node instead of the key of all nodes.
    api_key: str | None = field(default=None, repr=False)
    # Requests that it gets at a time; None for as many as come.
    concurrency: int | None = None
    # Its own seconds until the first bytes of a stream, and between two pieces of it; None for those of all.
    first_token_s: float | None = None
    idle_s: float | None = None
    # Whether it may get the key of all nodes: an operator named it, or it has proved that it knows that key.
    gets_shared_key: bool = True
    # Whether it came by a heartbeat: its name may lead to fewer addresses.
    is_registered: bool = False
    # Price of this node's tokens. None: the model's price.
    price: Price | None = None

    def of_worker(self, workers: int, worker: int) -> NodeAddress:
        """Workers do not know of one another's requests: each has its part of a limit, and at least 1."""
        if self.concurrency is None:
            return self
        return replace(self, concurrency=max(1, part_of_worker(self.concurrency, workers, worker)))


def part_of_worker(whole: int, workers: int, worker: int) -> int:
    """The parts of all workers make up the whole."""
    return whole // workers + (worker < whole % workers)


class Model(msgspec.Struct):
    """As a node lists it. Other fields than the name may be of any kind."""

    id: str
    owned_by: Any = None
    created: Any = None
    max_model_len: Any = None


class Node:
    """`in_flight` counts this gateway's requests on it. `has_listed`: whether it has ever said what it serves.

    `tells_tokens`: whether it reports the tokens of a stream, and goes on behind those of another node. `tells_usage`:
    whether it can be asked to put the usage so far on every chunk of a stream.
    """

    def __init__(self, address: NodeAddress) -> None:
        """Raises ConfigurationError."""
        url = address.url.rstrip("/").removesuffix("/v1")
        self.target = _target(url, address)
        self.url = shown_url(url)
        self.concurrency = address.concurrency
        self.price = address.price
        self._address = address
        self.models: tuple[str, ...] = ()
        self.cards: tuple[Model, ...] = ()
        self.has_listed = False
        self.tells_usage = False
        self.tells_tokens = False
        self.cache = self.url  # the name of what it has computed
        self.breaker = Breaker.unproven(_BREAKER)
        self.in_flight = 0
        self.tokens_in_flight = 0

    @property
    def healthy(self) -> bool:
        return self.breaker.state != "open"

    @property
    def reason(self) -> str:
        """The reason why it is out."""
        return self.breaker.reason

    @property
    def has_room(self) -> bool:
        """Whether it may get another request."""
        return self.concurrency is None or self.in_flight < self.concurrency

    @property
    def is_on_trial(self) -> bool:
        """Whether it has the one request that shows if it is well again."""
        return self.breaker.needs_trial and self.in_flight > 0

    def patience(self, usual: Patience) -> Patience:
        """The seconds that it may be silent in a stream."""
        return Patience(self._address.first_token_s or usual.first_s, self._address.idle_s or usual.idle_s)

    def serves(self, models: Sequence[Model]) -> None:
        self.models = tuple(model.id for model in models)
        self.cards = tuple(models)
        self.has_listed = True
        self.tells_usage = all(model.owned_by in _TELL_USAGE for model in models)
        self.tells_tokens = all(model.owned_by == "updraft" for model in models)
        if self.tells_tokens and models:  # since when it is up, which others do not say: its cache is no older
            self.cache = f"{self.url} {models[0].created}"

    def failed(self, reason: str) -> None:
        """Out at once; back after some good probes and a good answer."""
        if self.breaker.trip(reason):
            _log.warning("Node %s is out: %s", self.url, reason)

    def erred(self) -> None:
        """An error on a request that another node answered. Several in a row take the node out."""
        if self.breaker.failed(reason := "it fails on requests that other nodes answer"):
            _log.warning("Node %s is out: %s", self.url, reason)

    def probed(self) -> None:
        """A good probe."""
        if self.breaker.probed():
            _log.info("Node %s is in", self.url)


def _target(url: str, address: NodeAddress) -> UpstreamAddress:
    """Raises ConfigurationError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # a port that is none, half an address
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(
            f"--node {shown_url(url)!r} is not an http(s) URL such as http://127.0.0.1:8000.", param="node"
        )
    default = 443 if parts.scheme == "https" else 80
    credentials = ":".join(unquote(part) for part in (parts.username, parts.password) if part is not None)
    authorization = b"Basic " + b64encode(credentials.encode()) if credentials else b""
    if (api_key := address.api_key) is not None:
        if not is_sendable(api_key):
            raise ConfigurationError(f"The key of node {shown_url(url)} holds characters that no header can.")
        if len(api_key) < SHORTEST_KEY:
            raise ConfigurationError(f"The key of node {shown_url(url)} needs {SHORTEST_KEY} characters at least.")
        authorization = b"Bearer " + api_key.encode()
    where = parts.scheme.encode(), parts.hostname.encode(), port or default, parts.path.encode()
    return UpstreamAddress(*where, authorization, address.gets_shared_key, address.is_registered)
