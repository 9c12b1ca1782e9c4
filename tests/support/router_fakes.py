"""Fakes of the two tiers: a scripted local model, and a real HTTP server that misbehaves on request."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import struct
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ports import free_port
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from updraft.protocol.errors import ContextLengthError, EngineError
from updraft.protocol.sampling import SamplingDefaults
from updraft.router.config import RouterConfig
from updraft.router.factory import open_cloud, open_middle_tiers
from updraft.router.gates.gates import GateDecision
from updraft.router.state import Tiers
from updraft.router.tiers.interfaces import LocalAnswer
from updraft.text.chat import ChatTemplate

CLOUD_TEXT = "The cloud says hello."
LOCAL_TEXT = "one two three four five six"


@dataclass(frozen=True)
class FakeSignals:
    logprob: float = -0.05
    entropy: float = 0.1
    margin: float = 3.0


@dataclass(frozen=True)
class FakeToken:
    id: int
    text: str
    signals: FakeSignals
    top: tuple[tuple[int, float], ...] = ()


class FakeGeneration:
    def __init__(self, tier: ScriptedLocal, words: list[str], limit: int | None) -> None:
        self.answer = LocalAnswer(7, 5, sampling=tier.sampling, reasoning=tier.reasoning)
        self._tier = tier
        self._words = words if limit is None else words[:limit]
        self._cut = len(self._words) < len(words)
        self._closed = False

    def __aiter__(self) -> FakeGeneration:
        return self

    async def __anext__(self) -> FakeToken:
        index = len(self.answer.tokens)
        if self._closed or index == len(self._words):
            if not self._closed:
                self.answer.finish_reason = "length" if self._cut or self._tier.stop_reason else "stop"
                self.answer.stop_reason = self._tier.stop_reason
                self._tier.finished += 1
            raise StopAsyncIteration
        await asyncio.sleep(3600 if self._tier.hangs_at == index else self._tier.delay_s)
        if self._tier.fails_at == index:
            raise self._tier.error
        token = FakeToken(index, self._words[index], FakeSignals(), ((index, -0.05), (99, -3.0)))
        self.answer.tokens.append(token)
        self.answer.signals.append(token.signals)
        self.answer.text += token.text
        return token

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._tier.running -= 1


class FakeEncoder:
    """Tokenizer with one token per byte."""

    vocab_size = 256

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return list(text.encode())

    def encode_prompt(self, text: str) -> list[int]:
        return [0, *text.encode()]

    def encode_chat(self, messages: Sequence[Any], **_: Any) -> list[int]:
        return [token for message in messages for token in self.encode_prompt(message.text)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return bytes(ids).decode(errors="replace")


class ScriptedLocal:
    """A local tier that writes `text` word by word. If asked to continue a message, it writes the missing rest."""

    model_id = "fake-small"
    context_length = 512
    tool_format: Any = None
    reasoning: Any = None

    def __init__(self, text: str = LOCAL_TEXT, *, delay_s: float = 0.0) -> None:
        self.text = text
        self.delay_s = delay_s
        self.stop_reason: Any = None
        self.sampling = SamplingDefaults(temperature=0.25)
        self.too_long = False
        self.fails_at: int | None = None
        self.hangs_at: int | None = None
        self.error: Exception = RuntimeError("never set")
        self.started = 0
        self.finished = 0
        self.running = 0
        self.closed = False
        self.calls: list[tuple[list[Any], Any, bool]] = []
        self.options: list[dict[str, Any]] = []  # tools and constraint of each call

    async def start(
        self, messages: Sequence[Any], params: Any, *, continue_final_message: bool = False, **options: Any
    ) -> FakeGeneration:
        if self.too_long:
            raise ContextLengthError("The prompt has 9000 tokens, the context window 512.")
        self.calls.append((list(messages), params, continue_final_message))
        self.options.append(options)
        text = self.text
        if continue_final_message:
            text = text.removeprefix(messages[-1].text)
        words = re.findall(r"\s*\S+|\s+\Z", text)
        self.started += 1
        self.running += 1
        return FakeGeneration(self, words, params.max_tokens)

    async def start_text(self, prompt: Any, params: Any, *, constraint: Any = None) -> FakeGeneration:
        run = await self.start([prompt], params, constraint=constraint)
        run.answer.prompt_hidden = np.array([3.0, len(prompt)], np.float32)
        return run

    async def with_encoder(self, work: Any) -> Any:
        return await asyncio.to_thread(work, FakeEncoder())

    def token_bytes(self, token_id: int, *, skip_special: bool = False) -> bytes:
        return f"<{token_id}>".encode()

    async def aclose(self) -> None:
        self.closed = True


class ScriptedGates:
    """Gates with fixed decisions. Gate 2 escalates from `during_at` tokens on."""

    tokens = 2
    quality = None
    typical_p_gain = None

    def check(self, quality: float | None) -> None:
        pass

    def begin(self) -> ScriptedGates:
        return self

    def __init__(self, *, before: bool = False, during_at: int | None = None, after: bool = False) -> None:
        self._before, self._during_at, self._after = before, during_at, after

    def read_ahead(self, messages: Any) -> None:
        pass

    def read_lines(self, answer: str) -> None:
        pass

    def judge(self, gate: int, messages: Any, answer: LocalAnswer, quality: float | None) -> GateDecision:
        collapsed = self._during_at is not None and len(answer.tokens) >= self._during_at
        return self._verdict(gate, {1: self._before, 2: collapsed, 3: self._after}[gate])

    def _verdict(self, gate: int, escalate: bool) -> GateDecision:
        return GateDecision(gate, escalate, f"gate {gate}", 0.9 if escalate else 0.1, 0.5)


class SlowRun:
    """Like `LocalRun`: nothing more comes after `close`."""

    prompt_tokens = 3
    cached_tokens = 2
    prompt_hidden = np.zeros(4, dtype=np.float32)
    prompt_logprobs = np.zeros(2, dtype=np.float32)
    prompt_scores = None
    reasoning = None

    def __init__(self, engine: SlowEngine) -> None:
        self._engine = engine
        self._closed = False
        self._index = 0
        self.signals: list[Any] = []
        self.text = ""
        self.finish_reason: Any = None
        self.stop_reason: Any = None
        self.sampling = SamplingDefaults()
        self.answer_hidden: Any = None

    def __aiter__(self) -> SlowRun:
        return self

    async def __anext__(self) -> FakeToken:
        await asyncio.sleep(self._engine.delay_s)
        if self._closed:
            raise StopAsyncIteration
        index, self._index = self._index, self._index + 1
        if index == self._engine.fails_at:
            raise EngineError("decode failed")
        if index == self._engine.length:
            self.signals.append(FakeSignals())
            self.text += "held back"
            self.finish_reason = "stop"
            self.answer_hidden = np.ones(4, dtype=np.float32)
            raise StopAsyncIteration
        token = FakeToken(index, f"t{index} ", FakeSignals())
        self.signals.append(token.signals)
        self.text += token.text
        return token

    def close(self) -> None:
        self._engine.open -= not self._closed
        self._closed = True


class SlowEngine:
    model_id = "slow"
    context_length = 512
    hidden_size = 4
    tool_format = None
    reasoning = None
    chat_template = ChatTemplate("{{ messages }}")

    def __init__(self) -> None:
        self.length, self.delay_s, self.fails_at = 5, 0.0, -1
        self.open = self.most_open = 0
        self.closed = False
        self.lock = threading.Lock()

    def start(self, messages: Any, params: Any, **options: Any) -> SlowRun:
        if messages and messages[0].content == "long":
            raise ContextLengthError("too long")
        with self.lock:
            self.open += 1
            self.most_open = max(self.most_open, self.open)
        return SlowRun(self)

    def vocabulary(self) -> Any:
        raise NotImplementedError

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        return b"t"

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeCloud:
    """A real HTTP server. `mode`: behaviour from the next request on, such as `healthy`, `slow` or a status code."""

    url: str
    mode: str = "healthy"
    requests: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    sent_headers: list[dict[str, str]] = field(default_factory=list)  # request headers, decoded as Latin-1
    disconnects: int = 0
    delay_s: float = 0.0
    fail_after: int | None = None  # number of requests after which connections break
    owner: str = "updraft"  # `owned_by` of each model
    asked_for_models: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # headers of errors and of `says`
    says: tuple[int, *tuple[bytes, ...]] | None = None  # scripted reply to every chat request: status, then pieces

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.authorizations.append(request.headers.get("authorization"))
        self.sent_headers.append(dict(request.headers))
        if self.says is not None:
            status, *pieces = self.says
            streams = body.get("stream") and status == 200
            media_type = "text/event-stream" if streams else None
            return StreamingResponse(_one_by_one(pieces), status, self.headers, media_type)
        mode = self.mode
        if self.fail_after is not None and len(self.requests) > self.fail_after:
            mode = "reset"
        await asyncio.sleep(30 if mode == "slow" else self.delay_s)
        if mode == "no-prediction" and "prediction" in body:
            return JSONResponse(_error("Unrecognized request argument supplied: prediction"), 400)
        if mode.isdigit():
            return JSONResponse(_error(f"cloud error {mode}"), int(mode), self.headers)
        if mode == "garbage":
            return PlainTextResponse("<html>It works!</html>")
        if mode == "reset" and not body.get("stream"):
            raise ConnectionResetError
        text = CLOUD_TEXT
        if body.get("continue_final_message"):
            text = " and the cloud goes on."
        usage = _usage(body, text)
        if body.get("stream"):
            return StreamingResponse(self._events(text, usage, mode, request), media_type="text/event-stream")
        return JSONResponse(
            {
                "id": "cloud-1",
                "object": "chat.completion",
                "created": 1,
                "model": body["model"],
                "system_fingerprint": "fp_cloud",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": text},
                        "finish_reason": "stop",
                        "logprobs": None,
                    }
                ],
                "usage": usage,
            }
        )

    async def complete(self, request: Request) -> Response:
        """Answer a text completion with `CLOUD_TEXT`, streamed word by word or at once."""
        body = await request.json()
        self.requests.append(body)
        if self.mode.isdigit():
            return JSONResponse(_error(f"cloud error {self.mode}"), int(self.mode), self.headers)
        usage = _usage({}, CLOUD_TEXT)
        shell = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}

        async def events() -> AsyncIterator[bytes]:
            for word in re.findall(r"\s*\S+", CLOUD_TEXT):
                yield _data({**shell, "choices": [{"index": 0, "text": word, "finish_reason": None}]})
            yield _data({**shell, "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
            yield _data({**shell, "choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"

        if body.get("stream"):
            return StreamingResponse(events(), media_type="text/event-stream")
        choice = {"index": 0, "text": CLOUD_TEXT, "finish_reason": "stop", "logprobs": None}
        return JSONResponse({**shell, "choices": [choice], "usage": usage})

    async def other(self, request: Request) -> Response:
        """Record the request to any other endpoint. Return audio for speech, 404 for rerank, else the request body."""
        raw, kind = await request.body(), request.headers["content-type"]
        body = {"raw": raw.decode(errors="replace"), "type": kind} if "multipart" in kind else json.loads(raw)
        self.requests.append(body)
        if request.url.path.endswith("speech"):
            if body.get("stream_format") == "sse":
                events = [b"data: {}\n\n", b"data: [DONE]\n\n"]
                return StreamingResponse(_one_by_one(events), media_type="text/event-stream")
            return Response(b"RIFF\x00\xff", media_type="audio/wav")
        if request.url.path.endswith("rerank"):
            return JSONResponse(_error("no rankings here"), 404)
        return JSONResponse({"told": body, "usage": {"prompt_tokens": 3}})

    async def embed(self, request: Request) -> Response:
        """Return a one-dimensional vector per text, which holds the text's length, base64-encoded as by OpenAI."""
        body = await request.json()
        self.requests.append(body)
        if self.mode == "garbage":
            return JSONResponse({"object": "list"})
        if self.mode == "400":
            return JSONResponse(_error("cloud error 400"), 400)
        vectors = [struct.pack("<f", len(text)) for text in body["input"]]
        data = [
            {"object": "embedding", "index": index, "embedding": base64.b64encode(vector).decode()}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": 11, "total_tokens": 11}
        return JSONResponse({"object": "list", "model": body["model"], "data": data, "usage": usage})

    async def models(self, request: Request) -> Response:
        self.asked_for_models += 1
        cards = [
            {"id": name, "object": "model", "owned_by": self.owner} for name in ("pocket-large", "medium", "large")
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def _events(self, text: str, usage: Any, mode: str, request: Request) -> AsyncIterator[bytes]:
        if mode == "cut-before":
            yield _chunk({"role": "assistant", "content": ""})
            raise ConnectionResetError
        if mode == "garbage-stream":
            yield b"data: {not json}\n\n"
            return
        yield _chunk({"role": "assistant", "content": ""})
        try:
            for index, word in enumerate(text.split(" ")):
                if mode in ("cut", "reset") and index == 2:
                    raise ConnectionResetError
                if mode == "garbled" and index == 2:
                    yield b"data: {not json}\n\n"
                    return
                if mode == "hang" and index == 2:
                    await asyncio.Event().wait()
                if mode == "drip":
                    await asyncio.sleep(0.05)
                yield _chunk({"content": word if index == 0 else f" {word}"})
            yield _chunk({}, finish_reason="stop")
            yield _data({"id": "cloud-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [],
                         "usage": usage})  # fmt: skip
            yield b"data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.disconnects += 1
            raise


async def _one_by_one(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for index, piece in enumerate(pieces):
        await asyncio.sleep(0.05 if index else 0)
        yield piece


def _usage(body: dict[str, Any], text: str) -> dict[str, Any]:
    draft = body.get("prediction")
    proposed = len(draft["content"].split(" ")) if draft else 0
    written = len(text.split(" "))
    return {
        "prompt_tokens": 11,
        "completion_tokens": written,
        "total_tokens": 11 + written,
        "completion_tokens_details": {
            "accepted_prediction_tokens": min(2, proposed),
            "rejected_prediction_tokens": max(0, proposed - 2),
        },
    }


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


def _data(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def _chunk(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
    return _data({"id": "cloud-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})


@contextmanager
def running_cloud() -> Iterator[FakeCloud]:
    cloud = FakeCloud("")
    routes = [
        Route("/v1/chat/completions", cloud.chat, methods=["POST"]),
        Route("/v1/embeddings", cloud.embed, methods=["POST"]),
        Route("/v1/completions", cloud.complete, methods=["POST"]),
        Route("/v1/models", cloud.models),
        Route("/v1/{path:path}", cloud.other, methods=["POST"]),
    ]
    with serving(Starlette(routes=routes)) as cloud.url:
        yield cloud


def unused_url() -> str:
    """Return a URL at which no server listens."""
    return f"http://127.0.0.1:{free_port()}"


def tiers(local: ScriptedLocal | None, config: RouterConfig, gates: Any = None) -> Tiers:
    cloud = open_cloud(config)
    middle_tiers = () if cloud is None else open_middle_tiers(config)
    return Tiers(local, cloud, (gates or ScriptedGates()) if local is not None else None, middle_tiers=middle_tiers)
