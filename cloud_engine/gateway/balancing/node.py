"""One node: its address, models, health and load."""

from __future__ import annotations

import logging
import re
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
from ..upstream.connection import SilenceTimeouts

_REPORTING_USAGE = frozenset({"updraft", "vllm", "sglang"})  # servers with `continuous_usage_stats`
#: Circuit breaker of a node. `recovery`: number of consecutive good probes after which an open breaker is half-open.
_BREAKER = BreakerRules(failures_to_open=5, recovery=2, max_recovery=64, by_probes=True)
_BAD_IN_URL = re.compile(r"[\0-\x20\x7f?#]")
_log = logging.getLogger("updraft.gateway")


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """The address and settings of a node."""

    # URL of an OpenAI-compatible server; may contain a user and a password.
    url: str = field(repr=False)
    # API key of this node, used instead of the shared node key.
    api_key: str | None = field(default=None, repr=False)
    # Maximum requests in flight; None: unlimited.
    concurrency: int | None = None
    # Timeout of this node for the first bytes of a stream, in seconds. None: the gateway's timeout.
    first_token_timeout_s: float | None = None
    # Timeout between two pieces of a stream, in seconds. None: the gateway's timeout.
    idle_timeout_s: float | None = None
    # Whether the node may get the shared node key: it was configured by the operator, or proved that it knows the key.
    gets_shared_key: bool = True
    # Whether the node registered by heartbeat. Its host name must then resolve to an allowed address.
    is_registered: bool = False
    # Price of this node's tokens. None: the model's price.
    price: Price | None = None

    def of_worker(self, workers: int, worker: int) -> NodeAddress:
        """Return the address with one worker's share of `concurrency`; workers count requests separately."""
        if self.concurrency is None:
            return self
        return replace(self, concurrency=part_of_worker(self.concurrency, workers, worker))


def part_of_worker(whole: int, workers: int, worker: int) -> int:
    """Return one worker's share of the limit `whole`: at least 1 if `whole` is above 0."""
    return max(min(whole, 1), whole // workers + (worker < whole % workers))


class Model(msgspec.Struct):
    """An entry of a node's model list. All fields except the id may have any type, because servers differ."""

    id: str
    owned_by: Any = None
    created: Any = None
    max_model_len: Any = None


class Node:
    """The state of a node. `in_flight`: requests of this worker. `has_listed`: whether the node has sent a model list.

    `tells_tokens`: the node reports token ids in a stream and can continue from another node's tokens. `tells_usage`:
    the node can report the usage so far on every chunk of a stream.
    """

    def __init__(self, address: NodeAddress) -> None:
        """Create the node, out of rotation until a probe succeeds. Raises ConfigurationError if the URL is invalid."""
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
        self.cache = self.url  # id of the node's prefix cache; changes when a restart empties the cache
        self.breaker = Breaker.unproven(_BREAKER)
        # Whether the node is out of rotation only because an answer broke off, for which the request may be to blame.
        self.is_suspect = False
        self.in_flight = 0
        self.tokens_in_flight = 0

    @property
    def healthy(self) -> bool:
        return self.breaker.state != "open"

    @property
    def has_capacity(self) -> bool:
        """Return whether the node can take another request."""
        return self.concurrency is None or self.in_flight < self.concurrency

    @property
    def is_on_trial(self) -> bool:
        """Return whether the one trial request of a half-open breaker is in flight."""
        return self.breaker.needs_trial and self.in_flight > 0

    def silence_timeouts(self, usual: SilenceTimeouts) -> SilenceTimeouts:
        """Return the timeouts for streams from this node; `usual` holds the gateway's defaults."""
        return SilenceTimeouts(
            self._address.first_token_timeout_s or usual.first_s, self._address.idle_timeout_s or usual.idle_s
        )

    def serves(self, models: Sequence[Model]) -> None:
        self.models = tuple(model.id for model in models)
        self.cards = tuple(models)
        self.has_listed = True
        self.tells_usage = all(model.owned_by in _REPORTING_USAGE for model in models)
        self.tells_tokens = all(model.owned_by == "updraft" for model in models)
        if self.tells_tokens and models:  # Updraft's `created` is the node's start time
            self.cache = f"{self.url} {models[0].created}"

    def failed(self, reason: str, *, is_suspect: bool = False) -> None:
        """Take the node out of rotation at once. It returns after good probes and one successful trial request."""
        self.is_suspect = is_suspect and (self.healthy or self.is_suspect)
        if self.breaker.trip(reason):
            _log.warning("Node %s is out of rotation: %s", self.url, reason)

    def erred(self) -> None:
        """Count an error on a request that another node answered. Several in a row take this node out of rotation."""
        if self.breaker.failed(reason := "other nodes answered requests that failed on this node"):
            _log.warning("Node %s is out of rotation: %s", self.url, reason)

    def probed(self) -> None:
        """Count a successful health probe."""
        if self.breaker.probed():
            _log.info("Node %s is in rotation", self.url)


def _target(url: str, address: NodeAddress) -> UpstreamAddress:
    """Return the parts of a node's URL. Raises ConfigurationError if the URL is invalid."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # an invalid port or a malformed IPv6 address
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or _BAD_IN_URL.search(url):
        form = "an http(s) URL such as http://h:8000, without ? and #"
        raise ConfigurationError(f"{shown_url(url)!r} (of --node or --nodes-file) is not {form}.", param="node")
    default = 443 if parts.scheme == "https" else 80
    credentials = ":".join(unquote(part) for part in (parts.username, parts.password) if part is not None)
    authorization = b"Basic " + b64encode(credentials.encode()) if credentials else b""
    if (api_key := address.api_key) is not None:
        if not is_sendable(api_key):
            raise ConfigurationError(f"The key of node {shown_url(url)} contains characters not allowed in a header.")
        if len(api_key) < SHORTEST_KEY:
            raise ConfigurationError(f"The key of node {shown_url(url)} must have at least {SHORTEST_KEY} characters.")
        authorization = b"Bearer " + api_key.encode()
    where = parts.scheme.encode(), parts.hostname.encode(), port or default, parts.path.encode()
    return UpstreamAddress(*where, authorization, address.gets_shared_key, address.is_registered)
