"""The node's routes: OpenAI requests in, one engine's answers out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...protocol import prometheus, sse
from ...protocol.embeddings import EmbeddingRequest, embedding_list, parse_embedding
from ...protocol.errors import (
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedFeatureError,
    UpdraftError,
)
from ...protocol.http import TENANT_HEADER, create_app, read_body, send, send_json, while_connected
from ...protocol.ids import new_id
from ...protocol.prompts import Prompt
from ...protocol.requests import ChatRequest, CompletionRequest, parse_chat, parse_completion
from ...protocol.responses import ModelCard, ModelList
from ...protocol.wire import WireResponse
from ...text.tokenizer import Tokenizer
from ..engine.request import GenerationRequest
from .answer import Piece, TokenSource, pieces, total_usage
from .embeddings import embed
from .fan_out import fan_out
from .formats import AnswerFormat, ChatFormat, TextFormat, joined
from .latency import Latencies
from .metrics import node_metrics
from .tokens import DetokenizeResponse, parse_detokenize, parse_tokenize, tokenized

_LONG_BODY = 2**16
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served:
    """`context_length`: tokens of prompt and answer together."""

    engine: TokenSource
    tokenizer: Tokenizer
    model_id: str
    context_length: int


@dataclass(frozen=True, slots=True)
class _Job:
    """A checked request: what to generate, for each of its prompts, and how to show it.

    `prompt_field`: what clients call the prompt.
    """

    generations: list[GenerationRequest]
    format: AnswerFormat
    stream: bool
    include_usage: bool
    prompt_field: str


def create_node_app(served: Served) -> FastAPI:
    """The engine is started and closed with the app."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        await served.engine.start()
        try:
            yield
        finally:
            await served.engine.close()

    app = create_app("Updraft node", lifespan=lifespan)
    node = _Node(served)
    app.add_route("/v1/chat/completions", node.chat, methods=["POST"])
    app.add_route("/v1/completions", node.complete, methods=["POST"])
    app.add_route("/v1/embeddings", node.embed, methods=["POST"])
    app.add_route("/tokenize", node.tokenize, methods=["POST"])
    app.add_route("/detokenize", node.detokenize, methods=["POST"])
    app.add_route("/v1/models", node.models, methods=["GET"])
    app.add_route("/v1/models/{model:path}", node.model, methods=["GET"])
    app.add_route("/health", node.health, methods=["GET"])
    app.add_route("/metrics", node.metrics, methods=["GET"])
    return app


class _Node:
    def __init__(self, served: Served) -> None:
        self._engine = served.engine
        self._tokenizer = served.tokenizer
        self._model_id = served.model_id
        self._context_length = served.context_length
        self._card = ModelCard(id=served.model_id, created=int(time.time()), max_model_len=served.context_length)
        self._latencies = Latencies()
        longest = max(len(self._tokenizer.token_bytes(token_id)) for token_id in range(self._tokenizer.vocab_size))
        self._max_prompt_bytes = longest * served.context_length

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, self._chat_job)

    async def complete(self, request: Request) -> Response:
        return await self._answer(request, self._completion_job)

    async def embed(self, request: Request) -> Response:
        body = await read_body(request)
        async with while_connected(request.receive):
            asked = parse_embedding(body)
            inputs = await _off_the_loop_if_long(body, lambda: self._inputs(asked))
            with _naming_the_prompt("input"):
                vectors = await embed(self._engine, inputs)
        return send_json(embedding_list(asked, vectors, sum(map(len, inputs))))

    async def tokenize(self, request: Request) -> Response:
        asked = parse_tokenize(await read_body(request))
        if asked.model is not None:
            self._check_model(asked.model)
        return send_json(await asyncio.to_thread(tokenized, self._tokenizer, asked, self._context_length))

    async def detokenize(self, request: Request) -> Response:
        asked = parse_detokenize(await read_body(request), self._tokenizer.vocab_size)
        if asked.model is not None:
            self._check_model(asked.model)
        return send_json(DetokenizeResponse(self._tokenizer.decode(asked.tokens, skip_special=False)))

    async def models(self, _request: Request) -> Response:
        return send_json(ModelList([self._card]))

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return send_json(self._card)

    async def health(self, _request: Request) -> Response:
        if self._engine.healthy:
            return send_json({"status": "ok", "model": self._model_id})
        error = EngineError(f"The engine is down: {self._engine.error or 'it is not running'}. Restart this node.")
        return send_json(error.to_body(), 503, error.headers())

    async def metrics(self, _request: Request) -> Response:
        metrics = node_metrics(self._engine.stats(), self._latencies, healthy=self._engine.healthy)
        return PlainTextResponse(prometheus.render(metrics), media_type=prometheus.CONTENT_TYPE)

    async def _answer(self, request: Request, make_job: Callable[[bytes, str], _Job]) -> Response:
        """Whatever fails before the first token is an HTTP error; a client that leaves aborts the work."""
        body, tenant = await read_body(request), request.headers.get(TENANT_HEADER.decode(), "")
        async with while_connected(request.receive):
            job = await _off_the_loop_if_long(body, lambda: make_job(body, tenant))
            answer = self._pieces(job)
            with _naming_the_prompt(job.prompt_field):
                first = await anext(answer)
            if not job.stream:
                rest = [piece async for piece in answer]
                return send_json(job.format.whole(joined([first, *rest])))
        return send(WireResponse(200, sse.HEADERS, _events(job, first, answer)), request)

    def _pieces(self, job: _Job) -> AsyncGenerator[Piece]:
        """The answers to all prompts of a job."""
        of_each = [self._latencies.watch(pieces(self._engine, self._tokenizer, asked)) for asked in job.generations]
        return of_each[0] if len(of_each) == 1 else _numbered_through(of_each, job.generations[0].n)

    def _chat_job(self, body: bytes, tenant: str) -> _Job:
        request = parse_chat(body)
        self._check(request, *(message.text for message in request.messages))
        prompt = self._tokenizer.encode_chat(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
        prediction = request.prediction.text if request.prediction else ""
        self._check_size("prediction", prediction)
        draft = self._tokenizer.encode(prediction)
        return self._job(request, [self._generation(request, prompt, tenant, draft)], ChatFormat)

    def _completion_job(self, body: bytes, tenant: str) -> _Job:
        request = parse_completion(body)
        self._check(request)
        prompts = self._token_ids(request.prompts, "prompt")
        return self._job(request, [self._generation(request, prompt, tenant, []) for prompt in prompts], TextFormat)

    def _inputs(self, request: EmbeddingRequest) -> list[list[int]]:
        self._check_model(request.model)
        return self._token_ids(request.inputs, "input")

    def _token_ids(self, prompts: list[Prompt], param: str) -> list[list[int]]:
        for prompt in prompts:
            self._check_size(param, prompt if isinstance(prompt, str) else "")
        return [self._tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _generation(
        self, request: ChatRequest | CompletionRequest, prompt: list[int], tenant: str, draft: list[int]
    ) -> GenerationRequest:
        return GenerationRequest(
            new_id("gen"),
            prompt,
            request.sampling(),
            draft,
            n=1 if request.n is None else request.n,
            priority=request.priority or 0,
            cache_salt=json.dumps([tenant, request.cache_salt or ""]),
        )

    def _job(
        self,
        request: ChatRequest | CompletionRequest,
        generations: list[GenerationRequest],
        make_format: type[ChatFormat | TextFormat],
    ) -> _Job:
        one = generations[0]
        usage = request.stream_options is not None and request.stream_options.include_usage
        shape = make_format(self._tokenizer, self._model_id, one.params.logprobs is not None, one.n, usage)
        prompt_field = "messages" if isinstance(request, ChatRequest) else "prompt"
        return _Job(generations, shape, request.stream, usage, prompt_field)

    def _check(self, request: ChatRequest | CompletionRequest, *texts: str) -> None:
        self._check_model(request.model)
        self._check_size("messages", *texts)
        if request.updraft is not None:
            raise UnsupportedFeatureError(
                "updraft options are for the router, this is an engine: leave them out.", param="updraft"
            )

    def _check_size(self, param: str, *texts: str) -> None:
        """Refuse what cannot fit before seconds are spent on tokenizing it. Templates may strip, but no more."""
        size = sum(len(text.strip().encode("utf-8", "replace")) for text in texts)
        if size > self._max_prompt_bytes:
            raise ContextLengthError(
                f"{param}: {size} bytes; this model's context cannot hold more than {self._max_prompt_bytes}.",
                param=param,
            )

    def _check_model(self, model: str) -> None:
        if model != self._model_id:
            raise ModelNotFoundError(
                f"The model {model!r} does not exist here; this server has {self._model_id!r}.", param="model"
            )


async def _numbered_through(of_each: list[AsyncGenerator[Piece]], n: int) -> AsyncGenerator[Piece]:
    """The answers to several prompts, `n` to each: those to the second come after those to the first, and so on."""
    async with aclosing(fan_out(of_each)) as answers:
        async for number, piece in answers:
            piece.prompt = number
            piece.index += number * n
            yield piece


async def _events(job: _Job, first: Piece, rest: AsyncGenerator[Piece]) -> AsyncGenerator[bytes]:
    """The answer as server-sent events. A failure on the way is an `error` event, and the stream ends there."""
    try:
        for chunk in job.format.opening():
            yield sse.event(chunk)
        yield sse.event(job.format.chunk(first))
        ends = [first]
        async for piece in rest:
            yield sse.event(job.format.chunk(piece))
            ends += [piece] if piece.finish_reason else []
        if job.include_usage:
            yield sse.event(job.format.usage_chunk(total_usage(ends)))
        yield sse.DONE
    except UpdraftError as error:
        yield sse.event(error.to_body())
    finally:
        await rest.aclose()


async def _off_the_loop_if_long(body: bytes, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if len(body) > _LONG_BODY else work()


@contextmanager
def _naming_the_prompt(field: str) -> Generator[None]:
    """What the engine says about the prompt is said about the field that clients have it in."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = field if error.param == "prompt" else error.param
        raise
