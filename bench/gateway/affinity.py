"""The share of requests that find the node with their beginning cached: a trace, replayed over simulated nodes.

Nodes never forget, so the best that any choice could reach is one cache for all of them. The choice itself is the
gateway's, on bodies that are as long as the trace says, with its bounded memory.
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
from ...cloud_engine.gateway.balancing.choice import Chooser
from ...cloud_engine.gateway.balancing.node import Node, NodeAddress
from ...protocol.errors import ConfigurationError

_BLOCK_TOKENS, _BLOCK_BYTES = 512, 2048  # of the trace
_PREFILL_PER_S, _TOKEN_S = 20_000.0, 0.02  # of a simulated node, which runs all its requests side by side


class TraceRequest(NamedTuple):
    """One line of a trace in Mooncake's form."""

    at_s: float
    output_tokens: int
    blocks: Sequence[int]


def read_trace(path: Path, most: int) -> list[TraceRequest]:
    """The first `most` requests. Raises ConfigurationError."""
    try:
        with path.open(encoding="utf-8") as lines:
            read = [json.loads(line) for _, line in zip(range(most), lines, strict=False)]
        return [TraceRequest(row["timestamp"] / 1e3, row["output_length"], row["hash_ids"]) for row in read]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path} is no trace in Mooncake's form: {error!r}", param="trace") from error


def replay(trace: Sequence[TraceRequest], nodes: int, seed: int = 0, workers: int = 1) -> dict[str, float]:
    """Hit rates as shares of the prompts' blocks, the busiest node against the mean, and the time of a decision.

    Each request comes to one of the gateway's workers at random, which knows of no other's load.
    """
    simulated, index, random = [_SimulatedNode() for _ in range(nodes)], PrefixIndex(), Random(seed)
    views = [[Node(NodeAddress(f"http://node{number}")) for number in range(nodes)] for _ in range(workers)]
    choosers, together = [Chooser(index, Random(seed + worker)) for worker in range(workers)], _Cache()
    running: list[tuple[float, int, Node, Placement]] = []
    times: list[float] = []
    for number, request in enumerate(trace):
        while running and running[0][0] <= request.at_s:
            _, _, node, placement = heapq.heappop(running)
            node.tokens_in_flight -= placement.tokens
        body, worker = _body(request), random.randrange(workers)
        started = time.perf_counter()
        placement = Placement.of("bench", "model", body)
        node = choosers[worker].choose(views[worker], placement)
        times.append(time.perf_counter() - started)
        node.tokens_in_flight += placement.tokens
        together.take(request.blocks)
        chosen = simulated[views[worker].index(node)]
        computed = chosen.cache.take(request.blocks) * _BLOCK_TOKENS
        chosen.tokens += computed + request.output_tokens
        end = request.at_s + computed / _PREFILL_PER_S + request.output_tokens * _TOKEN_S
        heapq.heappush(running, (end, number, node, placement))
    asked, tokens = sum(len(request.blocks) for request in trace), [node.tokens for node in simulated]
    hits, ideal = sum(node.cache.hits for node in simulated) / asked, together.hits / asked
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
    """Blocks by all that is before them."""

    blocks: set[int] = field(default_factory=set[int])
    hits: int = 0

    def take(self, blocks: Sequence[int]) -> int:
        """The number of blocks of a prompt that have to be computed; they are cached from now on."""
        chain = list(_chained(blocks))
        known = next((at for at, block in enumerate(chain) if block not in self.blocks), len(chain))
        self.hits += known
        self.blocks.update(chain[known:])
        return len(chain) - known


@dataclass(eq=False, slots=True)
class _SimulatedNode:
    cache: _Cache = field(default_factory=_Cache)
    # Computed, of prompts and answers.
    tokens: int = 0


def _chained(blocks: Sequence[int]) -> Iterator[int]:
    before = 0
    for block in blocks:
        before = hash((before, block))
        yield before


def _body(request: TraceRequest) -> bytes:
    texts = [f"{block:08d}" * (_BLOCK_BYTES // 8) for block in request.blocks]
    return b'{"model":"model","messages":[{"role":"user","content":"%b"}]}' % "".join(texts).encode()
