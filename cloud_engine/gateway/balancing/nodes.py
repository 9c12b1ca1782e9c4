"""The nodes behind the gateway: which are well, what they serve, and who takes the next request."""

from __future__ import annotations

import asyncio
import logging
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import groupby
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import UNSET

from ....protocol.errors import ConfigurationError, ModelNotFoundError, OverloadedError
from ....protocol.responses import ModelCard
from ....protocol.safety.redaction import shown_url
from ..upstream.client import Upstream, UpstreamAddress
from ..upstream.failures import UpstreamFailure

_PROBE_S = 0.5
_PROBE_TIMEOUT_S = 2.0
_PROBES_TO_RETURN = 2
_TIMEOUTS_TO_LEAVE = 3  # a busy machine may be late once or twice; a refused connection is enough at once
_MODELS_EVERY = 20  # probes
_TELL_USAGE = frozenset({"updraft", "vllm", "sglang"})  # owners of models: others may refuse `continuous_usage_stats`
_log = logging.getLogger("updraft.gateway")


class Model(msgspec.Struct):
    """As a node lists it. Other fields than the name may be of any kind."""

    id: str
    owned_by: Any = None
    created: Any = None
    max_model_len: Any = None


class _Models(msgspec.Struct):
    data: list[Model]


class Node:
    """One OpenAI-compatible server. `in_flight` counts this gateway's requests on it.

    `tells_usage`: whether it can be asked to put the usage so far on every chunk of a stream.
    """

    def __init__(self, url: str) -> None:
        address = url.rstrip("/").removesuffix("/v1")
        self.target = _target(address)
        self.url = shown_url(address)
        self.models: tuple[str, ...] = ()
        self.cards: tuple[Model, ...] = ()
        self.tells_usage = False
        self.healthy = False
        self.reason = "not probed yet"
        self.in_flight = 0
        self._good_probes = _PROBES_TO_RETURN - 1  # a first success is enough at the start
        self._timeouts = 0
        self._waiting: set[Callable[[], None]] = set()

    def serves(self, models: Sequence[Model]) -> None:
        self.models = tuple(model.id for model in models)
        self.cards = tuple(models)
        self.tells_usage = all(model.owned_by in _TELL_USAGE for model in models)

    def failed(self, reason: str) -> None:
        """Out at once; back after some good probes."""
        if self.healthy:
            _log.warning("Node %s is out: %s", self.url, reason)
        self.healthy, self.reason, self._good_probes = False, reason, 0

    def was_late(self) -> None:
        self._timeouts += 1
        if self._timeouts >= _TIMEOUTS_TO_LEAVE:
            self.failed(f"{self._timeouts} probes in a row without an answer within {_PROBE_TIMEOUT_S} s")
            for give_up in tuple(self._waiting):
                give_up()

    @asynccontextmanager
    async def unless_it_hangs(self) -> AsyncGenerator[None]:
        """Cancel the block when the node stops answering its probes, and raise UpstreamFailure from it."""
        task, hangs = asyncio.current_task(), False
        assert task is not None, "an async context manager runs in a task"

        def give_up() -> None:
            nonlocal hangs
            hangs = True
            task.cancel()

        self._waiting.add(give_up)
        try:
            yield
        except asyncio.CancelledError:
            if hangs and task.uncancel() == 0:  # else somebody else cancelled too, and that must be seen
                raise UpstreamFailure(self.reason) from None
            raise
        finally:
            self._waiting.discard(give_up)

    def passed(self) -> None:
        self._timeouts = 0
        self._good_probes += 1
        if not self.healthy and self._good_probes >= _PROBES_TO_RETURN:
            _log.info("Node %s is in", self.url)
            self.healthy, self.reason = True, ""


class NodeRegistry:
    """All nodes, watched in the background between `start` and `close`."""

    def __init__(self, urls: Sequence[str], upstream: Upstream) -> None:
        """Raises ConfigurationError for a URL that is none, given twice, or no URL at all."""
        self.nodes = [Node(url) for url in urls]
        if not self.nodes:
            raise ConfigurationError("A gateway needs at least one --node URL.", param="node")
        if len({node.url for node in self.nodes}) < len(self.nodes):
            raise ConfigurationError("The same --node URL is given twice.", param="node")
        self._upstream = upstream
        self._turn = 0
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Probe every node once, then watch them. Nodes that are not up yet may come later."""
        await asyncio.gather(*(self._probe(node, with_models=True) for node in self.nodes))
        self._watchers = [asyncio.create_task(self._watch(node)) for node in self.nodes]

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    def models(self) -> list[ModelCard]:
        """The models of all nodes that are in: since when there is one, and what each of its nodes has room for."""
        listed = sorted((card for node in self.nodes if node.healthy for card in node.cards), key=lambda card: card.id)
        return [_card(name, list(group)) for name, group in groupby(listed, key=lambda card: card.id)]

    def choose(self, model: str, tried: Collection[Node]) -> Node | None:
        """The least loaded node that is in, has `model` and is not in `tried`; ties in turn. None: no such node."""
        usable = self._usable(model, tried)
        if not usable:
            return None
        self._turn += 1
        first = self._turn % len(usable)
        return min(usable[first:] + usable[:first], key=lambda node: node.in_flight)

    def has_another(self, model: str, tried: Collection[Node]) -> bool:
        """Whether `choose` would find a node."""
        return bool(self._usable(model, tried))

    def _usable(self, model: str, tried: Collection[Node]) -> list[Node]:
        return [node for node in self.nodes if node.healthy and node not in tried and model in node.models]

    def refusal(self, model: str) -> OverloadedError | ModelNotFoundError:
        """Why there is no node for `model`."""
        known = {name for node in self.nodes for name in node.models}
        if any(node.healthy for node in self.nodes) and model not in known:
            return ModelNotFoundError(
                f"The model {model!r} does not exist here; there are: {', '.join(sorted(known))}.", param="model"
            )
        return OverloadedError("No node can take this request now: try again in a moment.")

    @contextmanager
    def load(self, node: Node) -> Generator[None]:
        node.in_flight += 1
        try:
            yield
        finally:
            node.in_flight -= 1

    async def _watch(self, node: Node) -> None:
        count = 0
        while True:
            await asyncio.sleep(_PROBE_S)
            count += 1
            await self._probe(node, with_models=not node.healthy or count % _MODELS_EVERY == 0)

    async def _probe(self, node: Node, *, with_models: bool) -> None:
        """One look at `/health` (a server without that route counts as well), and at the models."""
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                status, _ = await self._upstream.get(node.target, b"/health")
                if status not in (200, 404, 405):
                    node.failed(f"/health answered {status}")
                    return
                if with_models:
                    status, body = await self._upstream.get(node.target, b"/v1/models")
                    if status != 200:
                        node.failed(f"/v1/models answered {status}")
                        return
                    node.serves(msgspec.json.decode(body, type=_Models).data)
            node.passed()
        except (UpstreamFailure, msgspec.DecodeError) as error:
            node.failed(str(error))
        except TimeoutError:
            node.was_late()


def _card(name: str, listed: list[Model]) -> ModelCard:
    since = min((each.created for each in listed if isinstance(each.created, int)), default=0)
    room = min((each.max_model_len for each in listed if isinstance(each.max_model_len, int)), default=UNSET)
    foreign = [str(each.owned_by) for each in listed if each.owned_by != "updraft"]  # then it is not ours to answer for
    return ModelCard(id=name, created=since, max_model_len=room, owned_by=foreign[0] if foreign else "updraft")


def _target(url: str) -> UpstreamAddress:
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
    basic = b"Basic " + b64encode(credentials.encode()) if credentials else b""
    return UpstreamAddress(parts.scheme.encode(), parts.hostname.encode(), port or default, parts.path.encode(), basic)
