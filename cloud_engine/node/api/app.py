"""The node's HTTP routes: serves OpenAI-compatible requests with one engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ....protocol.decoding import read_object
from ....protocol.dialects.messages_events import message_of
from ....protocol.dialects.messages_request import read_count, read_message
from ....protocol.embeddings import EmbeddingRequest, embedding_list, read_embedding
from ....protocol.errors import InvalidRequestError, UpdraftError, invalid_value
from ....protocol.http import prometheus, sse
from ....protocol.http.access import Access
from ....protocol.http.app import (
    ATTEMPT_HEADER,
    TENANT_HEADER,
    WEIGHT_HEADER,
    TenantWeight,
    cancel_on_disconnect,
    create_app,
    error_response,
    read_body,
    send,
    send_json,
)
from ....protocol.http.server import DRAIN_S
from ....protocol.http.wire import WireResponse, off_event_loop
from ....protocol.responses import ModelCard, ModelList
from ....protocol.sampling import SamplingDefaults
from ....protocol.telemetry.tracing import Span, Tracer, usage
from ....text.grammars.check import GrammarCheck
from ....text.grammars.compiler import Vocabulary
from ....text.tokenization import DetokenizeResponse, TokenizeResponse, parse_detokenize, parse_tokenize, tokenized
from ....text.tokenizer import Tokenizer
from ....text.tool_formats import ToolFormat
from ...engine.types.request import GenerationRequest
from ..answers.answer_stream import Piece, pieces, total_usage
from ..answers.fan_out import fan_out
from ..answers.formats import joined
from ..answers.latency import Latencies
from ..answers.running_usage import TokenCounter, UnstreamedUsage
from ..registration import Registration
from .embeddings import embed
from .metrics import node_metrics
from .preprocessing import PreparedRequest, RequestPreprocessor, Tenant
from .responses import compacted, read_compact, read_prompt, read_stateless, translated

if TYPE_CHECKING:
    from ...engine.process.client import EngineClient

#: Seconds without a token after which a stream gets a comment, so that proxies keep the connection.
HEARTBEAT_S = 10.0
_ADMIN_PATHS = ("/sleep", "/wake_up", "/is_sleeping")


@dataclass(frozen=True, slots=True)
class NodeEngine:
    """An engine with the settings that a node needs to serve it."""

    engine: EngineClient
    tokenizer: Tokenizer
    model_id: str
    # Maximum tokens of prompt and answer together.
    context_length: int
    # Name of a `ToolFormat`; "auto" detects one in the chat template.
    tool_call_parser: str = "auto"
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    # Time for requests in flight to finish before the node sleeps, in seconds.
    drain_timeout_s: float = DRAIN_S


def create_node_app(
    served: NodeEngine, access: Access | None = None, registration: Registration | None = None
) -> FastAPI:
    """Create the node's app. It starts and closes the engine, and ends `registration` when a shutdown begins."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        await served.engine.start()
        if registration is not None:
            registration.start()
        try:
            yield
        finally:
            if registration is not None:
                await registration.leave()
            await served.engine.close()
            await node.close()

    access = replace(access or Access(), admin_paths=_ADMIN_PATHS)
    app = create_app("Updraft node", access=access, lifespan=lifespan)
    app.state.traffic.at_deadline = served.engine.close
    app.state.traffic.at_drain = None if registration is None else registration.leave
    node = _Node(served)
    app.add_route("/v1/chat/completions", node.chat, methods=["POST"])
    app.add_route("/v1/completions", node.complete, methods=["POST"])
    app.add_route("/v1/responses", node.respond, methods=["POST"])
    app.add_route("/v1/responses/compact", node.compact, methods=["POST"])
    app.add_route("/v1/responses/input_tokens", node.count_input, methods=["POST"])
    app.add_route("/v1/messages", node.message, methods=["POST"])
    app.add_route("/v1/messages/count_tokens", node.count_message, methods=["POST"])
    app.add_route("/v1/embeddings", node.embed, methods=["POST"])
    app.add_route("/tokenize", node.tokenize, methods=["POST"])
    app.add_route("/detokenize", node.detokenize, methods=["POST"])
    app.add_route("/spent/{attempt}", node.spent, methods=["GET"])
    app.add_route("/v1/models", node.models, methods=["GET"])
    app.add_route("/v1/models/{model:path}", node.model, methods=["GET"])
    app.add_route("/sleep", node.sleep, methods=["POST"])
    app.add_route("/wake_up", node.wake_up, methods=["POST"])
    app.add_route("/is_sleeping", node.is_sleeping, methods=["GET"])
    app.add_route("/health", node.health, methods=["GET"])
    app.add_route("/metrics", node.metrics, methods=["GET"])
    return app


class _Node:
    def __init__(self, served: NodeEngine) -> None:
        self._engine = served.engine
        self._drain_timeout_s = served.drain_timeout_s
        self._tokenizer = served.tokenizer
        self._context_length = served.context_length
        self._card = ModelCard(id=served.model_id, created=int(time.time()), max_model_len=served.context_length)
        self._latencies = Latencies()
        self._tracer = Tracer("updraft-node")
        self._spent = UnstreamedUsage()
        self._grammars = GrammarCheck(lambda: Vocabulary.of(served.tokenizer, served.tokenizer.eos_ids))
        tool_format = ToolFormat.of(served.tool_call_parser, served.tokenizer)
        about = served.model_id, served.context_length
        self._preprocessor = RequestPreprocessor(served.tokenizer, *about, tool_format, served.sampling)

    async def close(self) -> None:
        await self._grammars.close()

    async def chat(self, request: Request) -> Response:
        """Serve a chat completion. Chat templates render off the event loop, in another process."""
        return send(await self._answer(request, await read_body(request), self._chat_job), request, HEARTBEAT_S)

    async def respond(self, request: Request) -> Response:
        """Serve OpenAI's Responses API as a chat request. A node stores no responses, so requests must be complete."""
        body = await read_body(request)
        asked = await off_event_loop(body, lambda: read_stateless(body))
        answer = await self._answer(request, asked.chat, partial(self._chat_job, hints=asked.hints, names=asked.names))
        return send(translated(asked, answer), request, HEARTBEAT_S)

    async def compact(self, request: Request) -> Response:
        """Let the model summarize the conversation of a Responses request."""
        body = await read_body(request)
        chat = await off_event_loop(body, lambda: read_compact(body))
        return send(compacted(await self._answer(request, chat, self._chat_job)), request)

    async def count_input(self, request: Request) -> Response:
        """Count the prompt tokens of a Responses request."""
        body = await read_body(request)
        chat = await off_event_loop(body, lambda: read_prompt(body))
        count = await self._count_prompt(chat, _tenant(request))
        return send_json({"object": "response.input_tokens", "input_tokens": count})

    async def message(self, request: Request) -> Response:
        """Serve Anthropic's Messages API as a chat request."""
        body = await read_body(request)
        asked, chat = await off_event_loop(body, lambda: read_message(body))
        job = await self._chat_job(chat, _tenant(request), hints=asked.hints, names=asked.names)

        async def prompt_tokens() -> int:
            return len(job.generations[0].prompt_ids)

        async def prepared(_body: bytes, _tenant: Tenant) -> PreparedRequest:
            return job

        return send(message_of(asked, await self._answer(request, chat, prepared), prompt_tokens), request, HEARTBEAT_S)

    async def count_message(self, request: Request) -> Response:
        """Count the prompt tokens of a Messages request."""
        body = await read_body(request)
        chat = await off_event_loop(body, lambda: read_count(body))
        return send_json({"input_tokens": await self._count_prompt(chat, _tenant(request))})

    async def _count_prompt(self, chat: bytes, tenant: Tenant) -> int:
        job = await self._chat_job(chat, tenant)
        return len(job.generations[0].prompt_ids)

    async def _chat_job(
        self, body: bytes, tenant: Tenant, hints: tuple[str, ...] = (), names: Mapping[str, str] | None = None
    ) -> PreparedRequest:
        try:
            return await asyncio.to_thread(self._preprocessor.chat, body, tenant, hints, names)
        except UpdraftError as error:
            error.rename(names or {})
            raise

    async def complete(self, request: Request) -> Response:
        async def make_job(body: bytes, tenant: Tenant) -> PreparedRequest:
            return await off_event_loop(body, lambda: self._preprocessor.completion(body, tenant))

        return send(await self._answer(request, await read_body(request), make_job), request, HEARTBEAT_S)

    async def embed(self, request: Request) -> Response:
        body = await read_body(request)
        with cancel_on_disconnect(request):
            parsed, inputs = await off_event_loop(body, lambda: self._embedding(body))
            with _rename_prompt_param("input"):
                vectors = await embed(self._engine, inputs, _tenant(request))
        return send_json(embedding_list(parsed, vectors, sum(map(len, inputs))))

    def _embedding(self, body: bytes) -> tuple[EmbeddingRequest, list[list[int]]]:
        request = read_embedding(read_object(body))
        return request, self._preprocessor.inputs(request)

    async def tokenize(self, request: Request) -> Response:
        body = await read_body(request)
        return send_json(await asyncio.to_thread(self._tokenized, body))

    async def detokenize(self, request: Request) -> Response:
        body = await read_body(request)
        return send_json(await off_event_loop(body, lambda: self._detokenized(body)))

    def _tokenized(self, body: bytes) -> TokenizeResponse:
        request = parse_tokenize(body)
        self._preprocessor.check_model(request.model)
        self._preprocessor.check_size(request.param, *request.texts)
        return tokenized(self._tokenizer, request, self._context_length)

    def _detokenized(self, body: bytes) -> DetokenizeResponse:
        request = parse_detokenize(body, self._tokenizer.vocab_size, self._context_length)
        self._preprocessor.check_model(request.model)
        return DetokenizeResponse(self._tokenizer.decode(request.tokens, skip_special=False))

    async def spent(self, request: Request) -> Response:
        return send_json(self._spent.on(request.path_params["attempt"]))

    async def models(self, _request: Request) -> Response:
        return send_json(ModelList([self._card]))

    async def model(self, request: Request) -> Response:
        self._preprocessor.check_model(request.path_params["model"])
        return send_json(self._card)

    async def health(self, _request: Request) -> Response:
        if failure := self._engine.failure:
            return error_response(failure)
        return send_json({"status": "ok", "model": self._card.id})

    async def sleep(self, request: Request) -> Response:
        """Free memory until `/wake_up`; other nodes get the requests. Level 2 also ends the engine's process."""
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise invalid_value("level", "must be 1 or 2")
        await self._engine.sleep(int(level), self._drain_timeout_s)
        return send_json({"is_sleeping": True})

    async def wake_up(self, _request: Request) -> Response:
        await self._engine.wake()
        return send_json({"is_sleeping": False})

    async def is_sleeping(self, _request: Request) -> Response:
        return send_json({"is_sleeping": self._engine.sleep_level > 0})

    async def metrics(self, _request: Request) -> Response:
        metrics = node_metrics(self._engine.stats(), self._latencies, healthy=self._engine.failure is None)
        return PlainTextResponse(prometheus.render(metrics), media_type=prometheus.CONTENT_TYPE)

    async def _answer(
        self, request: Request, body: bytes, make_job: Callable[[bytes, Tenant], Awaitable[PreparedRequest]]
    ) -> WireResponse:
        """Answer a request. A failure before the first token is an HTTP error, but an event after `HEARTBEAT_S` seconds
        of a stream. A disconnect aborts the request."""
        tenant = _tenant(request)
        with cancel_on_disconnect(request):
            job = await make_job(body, tenant)
            constraint = job.generations[0].constraint  # the same for all prompts
            if constraint is not None:
                await self._grammars.check(constraint, tenant.id)
            span = self._tracer.request(request.scope["path"], request.headers)
            span.set({"gen_ai.request.model": self._card.id, "gen_ai.request.stream": job.stream})
            answer = _traced(self._pieces(job), span)
            if not job.stream and (attempt := request.headers.get(ATTEMPT_HEADER.decode())):
                answer = self._spent.watch(attempt, TokenCounter(job.generations), answer)
            if not job.stream:
                with _rename_prompt_param(job.prompt_field):
                    return WireResponse.json(job.format.whole(joined([piece async for piece in answer])))
            first = asyncio.create_task(_first(answer, job.prompt_field))
            try:
                await asyncio.wait([first], timeout=HEARTBEAT_S)
            except asyncio.CancelledError:
                first.cancel()
                raise
            if first.done():
                first.result()
        return WireResponse(200, sse.HEADERS, _events(job, first, answer))

    def _pieces(self, job: PreparedRequest) -> AsyncGenerator[Piece]:
        """Yield the answers to all prompts of a request."""
        started = time.perf_counter()  # measured from here, latencies include the wait for a place in the queue

        def answer(generation: GenerationRequest) -> AsyncGenerator[Piece]:
            return pieces(self._engine, self._tokenizer, generation, job.syntax, job.tokens)

        def of(generation: GenerationRequest) -> AsyncGenerator[Piece]:
            return self._latencies.watch(answer(generation), started)

        first = job.generations[0]
        if len(job.generations) == 1:
            return of(first)
        return _numbered_through([partial(of, generation) for generation in job.generations], first.n)


async def _traced(answer: AsyncGenerator[Piece], span: Span) -> AsyncGenerator[Piece]:
    """Yield the same pieces; end the span with their token usage or error."""
    ends, error = list[Piece](), ""
    try:
        async with aclosing(answer):
            async for piece in answer:
                ends += [piece] if piece.finish_reason else []
                yield piece
    except BaseException as failure:
        error = type(failure).__name__
        raise
    finally:
        counted = total_usage(ends)
        span.end(usage(counted.prompt_tokens, counted.completion_tokens), error=error)


async def _numbered_through(of_each: list[Callable[[], AsyncGenerator[Piece]]], n: int) -> AsyncGenerator[Piece]:
    """Yield the answers to several prompts, `n` each. Answers are numbered consecutively over all prompts."""
    async with aclosing(fan_out(of_each)) as answers:
        async for number, piece in answers:
            piece.prompt = number
            piece.index += number * n
            yield piece


async def _first(answer: AsyncGenerator[Piece], prompt_field: str) -> Piece:
    with _rename_prompt_param(prompt_field):
        return await anext(answer)


async def _events(
    job: PreparedRequest, first_piece: asyncio.Task[Piece], rest: AsyncGenerator[Piece]
) -> AsyncGenerator[bytes]:
    """Yield the answer as server-sent events. A failure is sent as an `error` event and ends the stream."""
    try:
        if not first_piece.done():
            yield sse.KEEP_ALIVE
        first = await first_piece
        for chunk in job.format.opening():
            yield sse.event(chunk)
        for chunk in job.format.chunks(first):
            yield sse.event(chunk)
        ends = [first]
        async for piece in rest:
            for chunk in job.format.chunks(piece):
                yield sse.event(chunk)
            ends += [piece] if piece.finish_reason else []
        if job.include_usage:
            yield sse.event(job.format.usage_chunk(total_usage(ends)))
        yield sse.DONE
    except UpdraftError as error:
        yield sse.event(error.to_body())
    finally:
        first_piece.cancel()
        await asyncio.wait([first_piece])
        await rest.aclose()


def _tenant(request: Request) -> Tenant:
    """Return the tenant that the gateway names. Callers without the node's key were refused already."""
    tenant, weight = (request.headers.get(name.decode(), "") for name in (TENANT_HEADER, WEIGHT_HEADER))
    try:
        return Tenant(tenant, msgspec.convert(weight or 1.0, TenantWeight, strict=False))
    except msgspec.ValidationError as error:
        raise invalid_value(WEIGHT_HEADER.decode(), "must be above 0 and at most 1000") from error


@contextmanager
def _rename_prompt_param(field: str) -> Generator[None]:
    """Replace `prompt` in the engine's errors by the name of the field that the client has sent."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = field if error.param == "prompt" else error.param
        raise
