"""`/tokenize`, `/detokenize` and token counts of chats; endpoints without gates: prompts, embeddings, cloud only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from .....protocol.dialects.chat_chunks import text_of
from .....protocol.embeddings import EmbeddingList, EmbeddingRequest
from .....protocol.errors import UnsupportedFeatureError, UpdraftError
from .....protocol.http.lenient_json import objects_of
from .....protocol.http.wire import WireResponse, off_event_loop
from .....protocol.requests import ChatRequest, CompletionRequest, read_chat
from .....protocol.responses import AnswerNotes, TextCompletion
from .....text.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TextEncoder,
    TokenizeRequest,
    TokenizeResponse,
    parse_detokenize,
    parse_tokenize,
    tokenized,
)
from ....request.chat_request import read_model
from ....responses.direct import DirectHandler, embed, forwarder, read_any_model
from ....responses.text_completion import complete
from ....router import BodyReader, read_json
from ..route import Handler, RequestContext, Route

T = TypeVar("T")
_CHARACTERS_PER_TOKEN = 4  # assumed by estimates


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: str | UnsetType = "response.input_tokens"
    # Note if another tokenizer than the model's own counted, or if the count is an estimate.
    updraft: AnswerNotes | UnsetType = UNSET


async def tokenize(context: RequestContext) -> WireResponse:
    body = context.request.body
    request = await off_event_loop(body, lambda: parse_tokenize(body))
    tokens = await _encoded(context, request.model, lambda encoder, length: tokenized(encoder, request, length))
    return WireResponse.json(tokens)


async def detokenize(context: RequestContext) -> WireResponse:
    def answer(encoder: TextEncoder, context_length: int) -> DetokenizeResponse:
        request = parse_detokenize(context.request.body, encoder.vocab_size, context_length)
        return DetokenizeResponse(encoder.decode(request.tokens, skip_special=False))

    return WireResponse.json(await _encoded(context, None, answer))


async def input_tokens(context: RequestContext) -> WireResponse:
    return WireResponse.json(await count_input(context, context.request.body))


async def count_input(context: RequestContext, chat: bytes) -> InputTokens:
    """Count the tokens of a chat with the device's tokenizer, even if the chat is for a cloud. If the device cannot
    count, estimate. Raises the errors of `read_chat`, and of `LocalTier` if the request names the device."""
    fields, model = await off_event_loop(chat, lambda: read_model(chat))
    tier = (await context.router.names()).requested_tier(model)
    may_estimate, counted = tier != "local", None
    with suppress(*(UnsupportedFeatureError,) * may_estimate):
        request = await off_event_loop(chat, lambda: read_chat(fields))
        with suppress(*(UpdraftError,) * may_estimate):
            named = None if tier == "cloud" else model
            counted = await _encoded(context, named, lambda encoder, _: _counted(encoder, request))
    if counted is None:
        note = "input_tokens: an estimate, since the device cannot count this request"
        return InputTokens(_estimate(fields), updraft=AnswerNotes(notes=[note]))
    note = "input_tokens: counted with the device's tokenizer, the cloud may count differently"
    return InputTokens(counted, updraft=AnswerNotes(notes=[note]) if tier == "cloud" else UNSET)


def _counted(encoder: TextEncoder, request: ChatRequest) -> int:
    tokens = encoder.encode_chat(
        request.messages,
        tools=() if request.tool_use is None else request.tool_use.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        template_options=request.chat_template_kwargs,
    )
    return len(tokens)


def _estimate(chat: dict[str, Any]) -> int:
    messages = objects_of(chat["messages"])
    return 1 + sum(len(text_of(message.get("content"))) for message in messages) // _CHARACTERS_PER_TOKEN


async def prompt_tokens(context: RequestContext, chat: bytes) -> int:
    """Return the number of tokens of a chat: counted by the device's tokenizer, or (for clouds) an estimate."""
    fields: dict[str, Any] = msgspec.json.decode(chat)
    with suppress(UpdraftError):
        if (await context.router.names()).requested_tier(fields["model"]) != "cloud":
            return (await count_input(context, chat)).input_tokens
    return _estimate(fields)


async def _encoded(context: RequestContext, model: str | None, work: Callable[[TextEncoder, int], T]) -> T:
    local = (await context.router.names()).device(model)
    return await local.with_encoder(lambda encoder: work(encoder, local.context_length))


ROUTES = (
    Route(
        "POST /tokenize",
        tokenize,
        "tokens of `prompt`, or of `messages` and `tools`, by the device's tokenizer, as in vLLM",
        TokenizeRequest,
        TokenizeResponse,
    ),
    Route("POST /detokenize", detokenize, "text of `tokens`, as in vLLM", DetokenizeRequest, DetokenizeResponse),
    Route(
        "POST /v1/chat/completions/input_tokens",
        input_tokens,
        "number of tokens of a chat, by the device's tokenizer, as in llama.cpp",
        ChatRequest,
        InputTokens,
    ),
)


def _direct(handler: DirectHandler, read: BodyReader = read_json) -> Handler:
    async def create(context: RequestContext) -> WireResponse:
        return await context.router.direct(context.request, handler, read=read)

    return create


COMPLETIONS = Route(
    "POST /v1/completions",
    _direct(complete),
    "answer to a bare prompt, without gates: from the cloud if there is one; with `local`, from the device",
    CompletionRequest,
    TextCompletion,
    streams=True,
)
EMBEDDINGS = Route(
    "POST /v1/embeddings",
    _direct(embed),
    "embeddings from the cloud if there is one; with `local`, the normalized hidden state of the last token",
    EmbeddingRequest,
    EmbeddingList,
)
_SUMMARY = "forwarded to a cloud that supports this endpoint; refused for `local` and private requests"
PASSED_ON = tuple(
    Route(f"POST /v1/{path}", _direct(forwarder(path, what), read_any_model), _SUMMARY, kind, form=kind is None)
    for path, what, kind in (
        ("moderations", "moderations", dict),
        ("rerank", "rankings", dict),
        ("audio/speech", "voices", dict),
        ("audio/transcriptions", "transcriptions", None),
        ("audio/translations", "translations", None),
        ("images/generations", "images", dict),
    )
)
