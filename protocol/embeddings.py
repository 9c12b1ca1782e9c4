"""OpenAI's request and response types for `POST /v1/embeddings`."""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from .decoding import convert, prepare_types
from .errors import UnsupportedFeatureError
from .hints import Hints
from .prompts import Prompt, WirePrompts, prompts_of

MAX_INPUTS = 2048


class EmbeddingRequest(Hints, forbid_unknown_fields=True, kw_only=True):
    """Request body. `dimensions` is refused, because only some models are trained for shortened vectors."""

    model: str
    input: WirePrompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    @property
    def inputs(self) -> list[Prompt]:
        """Texts or token lists to embed. Raises InvalidRequestError if the input is malformed."""
        return prompts_of(self.input, "input", at_most=MAX_INPUTS)


prepare_types(EmbeddingRequest)


class Embedding(msgspec.Struct, kw_only=True):
    """One vector. `embedding` is a list of numbers, or base64 of little-endian float32 values."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


def read_embedding(fields: Mapping[str, Any]) -> EmbeddingRequest:
    """Check a decoded request. Raises InvalidRequestError or UnsupportedFeatureError."""
    request = convert(fields, EmbeddingRequest)
    if request.dimensions is not None:
        raise UnsupportedFeatureError(
            "dimensions is not supported: vectors have the model's own size. Leave dimensions out.", param="dimensions"
        )
    return request


def embedding_list(request: EmbeddingRequest, vectors: Sequence[Sequence[float]], num_tokens: int) -> EmbeddingList:
    """Build the response from `vectors`, given in the order of the inputs."""
    shown = base64_of if request.encoding_format == "base64" else list[float]
    return EmbeddingList(
        model=request.model,
        data=[Embedding(index=index, embedding=shown(vector)) for index, vector in enumerate(vectors)],
        usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
    )


def base64_of(vector: Sequence[float]) -> str:
    """Encode numbers as little-endian float32 values. Raises struct.error or OverflowError."""
    return b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def vector_of(text: str) -> list[float]:
    """Decode the result of `base64_of`. Raises struct.error or ValueError."""
    raw = b64decode(text, validate=True)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))
