"""Ollama's API on top of the cascade. `page/device_models.py` pulls the models."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from .... import __version__
from ....protocol.decoding import decode, read_object
from ....protocol.dialects.bodies import TranslatedBody
from ....protocol.dialects.ollama_answers import CONTENT_TYPE, OllamaAnswer, embeddings_of, streamed_lines
from ....protocol.dialects.ollama_request import (
    OllamaChat,
    OllamaEmbed,
    OllamaEmbedding,
    OllamaGenerate,
    OllamaShow,
    chat_body,
    model_name,
    read_ollama_request,
)
from ....protocol.http.lenient_json import json_of
from ....protocol.http.wire import WireRequest, WireResponse, off_event_loop
from ....protocol.responses import ModelCard
from ...responses.embeddings import embed as vectors
from ...tiers.idle import UnloadingLocalTier
from .route import RequestContext, Route


async def chat(context: RequestContext) -> WireResponse:
    return await _answer(context, OllamaChat)


async def generate(context: RequestContext) -> WireResponse:
    return await _answer(context, OllamaGenerate)


async def _answer(context: RequestContext, kind: type[OllamaChat] | type[OllamaGenerate]) -> WireResponse:
    request = context.request
    asked = await off_event_loop(request.body, lambda: read_ollama_request(read_object(request.body), kind))
    answer = OllamaAnswer(asked)
    if not asked.turns:
        (await context.router.names()).card(model_name(asked.model))
        return WireResponse.json(answer.loaded())
    made = await context.router.chat(await off_event_loop(request.body, lambda: _chat(request, asked)))
    if made.status != 200:
        return made
    if isinstance(made.body, bytes):
        return WireResponse.json(answer.whole(json_of(made.body, exact=True)), headers=made.headers)
    headers = {**made.headers, "content-type": CONTENT_TYPE}
    return WireResponse(200, headers, TranslatedBody(made.body, lambda payloads: streamed_lines(answer, payloads)))


def _chat(request: WireRequest, asked: OllamaChat | OllamaGenerate) -> WireRequest:
    return replace(request, body=msgspec.json.encode(chat_body(asked)), effort_field="think")


async def embed(context: RequestContext) -> WireResponse:
    started = time.perf_counter_ns()
    asked = decode(context.request.body, OllamaEmbed)
    body: dict[str, Any] = {"model": model_name(asked.model), "input": asked.input, "encoding_format": "float"}
    if asked.dimensions is not None:
        body["dimensions"] = asked.dimensions
    made = await context.router.direct(replace(context.request, body=msgspec.json.encode(body)), vectors)
    if made.status != 200 or not isinstance(made.body, bytes):
        return made
    return WireResponse.json(embeddings_of(asked.model, msgspec.json.decode(made.body), started), headers=made.headers)


async def embed_one(context: RequestContext) -> WireResponse:
    asked = decode(context.request.body, OllamaEmbedding)
    body = msgspec.json.encode({"model": asked.model, "input": asked.prompt})
    made = await embed(replace(context, request=replace(context.request, body=body)))
    if made.status != 200 or not isinstance(made.body, bytes):
        return made
    [vector] = msgspec.json.decode(made.body)["embeddings"]
    return WireResponse.json({"embedding": vector}, headers=made.headers)


async def list_models(context: RequestContext) -> WireResponse:
    return WireResponse.json({"models": [_entry(card) for card in (await context.router.names()).cards()]})


async def show(context: RequestContext) -> WireResponse:
    asked = decode(context.request.body, OllamaShow)
    card = (await context.router.names()).card(model_name(asked.model))
    length = {"updraft.context_length": card.max_model_len} if isinstance(card.max_model_len, int) else {}
    info = {"general.architecture": "updraft", "general.basename": card.id, **length}
    return WireResponse.json({**_model_fields(card), "capabilities": ["completion", "tools"], "model_info": info})


async def running(context: RequestContext) -> WireResponse:
    names = await context.router.names()
    local = names.tiers.local
    in_memory = local is not None and (not isinstance(local, UnloadingLocalTier) or local.loaded)
    cards = [names.card(local.model_id)] if local is not None and in_memory else []
    return WireResponse.json({"models": [{**_entry(card), "size_vram": 0} for card in cards]})


async def version(_: RequestContext) -> WireResponse:
    return WireResponse.json({"version": __version__})


def _entry(card: ModelCard) -> dict[str, Any]:
    """Describe a model without its file, whose location and size stay private."""
    return {"name": card.id, "model": card.id, **_model_fields(card), "size": 0, "digest": ""}


def _model_fields(card: ModelCard) -> dict[str, Any]:
    modified = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    details = {"format": "", "family": card.owned_by, "parameter_size": "", "quantization_level": ""}
    return {"modified_at": modified, "details": details}


ROUTES = (
    Route("POST", "/api/chat", chat, "routed chat in Ollama's API; streamed unless `stream` is false", OllamaChat,
          streams=True),
    Route("POST", "/api/generate", generate, "one routed prompt in Ollama's API", OllamaGenerate, streams=True),
    Route("POST", "/api/embed", embed, "`/v1/embeddings` in Ollama's API", OllamaEmbed),
    Route("POST", "/api/embeddings", embed_one, "embedding of one text, for older Ollama clients", OllamaEmbedding),
    Route("GET", "/api/tags", list_models, "`/v1/models` in Ollama's API"),
    Route("GET", "/api/ps", running, "the device's model, if it is in memory"),
    Route("POST", "/api/show", show, "details of one model", OllamaShow),
    Route("GET", "/api/version", version, "the version of this server"),
)  # fmt: skip
