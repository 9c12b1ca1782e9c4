"""The registry of nodes: health, models, and placement of requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from msgspec import UNSET

from ....protocol.errors import ConfigurationError, ModelNotFoundError, OverloadedError
from ....protocol.responses import ModelCard
from ..upstream.client import Upstream
from .affinity import Placement, PrefixIndex
from .directory import NodeDirectory
from .health import HealthWatch
from .node import Model, Node, NodeAddress
from .quarantine import Quarantine, RetryBudget
from .request_queue import QueuePlace, RequestQueue
from .selection import NodeSelector

_FOLLOW_S = 0.5
_FIRST_PROBE_S = 1.0  # seconds to wait for first probes before serving; doubled if no node has answered
_log = logging.getLogger("updraft.gateway")


@dataclass(frozen=True, slots=True)
class SharedBalancingState:
    """Balancing state shared by the registries of all workers. Create it before forking."""

    quarantine: Quarantine = field(default_factory=Quarantine)
    index: PrefixIndex = field(default_factory=PrefixIndex)


class NodeRegistry:
    """All nodes, watched in the background from `start` to `close`. Nodes in `directory` come and go at run time."""

    def __init__(
        self,
        addresses: Sequence[NodeAddress],
        upstream: Upstream,
        max_waiting: int = 256,
        directory: NodeDirectory | None = None,
        shared: SharedBalancingState | None = None,
    ) -> None:
        """Create the nodes. Raises ConfigurationError for an invalid or repeated URL, or if no nodes are given."""
        self.nodes = [Node(address) for address in addresses]
        #: URLs of the nodes that the operator has configured; such a node cannot be removed at run time.
        self.configured = frozenset(node.url for node in self.nodes)
        self.directory = directory
        if not self.nodes and directory is None:
            raise ConfigurationError("No nodes are configured: give a --node URL or a --nodes-file.", param="node")
        if len({node.url for node in self.nodes}) < len(self.nodes):
            raise ConfigurationError("The same --node URL is given twice.", param="node")
        self.retries = RetryBudget()
        shared = shared or SharedBalancingState()
        self.quarantine = shared.quarantine
        self._upstream = upstream
        self._selector = NodeSelector(shared.index)
        self.queue = RequestQueue(max_waiting)
        self._watchers: list[asyncio.Task[None]] = []
        self._registered: dict[str, tuple[Node, asyncio.Task[None]]] = {}
        self._following = asyncio.Lock()
        self._fails_to_follow = False

    def serves(self, model: str) -> bool:
        """Return whether any node serves the model."""
        return any(model in node.models for node in self.nodes)

    def known_models(self) -> set[str] | None:
        """Return the names of all models; None if there are no nodes, or a node has not listed its models yet."""
        if not self.nodes or not all(node.has_listed for node in self.nodes):
            return None
        return {name for node in self.nodes for name in node.models}

    def context_length(self, model: str) -> int | None:
        """Return the longest context of the model at any node; None if a node does not report its length."""
        lengths = [card.max_model_len for node in self.nodes for card in node.cards if card.id == model]
        return max(lengths, default=None) if all(isinstance(each, int) and each > 0 for each in lengths) else None

    def runs_updraft(self, model: str) -> bool:
        """Return whether all nodes that serve the model run Updraft."""
        return all(node.tells_tokens for node in self.nodes if model in node.models)

    async def start(self) -> None:
        """Start the watchers, and wait briefly for the first probe of each node. Slow nodes join later."""
        watches = [self._watch(node) for node in self.nodes]
        looks = [self._wait_for_first_probes(watch) for watch, _ in watches]
        self._watchers = [task for _, task in watches]
        if self.directory is not None:
            looks.append(self._follow_once())  # load the nodes that registered with other workers
            self._watchers.append(asyncio.create_task(self._follow()))
        await asyncio.gather(*looks)

    def _watch(self, node: Node) -> tuple[HealthWatch, asyncio.Task[None]]:
        watch = HealthWatch(node, self._upstream, self.queue.serve)
        return watch, asyncio.create_task(watch.run())

    async def _wait_for_first_probes(self, watch: HealthWatch) -> None:
        """Wait for the first probe for a limited time, so that a hung node does not delay the gateway's start."""
        look = asyncio.create_task(watch.has_looked.wait())
        await asyncio.wait([look], timeout=_FIRST_PROBE_S)
        if not any(node.healthy for node in self.nodes):
            await asyncio.wait([look], timeout=_FIRST_PROBE_S)
        look.cancel()

    async def close(self) -> None:
        tasks = [*self._watchers, *(watcher for _, watcher in self._registered.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def failure_of(self, node: Node) -> str:
        """Probe a node that wants to register. Return why it cannot be used; empty if it can."""
        await HealthWatch(node, self._upstream, lambda: None).probe(with_models=True)
        if not node.healthy:
            return node.breaker.reason
        return "" if node.models else "the node's model list is empty"

    async def follow_directory(self) -> None:
        """Add newly registered nodes, and remove nodes that are no longer registered. Raises ConfigurationError."""
        assert self.directory is not None, "the registry has no directory"
        async with self._following:
            addresses = {address.url: address for address in await asyncio.to_thread(self.directory.addresses)}
            for url, (node, watcher) in tuple(self._registered.items()):
                if url in addresses and addresses[url].gets_shared_key == node.target.gets_shared_key:
                    continue
                del self._registered[url]
                watcher.cancel()
                self.nodes.remove(node)
                _log.info("Node %s is no longer registered", url)
            fresh = addresses.keys() - {node.url for node in self.nodes}
            await asyncio.gather(*(self._add_node(addresses[url]) for url in fresh))
            for url, (node, _) in self._registered.items():
                node.concurrency = addresses[url].concurrency
        self.queue.serve()

    async def _add_node(self, address: NodeAddress) -> None:
        node = Node(address)
        watch, watching = self._watch(node)
        self._registered[node.url] = node, watching
        await self._wait_for_first_probes(watch)
        self.nodes.append(node)
        _log.info("Node %s has registered", node.url)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_FOLLOW_S)
            await self._follow_once()

    async def _follow_once(self) -> None:
        try:
            await self.follow_directory()
            self._fails_to_follow = False
        except ConfigurationError as error:
            if not self._fails_to_follow:
                _log.error("Cannot read the node directory, registered nodes stay unchanged: %s", error)
            self._fails_to_follow = True

    @property
    def candidates(self) -> list[Node]:
        """Return the healthy and the suspect nodes. One broken answer must not cost other requests a node."""
        return [node for node in self.nodes if node.healthy or node.is_suspect]

    def models(self) -> list[ModelCard]:
        """Return the models of all usable nodes, each with the earliest creation time and the shortest context."""
        listed = sorted((card for node in self.candidates for card in node.cards), key=lambda card: card.id)
        return [_card(name, list(group)) for name, group in groupby(listed, key=lambda card: card.id)]

    @asynccontextmanager
    async def place(self, placement: Placement, tried: Collection[Node], place: QueuePlace) -> AsyncGenerator[Node]:
        """Reserve a healthy node that serves the model and is not in `tried`, for the duration of the block.

        Queues while all such nodes are full. Raises OverloadedError or ModelNotFoundError.
        """
        node = await self.take(placement, tried, place)
        try:
            yield node
        finally:
            self.give_back(node, placement)

    async def take(self, placement: Placement, tried: Collection[Node], place: QueuePlace) -> Node:
        """Reserve a node like `place`, but the caller must release the node with `give_back`."""
        node = None if self.queue else self._take(placement, tried)
        if node is None:
            nodes_key = placement.model, frozenset(each.url for each in tried)
            take, give_back = partial(self._take, placement, tried), partial(self.give_back, placement=placement)
            node = await self.queue.wait(place, nodes_key, take, give_back)
        return node

    def take_spare(self, placement: Placement, tried: Collection[Node]) -> Node | None:
        """Reserve a node for a parallel second attempt (hedge). Return None if all are full or no retries are left."""
        if self.queue or not any(node.has_capacity for node in self._usable(placement.model, tried)):
            return None
        return self._take(placement, tried) if self.retries.take() else None

    def give_back(self, node: Node, placement: Placement) -> None:
        node.in_flight -= 1
        node.tokens_in_flight -= placement.tokens
        self.queue.serve()

    def placement(self, key_name: str, model: str, body: bytes, session: str) -> Placement:
        """Return the placement of a request. The prompt is hashed only if there are several nodes."""
        return Placement.of(key_name, model, body, session) if len(self.nodes) > 1 else Placement(model)

    def has_alternative(self, model: str, tried: Collection[Node]) -> bool:
        """Return whether a healthy node that is not in `tried` serves the model."""
        return bool(self._usable(model, tried))

    def refusal(self, model: str) -> OverloadedError | ModelNotFoundError:
        """Return the error for a model that no node can serve: "not found" only if every node has listed its models."""
        known = self.known_models()
        if known is not None and model not in known:
            return ModelNotFoundError(
                f"The model {model!r} does not exist; available models: {', '.join(sorted(known))}.", param="model"
            )
        return OverloadedError("No node can take this request at the moment: try again shortly.")

    def _take(self, placement: Placement, tried: Collection[Node]) -> Node | None:
        """Reserve the best node with capacity; None if all are full. Raises UpdraftError if no node is left to try."""
        usable = self._usable(placement.model, tried)
        if not usable and not tried:
            usable = [node for node in self.candidates if placement.model in node.models]
        if not usable:
            raise self.refusal(placement.model)
        with_capacity = [node for node in usable if node.has_capacity]
        if not with_capacity:
            return None
        sure = [node for node in with_capacity if not node.is_on_trial]
        node = self._selector.choose(sure or with_capacity, placement)
        node.in_flight += 1
        node.tokens_in_flight += placement.tokens
        return node

    def _usable(self, model: str, tried: Collection[Node]) -> list[Node]:
        return [node for node in self.nodes if node.healthy and node not in tried and model in node.models]


def _card(name: str, listed: list[Model]) -> ModelCard:
    since = min((each.created for each in listed if isinstance(each.created, int)), default=0)
    longest = min((each.max_model_len for each in listed if isinstance(each.max_model_len, int)), default=UNSET)
    foreign = [str(each.owned_by) for each in listed if each.owned_by != "updraft"]  # names of other server software
    return ModelCard(id=name, created=since, max_model_len=longest, owned_by=foreign[0] if foreign else "updraft")
