"""Clients that send streaming requests until they are stopped, while processes of the cluster are killed or paused."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
from gateway_cluster import CLIENTS, Cluster

TIMEOUT_S = 60.0
_REAL_PROMPTS = 4
_REAL_TOKENS = 40
_REAL_EVERY = 6  # every sixth client asks the real model
_REAL_PAUSE_S = 1.0  # pause after each answer of the tiny model, which otherwise takes all processor time
_TOLD_EVERY = 50  # number of kills between two progress messages


@dataclass
class Attempt:
    """One request as its client saw it."""

    id: str
    model: str
    expected: str
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    # HTTP status; 0 without an answer.
    status: int = 0
    text: str = ""
    usage: dict[str, int] = field(default_factory=dict[str, int])
    # Type of the error that the client received, and its message.
    error: str = ""
    message: str = ""
    # How the connection broke; empty if it did not.
    broke: str = ""
    is_done: bool = False

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.is_done and not self.error and not self.broke


class Clients:
    """Clients that send streaming requests in a loop until `stop` is called."""

    def __init__(self, target: Cluster) -> None:
        self.attempts: list[Attempt] = []
        self._target = target
        self._real_texts = [_undisturbed(target.reals.nodes[0].url, prompt) for prompt in range(_REAL_PROMPTS)]
        self._whole = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(2 * TIMEOUT_S)
        assert not self._thread.is_alive(), "a client still waits after its timeout"

    def wait_for_answers(self, count: int) -> None:
        """Wait for `count` more complete answers. Meanwhile, resume processes that were paused for long enough."""
        before, until = self._whole, time.monotonic() + TIMEOUT_S
        while self._whole < before + count:
            assert time.monotonic() < until, "no client got an answer within the timeout"
            self._target.resume()
            time.sleep(0.05)

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # a server may close idle connections
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, headers=self._target.headers) as client:
            await asyncio.gather(*(self._ask(client, number) for number in range(CLIENTS)))

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        for count in range(10**6):
            if self._stopping.is_set():
                return
            id_, prompt = f"client-{number}-{count}", count % _REAL_PROMPTS
            if number % _REAL_EVERY:
                text = f"{id_} says it letter by letter"
                attempt, body = Attempt(id_, "echo", text), _body("echo", text)
            else:
                attempt, body = Attempt(id_, "tiny", self._real_texts[prompt]), _real_body(prompt)
            await stream(client, self._target.url, attempt, body)
            self.attempts.append(attempt)
            self._whole += attempt.is_whole
            if attempt.model == "tiny" or not attempt.is_whole:
                await asyncio.sleep(_REAL_PAUSE_S if attempt.is_whole else 0.3)


async def stream(
    client: httpx.AsyncClient,
    url: str,
    attempt: Attempt,
    body: dict[str, Any],
    all_began: asyncio.Barrier | None = None,
) -> None:
    """Send one request, and record its stream in `attempt`. `all_began`: barrier to wait at after the first event."""
    opening = client.stream("POST", f"{url}/v1/chat/completions", json=body, headers={"x-request-id": attempt.id})
    try:
        async with asyncio.timeout(TIMEOUT_S), opening as response:
            attempt.status = response.status_code
            if attempt.status != 200:
                _note(json.loads(await response.aread())["error"], attempt)
                return
            async for line in response.aiter_lines():
                if all_began is not None:
                    await all_began.wait()
                    all_began = None
                _read(line, attempt)
    except TimeoutError:
        attempt.broke = "timeout"
    except httpx.TransportError as error:
        attempt.broke = type(error).__name__
    finally:
        attempt.ended = time.monotonic()


def _read(line: str, attempt: Attempt) -> None:
    if line == "data: [DONE]":
        attempt.is_done = True
    elif line.startswith("data: "):
        event = json.loads(line[6:])
        if "error" in event:
            _note(event["error"], attempt)
            return
        attempt.usage = event.get("usage") or attempt.usage
        attempt.text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _note(error: dict[str, Any], attempt: Attempt) -> None:
    attempt.error, attempt.message = error["type"], error["message"]


def all_at_once(target: Cluster, count: int) -> list[Attempt]:
    """Run `count` streams that all begin before any of them ends, and return their attempts."""

    async def run() -> list[Attempt]:
        all_began = asyncio.Barrier(count)
        attempts = [Attempt(f"burst-{number}", "echo", f"burst {number} " + "x" * 60) for number in range(count)]
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # a server may close idle connections
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, headers=target.headers) as client:
            streams = (
                stream(client, target.url, attempt, _body("echo", attempt.expected), all_began) for attempt in attempts
            )
            await asyncio.gather(*streams)
        return attempts

    return asyncio.run(run())


Action = Literal["stub", "server", "core", "worker", "gateway", "stop"]
_ACTIONS: dict[Action, tuple[Callable[[Cluster, random.Random], bool], float]] = {
    "stub": (Cluster.kill_stub, 5),
    "server": (Cluster.kill_server, 1),
    "core": (Cluster.kill_core, 1),
    "worker": (Cluster.kill_worker, 2),
    "gateway": (Cluster.kill_gateway, 0.3),
    "stop": (Cluster.stop, 4),
}


def make_trouble(target: Cluster, clients: Clients, kills: int) -> Counter[Action]:
    """Kill or pause random processes `kills` times, and let clients get a few answers in between.

    Returns the number of times that each action was taken.
    """
    chance, done = random.Random(kills), Counter[Action]()
    weights = [weight for _, weight in _ACTIONS.values()]
    while done.total() < kills:
        action = chance.choices(tuple(_ACTIONS), weights)[0]
        if not _ACTIONS[action][0](target, chance):
            clients.wait_for_answers(1)
            continue
        done[action] += 1
        if done.total() % _TOLD_EVERY == 0:
            print(f"{time.strftime('%X')} {dict(done)}", flush=True)
        clients.wait_for_answers(chance.randrange(4))
    target.wait_for_return()
    return done


def _body(model: str, text: str, **more: Any) -> dict[str, Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, "messages": [{"role": "user", "content": text}], **options, **more}


def _real_body(prompt: int) -> dict[str, Any]:
    return _body("tiny", f"Tell me story {prompt}", temperature=0, max_tokens=_REAL_TOKENS, ignore_eos=True)


def _undisturbed(url: str, prompt: int) -> str:
    attempt = Attempt("", "tiny", "")
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=_real_body(prompt), timeout=120) as response:
        for line in response.iter_lines():
            _read(line, attempt)
    return attempt.text
