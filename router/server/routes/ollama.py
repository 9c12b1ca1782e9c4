"""Ollama's API on top of the cascade. `page/device_models.py` pulls the models."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from ....protocol.decoding import read_object
from ....protocol.dialects.ollama_answers import CONTENT_TYPE, OllamaAnswer, embeddings_of, error_line, streamed_lines
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
from ....protocol.http.sse import TranslatedBody
from ....protocol.http.wire import WireResponse, off_event_loop
from ....protocol.responses import ModelCard
from ...responses.direct import embed as vectors
from ...responses.text_completion import complete
from ...state import ModelNames
from ...tiers.interfaces import ChatOnlyTier
from ...tiers.local import EngineLocalTier
from ...tiers.providers.registry import provider_of
from .route import RequestContext, Route, recorded, translated

#: Implemented version of the Ollama API. Clients require a minimum version for tools and reasoning.
_API_VERSION = "0.13.0"


async def answer(context: RequestContext, kind: type[OllamaChat] | type[OllamaGenerate]) -> WireResponse:
    request = context.request
    body = request.body
    asked = await off_event_loop(body, lambda: read_ollama_request(read_object(body, exact="arguments"), kind))
    converter = OllamaAnswer(asked)
    if not asked.messages:
        (await context.router.names()).card(model_name(asked.model))
        return WireResponse.json(converter.loaded())
    chat_request = await off_event_loop(body, lambda: msgspec.json.encode(chat_body(asked)))
    wire = replace(request, body=chat_request, hints=asked.hints, names=asked.names)
    is_bare = isinstance(asked, OllamaGenerate) and asked.is_bare

    def in_ollamas_form(made: WireResponse) -> WireResponse:
        if isinstance(made.body, bytes):
            return translated(made, converter.whole)
        headers = {**made.headers, "content-type": CONTENT_TYPE}
        lines = partial(streamed_lines, converter)
        return WireResponse(200, headers, TranslatedBody(made.body, lines, lambda error: error_line(error.message)))

    chat = context.router.chat
    return await (context.router.direct(wire, complete, in_ollamas_form) if is_bare else chat(wire, in_ollamas_form))


async def embed(context: RequestContext) -> WireResponse:
    asked = read_ollama_request(read_object(context.request.body), OllamaEmbed)
    if asked.input:
        return await _embed(context, asked)
    (await context.router.names()).card(model_name(asked.model))
    return WireResponse.json(embeddings_of(asked.model, {"data": []}, time.perf_counter_ns()))


async def _embed(context: RequestContext, asked: OllamaEmbed) -> WireResponse:
    started = time.perf_counter_ns()
    body: dict[str, Any] = {"model": model_name(asked.model), "input": asked.input, "encoding_format": "float"}
    if asked.dimensions is not None:
        body["dimensions"] = asked.dimensions
    wire = replace(context.request, body=msgspec.json.encode(body), hints=asked.hints, names=asked.names)

    def in_ollamas_form(made: WireResponse) -> WireResponse:
        return translated(made, lambda answer: embeddings_of(asked.model, answer, started))

    return await context.router.direct(wire, partial(vectors, truncate=asked.truncate), in_ollamas_form)


async def embed_one(context: RequestContext) -> WireResponse:
    asked = read_ollama_request(read_object(context.request.body), OllamaEmbedding)
    made = await _embed(context, OllamaEmbed(model=asked.model, input=asked.prompt, options=asked.options))
    return translated(made, lambda answer: {"embedding": answer["embeddings"][0], "updraft": answer["updraft"]})


async def list_models(context: RequestContext) -> WireResponse:
    names = await context.router.names()
    return WireResponse.json({"models": [_entry(names, card) for card in names.cards()]})


async def show(context: RequestContext) -> WireResponse:
    asked = read_ollama_request(read_object(context.request.body), OllamaShow)
    names = await context.router.names()
    card = names.card(model_name(asked.model))
    length = {"updraft.context_length": card.max_model_len} if isinstance(card.max_model_len, int) else {}
    info = {"general.architecture": "updraft", "general.basename": card.id, **length}
    capabilities = _capabilities(names, card)
    # Clients search the template for its variables. The model's own template is not in Ollama's template language.
    template = "{{ .System }}{{ .Tools }}{{ .Prompt }}" if "tools" in capabilities else "{{ .System }}{{ .Prompt }}"
    described = {"template": template, "capabilities": capabilities, "model_info": info}
    return WireResponse.json({**_entry(names, card), **described})


async def running(context: RequestContext) -> WireResponse:
    names = await context.router.names()
    local = names.tiers.local
    in_memory = local is not None and (not isinstance(local, EngineLocalTier) or local.loaded)
    cards = [names.card(local.model_id)] if local is not None and in_memory else []
    return WireResponse.json({"models": [{**_entry(names, card), "size_vram": 0} for card in cards]})


async def version(_: RequestContext) -> WireResponse:
    return WireResponse.json({"version": _API_VERSION})


def _entry(names: ModelNames, card: ModelCard) -> dict[str, Any]:
    """Describe a model without its file's path and size. Clients cache by digest, which all names of a model share."""
    modified = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    family = {"family": card.owned_by, "families": [card.owned_by]}
    details = {"parent_model": "", "format": "", **family, "parameter_size": "", "quantization_level": ""}
    named, local = names.config.aliases.get(card.id, card.id), names.tiers.local
    model = {"cloud": names.config.cloud_model, "local": local and local.model_id}.get(named, named)
    length = card.max_model_len if isinstance(card.max_model_len, int) else 0
    digest = hashlib.sha256(msgspec.json.encode([model, length, _capabilities(names, card)])).hexdigest()
    return {"name": card.id, "model": card.id, "modified_at": modified, "size": 0, "digest": digest, "details": details}


def _capabilities(names: ModelNames, card: ModelCard) -> list[str]:
    """Return a model's capabilities, by Ollama's names. Every cloud is assumed to support tools."""
    config, local = names.config, names.tiers.local
    if names.requested_tier(card.id) != "local" and config.cloud_url is not None:
        has_images = provider_of(config.cloud_provider, config.cloud_url).capabilities.images
        return ["completion", "tools", *(["vision"] if has_images else [])]
    if local is None:
        return ["completion"]
    has = {"tools": local.tool_format, "thinking": local.reasoning, "embedding": not isinstance(local, ChatOnlyTier)}
    return ["completion", *(name for name, value in has.items() if value)]


ROUTES = (
    Route("POST /api/chat", recorded(partial(answer, kind=OllamaChat)),
          "routed chat in Ollama's API; streamed unless `stream` is false", OllamaChat, streams=True),
    Route("POST /api/generate", recorded(partial(answer, kind=OllamaGenerate)),
          "one routed prompt in Ollama's API", OllamaGenerate, streams=True),
    Route("POST /api/embed", recorded(embed), "`/v1/embeddings` in Ollama's API", OllamaEmbed),
    Route("POST /api/embeddings", recorded(embed_one),
          "embedding of one text, for older Ollama clients", OllamaEmbedding),
    Route("GET /api/tags", list_models, "`/v1/models` in Ollama's API"),
    Route("GET /api/ps", running, "the device's model, if it is in memory"),
    Route("POST /api/show", show, "details of one model", OllamaShow),
    Route("GET /api/version", version, "the implemented version of the Ollama API"),
)  # fmt: skip
