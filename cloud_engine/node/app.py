"""The node's routes: OpenAI requests in, one engine's answers out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...protocol import prometheus, sse
from ...protocol.errors import (
    ContextLengthError,
    ModelNotFoundError,
    UnsupportedFeatureError,
    UpdraftError,
)
from ...protocol.http import TENANT_HEADER, create_app, error_response, read_body, send, send_json, while_connected
from ...protocol.ids import new_id
from ...protocol.requests import ChatRequest, CompletionRequest, parse_chat, parse_completion
from ...protocol.responses import ModelCard, ModelList
from ...protocol.structured import Tool
from ...protocol.wire import WireResponse
from ...text import tool_turns
from ...text.tokenizer import Tokenizer
from ...text.tool_formats import ToolFormat
from ..engine.request import BeamParams, GenerationRequest
from .answer import Piece, TokenSource, pieces, total_usage
from .best_of import BestOf
from .formats import AnswerFormat, ChatFormat, TextFormat, joined
from .grammar_check import GrammarCheck
from .latency import Latencies
from .prompt_report import PromptReport, ReportedPrompt
from .tokens import DetokenizeResponse, TokenizeResponse, encode, parse_detokenize, parse_tokenize

_LONG_BODY = 2**16
_GAUGES = frozenset(
    {"running", "waiting", "kv_blocks_used", "kv_blocks_total", "kv_slots_wasted", "seconds_since_step"}
)


@dataclass(frozen=True, slots=True)
class Served:
    """`context_length`: tokens of prompt and answer together. `tool_parser`: how the model writes tool calls, a
    `ToolFormat`'s name; "auto" asks the chat template."""

    engine: TokenSource
    tokenizer: Tokenizer
    model_id: str
    context_length: int
    tool_parser: str = "auto"


@dataclass(frozen=True, slots=True)
class _Job:
    """A checked request: what to generate, and how to show it. `marks`: special tokens that are part of the text."""

    generation: GenerationRequest
    format: AnswerFormat
    stream: bool
    include_usage: bool
    marks: Mapping[int, str]


def create_node_app(served: Served) -> FastAPI:
    """The engine is started and closed with the app."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        await served.engine.start()
        try:
            yield
        finally:
            await served.engine.close()
            await node.close()

    app = create_app("Updraft node", lifespan=lifespan)
    app.state.traffic.at_deadline = served.engine.close
    node = _Node(served)
    app.add_route("/v1/chat/completions", node.chat, methods=["POST"])
    app.add_route("/v1/completions", node.complete, methods=["POST"])
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
        self._latencies = Latencies()
        self._grammars = GrammarCheck(served.tokenizer)
        auto = served.tool_parser == "auto"
        self._tool_format = (
            ToolFormat.detected(served.tokenizer) if auto else ToolFormat.named(served.tool_parser, served.tokenizer)
        )
        longest = max(len(self._tokenizer.token_bytes(token_id)) for token_id in range(self._tokenizer.vocab_size))
        self._max_prompt_bytes = longest * served.context_length

    async def close(self) -> None:
        await self._grammars.close()

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, self._chat_job)

    async def complete(self, request: Request) -> Response:
        return await self._answer(request, self._completion_job)

    async def tokenize(self, request: Request) -> Response:
        asked = parse_tokenize(await read_body(request))
        if asked.model is not None:
            self._check_model(asked.model)
        tokens = await asyncio.to_thread(encode, self._tokenizer, asked)
        return send_json(TokenizeResponse(len(tokens), self._context_length, tokens))

    async def detokenize(self, request: Request) -> Response:
        asked = parse_detokenize(await read_body(request), self._tokenizer.vocab_size)
        if asked.model is not None:
            self._check_model(asked.model)
        return send_json(DetokenizeResponse(self._tokenizer.decode(asked.tokens, skip_special=False)))

    async def models(self, _request: Request) -> Response:
        return send_json(ModelList([ModelCard(id=self._model_id)]))

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return send_json(ModelCard(id=self._model_id))

    async def health(self, _request: Request) -> Response:
        if failure := self._engine.failure:
            return error_response(failure)
        return send_json({"status": "ok", "model": self._model_id})

    async def metrics(self, _request: Request) -> Response:
        stats = self._engine.stats()
        metrics = [_metric(field.name, getattr(stats, field.name)) for field in fields(stats)]
        metrics.append(
            prometheus.Metric("updraft_engine_healthy", "gauge", "1 while serving", self._engine.failure is None)
        )
        text = prometheus.render([*metrics, *self._latencies.histograms])
        return PlainTextResponse(text, media_type=prometheus.CONTENT_TYPE)

    async def _answer(self, request: Request, make_job: Callable[[bytes, str], _Job]) -> Response:
        """Whatever fails before the first token is an HTTP error; a client that leaves aborts the work."""
        body, tenant = await read_body(request), request.headers.get(TENANT_HEADER.decode(), "")
        async with while_connected(request.receive):
            job = await asyncio.to_thread(make_job, body, tenant) if len(body) > _LONG_BODY else make_job(body, tenant)
            if job.generation.constraint is not None:
                await self._grammars.check(job.generation.constraint)
            answer = self._latencies.watch(pieces(self._engine, self._tokenizer, job.generation, job.marks))
            first = await anext(answer)
            if not job.stream:
                rest = [piece async for piece in answer]
                return send_json(job.format.whole(joined([first, *rest])))
        return send(WireResponse(200, sse.HEADERS, _events(job, first, answer)), request)

    def _chat_job(self, body: bytes, tenant: str) -> _Job:
        request = parse_chat(body)
        tools, form = self._tools(request)
        texts = tool_turns.texts(request.messages, tools)
        self._check(request, *(message.text for message in request.messages), *texts)
        prompt = self._tokenizer.encode_chat(
            request.messages,
            tools=tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
        prediction = request.prediction.text if request.prediction else ""
        self._check_size("prediction", prediction)
        generation = self._generation(request, prompt, tenant, self._tokenizer.encode(prediction))
        if form is None:
            return self._job(request, generation, ChatFormat(*self._shape(request)))
        constraint = form.constraint(tools, request.tool_choice, parallel=request.parallel_tool_calls is not False)
        generation = replace(generation, constraint=constraint)
        return self._job(request, generation, ChatFormat(*self._shape(request), form), marks=form.marks)

    def _tools(self, request: ChatRequest) -> tuple[list[Tool], ToolFormat | None]:
        """The tools that the model may call, and in which format."""
        if request.tools is None or request.tool_choice == "none":
            return [], None
        if self._tool_format is None:
            raise UnsupportedFeatureError(
                "tools: this model's chat template shows no format for tool calls that is known here. Leave tools out, "
                "or start the node with --tool-parser.",
                param="tools",
            )
        return request.tools, self._tool_format

    def _completion_job(self, body: bytes, tenant: str) -> _Job:
        request = parse_completion(body)
        self._check(request, request.prompt)
        prompt = self._tokenizer.encode_prompt(request.prompt)
        echo = request.prompt if request.echo else None
        generation = self._generation(request, prompt, tenant, [])
        return self._job(request, generation, TextFormat(*self._shape(request)), echo=echo)

    def _generation(
        self, request: ChatRequest | CompletionRequest, prompt: list[int], tenant: str, draft: list[int]
    ) -> GenerationRequest:
        params, beam = request.sampling(), None
        if request.use_beam_search:
            penalty = 1.0 if request.length_penalty is None else request.length_penalty
            beam = BeamParams(request.num_candidates, penalty)
        elif request.num_candidates > request.num_answers:
            params = replace(params, logprobs=params.logprobs or 0)  # to choose by
        return GenerationRequest(
            new_id("gen"),
            prompt,
            params,
            draft,
            n=request.num_answers if beam else request.num_candidates,
            beam=beam,
            priority=request.priority or 0,
            cache_salt=json.dumps([tenant, request.cache_salt or ""]),
            constraint=request.constraint(),
        )

    def _shape(self, request: ChatRequest | CompletionRequest) -> tuple[Tokenizer, str, bool, int]:
        return self._tokenizer, self._model_id, request.sampling().logprobs is not None, request.num_answers

    def _job(
        self,
        request: ChatRequest | CompletionRequest,
        generation: GenerationRequest,
        shape: AnswerFormat,
        *,
        marks: Mapping[int, str] | None = None,
        echo: str | None = None,
    ) -> _Job:
        params, n = request.sampling(), request.num_answers
        if params.prompt_logprobs is not None or echo is not None:
            prompts = [ReportedPrompt(generation.prompt_ids, echo)]
            shape = PromptReport(shape, self._tokenizer, prompts, n, request.prompt_logprobs)
        if generation.n > n:
            shape = BestOf(shape, n, generation.n)
        usage = request.stream_options is not None and request.stream_options.include_usage
        return _Job(generation, shape, request.stream, usage, marks or {})

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


def _metric(name: str, value: float) -> prometheus.Metric:
    text = name.replace("_", " ")
    if name in _GAUGES:
        return prometheus.Metric(f"updraft_engine_{name}", "gauge", f"{text}, now", value)
    return prometheus.Metric(f"updraft_engine_{name}_total", "counter", f"{text}, since the start", value)
