"""`updraft bench node`: what HTTP costs the engine, which runs in a process of its own or in a thread of the server.

`python -m updraft.bench.node FOLDER THREADS STREAMS` is that second server.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ..protocol.safety.python_process import child_environment, python_command

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """`streams` answers of `tokens` tokens at once, `rounds` times on each of three fresh servers of either kind."""

    folder: Path
    streams: int = 16
    tokens: int = 200
    rounds: int = 3
    threads: int = 1


def measure(setting: Setting, say: Say) -> dict[str, float]:
    """Tokens per second: `bare` (stepping the engine, no server at all), `thread`, `process`; medians of all rounds."""
    figures = {"bare.tokens_per_s": _bare(setting)}
    say(f"bare: {figures['bare.tokens_per_s']:,.0f} tokens/s")
    served: dict[str, list[tuple[float, float]]] = {"thread": [], "process": []}
    for _ in range(3):  # in turns, so that a busy minute of the machine is everybody's
        for kind in served:
            served[kind] += _served(setting, kind)
    for kind, measured in served.items():
        speeds, waits = zip(*measured, strict=True)
        figures[f"{kind}.tokens_per_s"] = statistics.median(speeds)
        figures[f"{kind}.ttft_ms"] = statistics.median(waits)
        say(f"{kind}: {figures[f'{kind}.tokens_per_s']:,.0f} tokens/s")
    figures["process_vs_thread"] = figures["process.tokens_per_s"] / figures["thread.tokens_per_s"]
    figures["process_vs_bare"] = figures["process.tokens_per_s"] / figures["bare.tokens_per_s"]
    return figures


def _bare(setting: Setting) -> float:
    from ..cloud_engine.engine.config import EngineConfig
    from ..cloud_engine.engine.engine import Engine
    from ..cloud_engine.engine.types.request import GenerationRequest
    from ..protocol.sampling import SamplingParams

    config = EngineConfig(num_threads=setting.threads, max_batch_size=setting.streams)
    engine = Engine.from_folder(setting.folder, config=config)
    params = SamplingParams(max_tokens=setting.tokens, temperature=0.0, ignore_eos=True)
    speeds: list[float] = []
    for _ in range(3 * setting.rounds):
        for index in range(setting.streams):
            prompt = engine.tokenizer.encode_prompt(_prompt(index))
            engine.add_request(GenerationRequest(str(index), prompt, params))
        started = time.perf_counter()
        while engine.has_work:
            engine.step()
        speeds.append(setting.streams * setting.tokens / (time.perf_counter() - started))
    return statistics.median(speeds)


def _served(setting: Setting, kind: str) -> list[tuple[float, float]]:
    """(tokens per second, median milliseconds to the first token) of each round on one server; the first is warm-up."""
    folder, threads = str(setting.folder), str(setting.threads)
    command = [f"{__package__}.node", folder, threads, str(setting.streams)]
    if kind == "process":
        command = ["updraft.cloud_engine.node", "--model", folder, "--threads", threads, "--exit-with-parent"]
        command += ["--max-batch-size", str(setting.streams)]
    with _server(command) as address:
        return [asyncio.run(_round(address, setting)) for _ in range(setting.rounds + 1)][1:]


@contextmanager
def _server(command: list[str]) -> Iterator[tuple[str, int]]:
    """`python -m command...`, from its `ready` line to the end of the block."""
    with subprocess.Popen(
        python_command("-m", *command), env=child_environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None, "Popen made a pipe"
            url = urlsplit(process.stdout.readline().split()[1])
            yield url.hostname or "", url.port or 0
        finally:
            process.kill()


async def _round(address: tuple[str, int], setting: Setting) -> tuple[float, float]:
    started = time.perf_counter()
    waits = await asyncio.gather(*(_stream(address, setting, index) for index in range(setting.streams)))
    speed = setting.streams * setting.tokens / (time.perf_counter() - started)
    return speed, statistics.median(waits) * 1e3


async def _stream(address: tuple[str, int], setting: Setting, index: int) -> float:
    """Seconds to the first token. Reads bytes and no more: the client shares the machine with what it measures."""
    request = {"model": setting.folder.name, "prompt": _prompt(index), "max_tokens": setting.tokens}
    body = json.dumps({**request, "ignore_eos": True, "temperature": 0, "stream": True}).encode()
    reader, writer = await asyncio.open_connection(*address)
    started = time.perf_counter()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: node\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readuntil(b"data: ")
    first = time.perf_counter() - started
    rest = await reader.read(-1)
    writer.close()
    assert b"[DONE]" in rest, rest[-500:]
    return first


def _prompt(index: int) -> str:
    return f"{index} once upon a time"


def _serve_thread(folder: Path, threads: int, streams: int) -> None:
    from ..cloud_engine.engine.config import EngineConfig
    from ..cloud_engine.engine.engine import Engine
    from ..cloud_engine.engine.process.async_engine import AsyncEngine
    from ..cloud_engine.node.api.app import ServedEngine, create_node_app
    from ..protocol.http.server import exit_with_parent, serve

    exit_with_parent()
    engine = Engine.from_folder(folder, config=EngineConfig(num_threads=threads, max_batch_size=streams))
    serve(create_node_app(ServedEngine(AsyncEngine(engine), engine.tokenizer, engine.model_id, engine.context_length)))


if __name__ == "__main__":
    _serve_thread(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
