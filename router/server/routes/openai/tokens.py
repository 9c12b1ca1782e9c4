"""`/tokenize`, `/detokenize` and token counts of chats, by the tokenizer of the device's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from .....protocol.dialects.chat_chunks import text_of
from .....protocol.errors import UpdraftError
from .....protocol.http.lenient_json import objects_of
from .....protocol.http.wire import WireResponse, off_event_loop
from .....protocol.requests import ChatRequest, parse_chat
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
from ..route import RequestContext, Route

T = TypeVar("T")
_CHARACTERS_PER_TOKEN = 4  # for estimates


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: str = "response.input_tokens"


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
    """Count the tokens of a chat on the device's model. Raises the errors of `parse_chat` and `LocalTier`."""
    request = await off_event_loop(chat, lambda: parse_chat(chat))

    def answer(encoder: TextEncoder, _: int) -> InputTokens:
        tokens = encoder.encode_chat(
            request.messages,
            tools=() if request.tool_use is None else request.tool_use.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            template_options=request.chat_template_kwargs,
        )
        return InputTokens(len(tokens))

    return await _encoded(context, request.model, answer)


async def prompt_tokens(context: RequestContext, chat: bytes) -> int:
    """Return the number of tokens of a chat on the device's model, or an estimate if the device cannot count it."""
    try:
        return (await count_input(context, chat)).input_tokens
    except UpdraftError:
        messages = objects_of(msgspec.json.decode(chat)["messages"])
        return 1 + sum(len(text_of(message.get("content"))) for message in messages) // _CHARACTERS_PER_TOKEN


async def _encoded(context: RequestContext, model: str | None, work: Callable[[TextEncoder, int], T]) -> T:
    local = (await context.router.names()).device(model)
    return await local.with_encoder(lambda encoder: work(encoder, local.context_length))


ROUTES = (
    Route("POST", "/tokenize", tokenize,
          "tokens of `prompt`, or of `messages` and `tools`, on the device's model, as in vLLM", TokenizeRequest,
          TokenizeResponse),
    Route("POST", "/detokenize", detokenize, "`tokens` to `prompt`, as in vLLM", DetokenizeRequest, DetokenizeResponse),
    Route("POST", "/v1/chat/completions/input_tokens", input_tokens,
          "number of tokens of a chat on the device's model, as in llama.cpp", ChatRequest, InputTokens),
)  # fmt: skip
