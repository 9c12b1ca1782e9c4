"""Requests and responses of `/tokenize` and `/detokenize`, compatible with vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Unpack

import msgspec

from ..protocol.decoding import convert, decode, prepare_types, read_object
from ..protocol.errors import ContextLengthError, InvalidRequestError
from ..protocol.hints import Hints
from ..protocol.requests import Message, check_messages
from ..protocol.structured import RenderOptions, Tool, check_tools, function_tools
from ..protocol.turns import whole_turns
from .templates import tool_messages as tool_turns


class TextEncoder(Protocol):
    """Interface of a model's tokenizer with chat template, implemented by both engines."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, *, allow_special: bool = False) -> list[int]: ...
    def encode_prompt(self, text: str) -> list[int]:
        """Encode a prompt, adding the special tokens that the model expects around it."""
        ...

    def encode_chat(self, messages: Sequence[Message], **options: Unpack[RenderOptions]) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...


class TokenizeRequest(Hints, forbid_unknown_fields=True, kw_only=True):
    """Request to tokenize `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True  # for prompts only
    add_generation_prompt: bool = True  # for messages only, like `continue_final_message` and `tools`
    continue_final_message: bool = False
    tools: list[Tool] | None = None
    return_token_strs: bool = False

    @property
    def param(self) -> str:
        """Name of the field that is set, `prompt` or `messages`."""
        return "prompt" if self.messages is None else "messages"

    @property
    def texts(self) -> list[str]:
        """All texts to tokenize."""
        if self.messages is None:
            return [self.prompt or ""]
        return [*(message.text for message in self.messages), *tool_turns.texts(self.messages, self.tools or [])]


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Hints, forbid_unknown_fields=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


prepare_types(TokenizeRequest, DetokenizeRequest)


class DetokenizeResponse(msgspec.Struct):
    prompt: str


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Decode and check a request. Raises InvalidRequestError."""
    request = convert(function_tools(whole_turns(read_object(body), has_custom_tools=False)), TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("Give either prompt or messages.", param="prompt", code="invalid_value")
    if request.messages is not None:
        check_messages(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
    elif request.tools is not None:
        raise InvalidRequestError("tools need messages: leave tools out.", param="tools", code="invalid_value")
    check_tools(request.tools or ())
    return request


def parse_detokenize(body: bytes, vocab_size: int, context_length: int) -> DetokenizeRequest:
    """Decode and check a request. Raises InvalidRequestError; ContextLengthError above the context length."""
    request = decode(body, DetokenizeRequest)
    if len(request.tokens) > context_length:
        raise ContextLengthError(
            f"Got {len(request.tokens)} tokens; this model's context holds {context_length}: send them in parts.",
            param="tokens",
        )
    if not all(0 <= token < vocab_size for token in request.tokens):
        raise InvalidRequestError(f"Token ids must be between 0 and {vocab_size - 1}.", param="tokens")
    return request


def tokenized(tokenizer: TextEncoder, request: TokenizeRequest, context_length: int) -> TokenizeResponse:
    """Tokenize a request. In `token_strs`, a token with part of a character contains U+FFFD."""
    prompt = request.prompt or ""
    if request.messages is not None:
        tokens = tokenizer.encode_chat(
            request.messages,
            tools=request.tools or [],
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
    else:
        tokens = tokenizer.encode_prompt(prompt) if request.add_special_tokens else tokenizer.encode(prompt)
    texts = [tokenizer.decode([token], skip_special=False) for token in tokens] if request.return_token_strs else None
    return TokenizeResponse(len(tokens), context_length, tokens, texts)
