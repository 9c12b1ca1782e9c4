"""Prefix-cache hit rate of the gateway's routing: a trace, replayed over simulated nodes.

The gateway's own code chooses the node of each request, with its bounded index of prefixes. Request bodies are as long
as in the trace. Simulated nodes never evict blocks, so the upper bound is a single cache shared by all nodes.
"""

from __future__ import annotations

import heapq
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

from ...cloud_engine.gateway.balancing.affinity import Placement, PrefixIndex
from ...cloud_engine.gateway.balancing.node import Node, NodeAddress
from ...cloud_engine.gateway.balancing.selection import NodeSelector
from ...protocol.errors import ConfigurationError

_BLOCK_TOKENS, _BLOCK_BYTES = 512, 2048  # size of each prompt block in the trace
_PREFILL_PER_S, _TOKEN_S = 20_000.0, 0.02  # simulated speed: prompt tokens per second, seconds per answer token


class TraceRequest(NamedTuple):
    """One request of a trace in Mooncake's format."""

    at_s: float
    output_tokens: int
    blocks: Sequence[int]


def read_trace(path: Path, most: int) -> list[TraceRequest]:
    """Read the first `most` requests. Raises ConfigurationError if the file is not in Mooncake's format."""
    try:
        with path.open(encoding="utf-8") as lines:
            read = [json.loads(line) for _, line in zip(range(most), lines, strict=False)]
        return [TraceRequest(row["timestamp"] / 1e3, row["output_length"], row["hash_ids"]) for row in read]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path} is not a trace in Mooncake's format: {error!r}", param="trace") from error


def replay(trace: Sequence[TraceRequest], nodes: int, seed: int = 0, workers: int = 1) -> dict[str, float]:
    """Return hit rates as shares of the prompts' blocks, the busiest node's load over the mean, and the decision time.

    Each request goes to a random worker of the gateway. Workers do not know each other's load on the nodes.
    """
    simulated, index, random = [_SimulatedNode() for _ in range(nodes)], PrefixIndex(), Random(seed)
    views = [[Node(NodeAddress(f"http://node{number}")) for number in range(nodes)] for _ in range(workers)]
    selectors, together = [NodeSelector(index, Random(seed + worker)) for worker in range(workers)], _Cache()
    running: list[tuple[float, int, Node, Placement]] = []
    times: list[float] = []
    for number, request in enumerate(trace):
        while running and running[0][0] <= request.at_s:
            _, _, node, placement = heapq.heappop(running)
            node.tokens_in_flight -= placement.tokens
        body, worker = _body(request), random.randrange(workers)
        started = time.perf_counter()
        placement = Placement.of("bench", "model", body)
        node = selectors[worker].choose(views[worker], placement)
        times.append(time.perf_counter() - started)
        node.tokens_in_flight += placement.tokens
        together.take(request.blocks)
        chosen = simulated[views[worker].index(node)]
        computed = chosen.cache.take(request.blocks) * _BLOCK_TOKENS
        chosen.tokens += computed + request.output_tokens
        end = request.at_s + computed / _PREFILL_PER_S + request.output_tokens * _TOKEN_S
        heapq.heappush(running, (end, number, node, placement))
    blocks, tokens = sum(len(request.blocks) for request in trace), [node.tokens for node in simulated]
    hits, ideal = sum(node.cache.hits for node in simulated) / blocks, together.hits / blocks
    return {
        "hit_rate": hits,
        "ideal_hit_rate": ideal,
        "share_of_ideal": hits / ideal if ideal else 1.0,
        "imbalance": max(tokens) / statistics.fmean(tokens),
        "decision_us_p50": statistics.median(times) * 1e6,
        "decision_us_p99": sorted(times)[len(times) * 99 // 100] * 1e6,
    }


@dataclass(slots=True)
class _Cache:
    """Cached blocks. The key of a block is the hash of the chain of blocks that ends with this block."""

    blocks: set[int] = field(default_factory=set[int])
    hits: int = 0

    def take(self, blocks: Sequence[int]) -> int:
        """Add a prompt's blocks to the cache, and return the number of blocks that had to be computed."""
        chain = list(_chained(blocks))
        cached = next((at for at, block in enumerate(chain) if block not in self.blocks), len(chain))
        self.hits += cached
        self.blocks.update(chain[cached:])
        return len(chain) - cached


@dataclass(eq=False, slots=True)
class _SimulatedNode:
    cache: _Cache = field(default_factory=_Cache)
    # Number of prompt tokens computed and answer tokens generated.
    tokens: int = 0


def _chained(blocks: Sequence[int]) -> Iterator[int]:
    before = 0
    for block in blocks:
        before = hash((before, block))
        yield before


def _body(request: TraceRequest) -> bytes:
    texts = [f"{block:08d}" * (_BLOCK_BYTES // 8) for block in request.blocks]
    return b'{"model":"model","messages":[{"role":"user","content":"%b"}]}' % "".join(texts).encode()
