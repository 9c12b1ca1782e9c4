"""Selection of a node: the node that has the prompt's prefix cached, unless its load is much above the mean."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from .affinity import Placement, PrefixIndex
from .node import Node

_MAX_OF_MEAN = 1.5  # a node is chosen for its cache only if its load is at most this multiple of the mean load
_MIN_SHARE = 0.3  # minimum cached share of a prompt; less may be just the instructions that all prompts share
_SLACK_TOKENS = 16_384  # tokens added to the maximum load, so that no node is excluded while all loads are small


class NodeSelector:
    """Chooses nodes by prefix or session, within a load limit; else the less loaded of two random nodes."""

    def __init__(self, index: PrefixIndex | None = None, random: Random | None = None) -> None:
        self._index = index or PrefixIndex()
        self._random = random or Random()
        self._turn = 0

    def choose(self, usable: Sequence[Node], placement: Placement) -> Node:
        """Choose one of the `usable` nodes, which must not be empty, and record the prompt as cached on that node."""
        node = self._chosen(usable, placement)
        self._index.add(node.cache, placement)
        return node

    def _chosen(self, usable: Sequence[Node], placement: Placement) -> Node:
        if len(usable) == 1:
            return usable[0]
        if placement.blocks or placement.session is not None:
            most = _MAX_OF_MEAN * sum(node.tokens_in_flight for node in usable) / len(usable) + _SLACK_TOKENS
            below = [node for node in usable if node.tokens_in_flight <= most]
            matching = [(self._index.share_of(node.cache, placement), node) for node in below]
            best = max((share for share, _ in matching), default=0.0)
            if best >= _MIN_SHARE:
                return self._least_loaded([node for share, node in matching if share == best])
        return self._least_loaded(self._random.sample(usable, 2) if len(usable) > 2 else usable)

    def _least_loaded(self, nodes: Sequence[Node]) -> Node:
        """Return the least loaded node. Equally loaded nodes take turns."""
        self._turn += 1
        first = self._turn % len(nodes)
        return min([*nodes[first:], *nodes[:first]], key=lambda node: (node.tokens_in_flight, node.in_flight))
