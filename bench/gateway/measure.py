"""The gateway on one core, compared with nginx and LiteLLM's proxy in one run: requests, streams, latency, memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil

from .load import LoadResult, drive, offer, percentile_ms, request_for
from .servers import Server, litellm, nginx, stub, updraft

Figures = dict[str, Any]

_P99_MS = (1, 5, 10, 50)  # limits of the 99th percentile; for each, the highest rate within the limit is measured
_RATES = 12  # number of rates tried: 0.1, 0.2, ... of the closed-loop throughput
_FRONTIER_S = 2.0  # maximum seconds per rate
_SHORT_STREAM = 5  # tokens of a stream in the memory test, short so that there are many streams
_OVERLOAD = 5
_SLOTS = 16  # slots of the overloaded node
_ANSWER_S = 1.0  # seconds per answer, long enough for a busy machine to keep up
_CAPACITY = _SLOTS / _ANSWER_S


@dataclass(frozen=True, slots=True)
class GatewayBenchOptions:
    # Numbers of requests in flight to measure, one after the other.
    concurrencies: tuple[int, ...]
    # Number of streamed requests in flight; answers that are not streamed are measured separately.
    streams: int
    # Duration of each measurement, in seconds.
    seconds: float
    # Duration of the memory measurements under constant load, in seconds; 0 skips them.
    memory_seconds: float
    # A Python executable with `litellm[proxy]` installed; None skips LiteLLM.
    litellm_python: Path | None = None


def measure(options: GatewayBenchOptions, say: Callable[[str], None]) -> Figures:
    """Measure all servers. The gateway runs on the first core; load generator and stub share the last one."""
    cores = sorted(os.sched_getaffinity(0))
    gateway_core, load_core = cores[0], cores[-1]
    figures: Figures = {}
    psutil.Process().cpu_affinity([load_core])
    try:
        with stub(load_core) as node, TemporaryDirectory() as name:
            folder = Path(name)
            servers: list[AbstractContextManager[Server]] = [updraft(node.url, gateway_core, folder)]
            servers.append(nginx(node.url, gateway_core, folder))
            if options.litellm_python is not None:
                servers.append(litellm(options.litellm_python, node.url, gateway_core, folder))
            figures["direct"] = _requests(node, options, say)
            for starting in servers:
                try:
                    with starting as server:
                        figures[server.name] = _figures_of(server, options, say)
                except FileNotFoundError as missing:
                    say(f"{missing} is not installed: skipped")
        figures["overload"] = _overload(gateway_core, load_core, options.seconds)
    finally:
        psutil.Process().cpu_affinity(cores)
    say(f"overload: {figures['overload']}")
    return {**figures, **_compared(figures, options)}


def _figures_of(server: Server, options: GatewayBenchOptions, say: Callable[[str], None]) -> Figures:
    figures = _requests(server, options, say)
    load, cpu_s = _driven(server, options.streams, options.seconds, stream=True)
    figures["stream"] = {
        "frames_per_s": load.frames / load.seconds,
        "cpu_us_per_frame": cpu_s / max(load.frames, 1) * 1e6,
        "failures": load.failures,
    }
    if options.memory_seconds:
        figures["memory"] = asyncio.run(_memory(server, options.memory_seconds))
        figures["memory_of_streams"] = asyncio.run(_memory(server, options.memory_seconds, _SHORT_STREAM))
    best = max(figures[f"c{concurrency}"]["requests_per_s"] for concurrency in options.concurrencies)
    figures["frontier"] = _frontier(server, best, min(options.seconds, _FRONTIER_S))  # last: requests may outlive it
    say(f"{server.name}: { {name: figure for name, figure in figures.items() if not name.startswith('c')} }")
    return figures


def _requests(server: Server, options: GatewayBenchOptions, say: Callable[[str], None]) -> Figures:
    figures: Figures = {}
    _driven(server, 4, min(options.seconds, 1.0))  # warm-up
    for concurrency in options.concurrencies:
        load, cpu_s = _driven(server, concurrency, options.seconds)
        figures[f"c{concurrency}"] = {
            "requests_per_s": load.per_second,
            "p50_ms": percentile_ms(load.latencies, 0.5),
            "p99_ms": percentile_ms(load.latencies, 0.99),
            "cpu_us": cpu_s / max(len(load.latencies), 1) * 1e6,
            "failures": load.failures,
        }
        say(f"{server.name}, {concurrency} in flight: {figures[f'c{concurrency}']}")
    return figures


def _frontier(server: Server, best: float, seconds: float) -> Figures:
    """Return the highest rate at which 99 % of the requests stay within each latency limit (open loop)."""
    rates = dict.fromkeys(_P99_MS, 0.0)
    for tenths in range(1, _RATES + 1):
        load = asyncio.run(offer(server.url, server.key, best * tenths / 10, seconds, seconds / 4))
        for limit in _P99_MS:
            if not load.failures and percentile_ms(load.latencies, 0.99) <= limit:
                rates[limit] = max(rates[limit], load.per_second)
    return {f"requests_per_s_at_p99_{limit}ms": rate for limit, rate in rates.items()}


def _driven(server: Server, concurrency: int, seconds: float, *, stream: bool = False) -> tuple[LoadResult, float]:
    before = server.cpu_s()
    load = asyncio.run(drive(server.url, request_for(server.url, server.key, stream=stream), concurrency, seconds))
    return load, server.cpu_s() - before


async def _memory(server: Server, seconds: float, stream_tokens: int = 0) -> Figures:
    """Return the growth of resident memory per request: a least-squares slope without the first fifth of samples."""
    load = LoadResult()
    request = request_for(server.url, server.key, stream=bool(stream_tokens), tokens=stream_tokens)
    concurrency = 128 if stream_tokens else 16  # streams mostly wait for tokens, so a full load needs more of them
    driving = asyncio.create_task(drive(server.url, request, concurrency, seconds, load=load))
    rows: list[tuple[int, float]] = []
    while not driving.done():
        rows.append((len(load.latencies), server.memory_mb()))
        await asyncio.sleep(seconds / 50)
    await driving
    requests, megabytes = np.array(rows[len(rows) // 5 :], float).T
    slope = float(np.polyfit(requests, megabytes, 1)[0]) * 1e5 if len(set(requests)) > 1 else float("nan")
    return {"requests": len(load.latencies), "mb": float(megabytes[-1]), "mb_per_100k_requests": slope}


def _overload(gateway_core: int, load_core: int, seconds: float) -> Figures:
    """Measure a saturated node, and the answers that it still gives under five times the load it can handle."""
    seconds = max(1, round(seconds / _ANSWER_S)) * _ANSWER_S  # a multiple of the time per answer
    limits = ("--max-concurrency-per-node", str(_SLOTS), "--max-waiting", str(_SLOTS))
    with (
        stub(load_core, "--slots", str(_SLOTS), "--delay-s", str(_ANSWER_S)) as node,
        TemporaryDirectory() as name,
        updraft(node.url, gateway_core, Path(name), *limits) as server,
    ):
        busy = asyncio.run(offer(server.url, server.key, 1.25 * _CAPACITY, seconds, _ANSWER_S))
        before = server.cpu_s()
        load = asyncio.run(offer(server.url, server.key, _OVERLOAD * _CAPACITY, seconds, _ANSWER_S))
        cpu_s = server.cpu_s() - before
    return {
        "capacity_per_s": _CAPACITY,
        "peak_share": busy.per_second / _CAPACITY,
        "goodput_share": load.per_second / busy.per_second,
        "refused_p50_ms": percentile_ms(load.refused, 0.5),
        "refused_p99_ms": percentile_ms(load.refused, 0.99),
        "answered_p99_ms": percentile_ms(load.latencies, 0.99),
        "cpu_us": cpu_s / (_OVERLOAD * _CAPACITY * (seconds + _ANSWER_S)) * 1e6,
        "failures": load.failures,
    }


def _compared(figures: Figures, options: GatewayBenchOptions) -> Figures:
    lowest = f"c{min(options.concurrencies)}"
    gateway, direct = figures["updraft"], figures["direct"]
    added = {f"added_{p}_ms": gateway[lowest][f"{p}_ms"] - direct[lowest][f"{p}_ms"] for p in ("p50", "p99")}
    best = {
        name: max(figures[name][f"c{concurrency}"]["requests_per_s"] for concurrency in options.concurrencies)
        for name in ("updraft", "nginx", "litellm")
        if name in figures
    }
    over = {f"over_{name}": best["updraft"] / rate for name, rate in best.items() if name != "updraft" and rate}
    cpu = {name: min(figures[name][f"c{n}"]["cpu_us"] for n in options.concurrencies) for name in best}
    return {**added, "most_requests_per_s": best, **over, "requests_per_cpu_s": {n: 1e6 / us for n, us in cpu.items()}}
