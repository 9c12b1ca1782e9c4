"""Size of a request: its maximum token usage, and upper bounds on its fields."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ....accounting.token_estimate import LENGTH_FIELDS, LENGTHENING, NESTED, AnswerSize, answer_size, prompt_tokens
from ....protocol.decoding import UNREADABLE, prepare_types, refusal
from ....protocol.embeddings import MAX_INPUTS
from ....protocol.errors import InvalidRequestError, invalid_field
from ....protocol.http.lenient_json import object_of
from ....protocol.requests import MAX_ANSWERS, MAX_MESSAGES, check_message_count
from ....protocol.sampling import MAX_LOGPROBS

MAX_BIASES = 1024
MAX_DOCUMENTS = 10_000  # maximum documents per rerank request, as in Cohere's API
MAX_DEPTH = 32
MAX_SCHEMA_BYTES = 2**20
_TEXT = re.compile(rb'"[^"]*"')  # a string without escaped quotes
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_OPENINGS = (b'"', b"[", b"{")
_ITEM_BYTES = 3  # bytes of the shortest list item, `"",`
_DOCUMENTS = ("documents", "texts", "passages")  # field names of the documents; servers differ
_MAY_BE_TEXTS = ("guided_json", "json_schema", "structured_outputs")
_BOUNDS = {
    **dict.fromkeys(("n", "best_of"), MAX_ANSWERS),
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), MAX_LOGPROBS),
}
_INTEGERS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of")
_MAXIMA = frozenset(name for name in LENGTHENING if not name.startswith("min_"))
_NO_PROMPT = (b"", b"null", b'""', b"[]")
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_OBJECTS = re.compile(rb"\[\s*\{")
#: Fields that constrain the answer's format: OpenAI's (both APIs), vLLM's, llama.cpp's and Anthropic's.
_SCHEMAS = (
    *("response_format", "tools", "functions", "text", "structured_outputs", "guided_json", "json_schema"),
    *("output_format", "output_config", "tool_choice", "grammar", "guided_grammar", "guided_regex", "guided_choice"),
    *("stop", "stop_sequences"),
)
# Base of `SizeFields` with the fields whose values may have any type.
_AnyFields = msgspec.defstruct(
    "_AnyFields",
    [*((name, Any, None) for name in LENGTH_FIELDS), *((name, msgspec.Raw, msgspec.Raw()) for name in _SCHEMAS)],
)


class _Message(msgspec.Struct):
    """Any JSON object; its content is not read."""


class SizeFields(_AnyFields):
    """Request fields that decide the answer's length (`LENGTH_FIELDS`) or contain lists, whose length is limited."""

    max_tokens: int | float | None = None
    max_completion_tokens: int | float | None = None
    max_output_tokens: int | float | None = None
    n: int | float | None = None
    best_of: int | float | None = None
    logprobs: bool | int | float | None = None
    top_logprobs: int | float | None = None
    prompt_logprobs: int | float | None = None
    echo: Any = None
    prompt: msgspec.Raw = msgspec.Raw()
    prompt_embeds: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    texts: msgspec.Raw = msgspec.Raw()
    passages: msgspec.Raw = msgspec.Raw()
    messages: list[_Message] | None = None
    logit_bias: dict[str, msgspec.Raw] | None = None


prepare_types(SizeFields)
_SIZES = frozenset(SizeFields.__struct_fields__)
_LENGTHS = frozenset(LENGTH_FIELDS)


@dataclass(frozen=True, slots=True)
class RequestSize:
    # Upper bound on prompt tokens: one for each byte of the request (a reranker's query counts once per document), and
    # 1,500 for each attachment.
    prompt_tokens: int = 0
    # Maximum tokens of the answers.
    answer: AnswerSize = field(default_factory=lambda: AnswerSize(0))
    # Whether the answer repeats the prompt. An answer with text may then have no completion tokens.
    echoes: bool = False
    # Field or header that raises the price per token. Empty: none.
    surcharge: str = ""


def size_of(
    body: bytes, fields: SizeFields, path: str = "chat/completions", names: Iterable[str] = SizeFields.__struct_fields__
) -> RequestSize:
    """Return the size of a request to `path`. `names`: the field names that its body contains.

    Raises InvalidRequestError if a field exceeds one of the gateway's bounds.
    """
    lengths: dict[str, Any] = {}
    repeated = 0  # additional bytes of the query, which a reranker reads once per document
    for name in _SIZES.intersection(names):
        if (value := getattr(fields, name)) is None:
            continue
        if name in _LENGTHS:
            lengths[name] = value
            if name in _INTEGERS and isinstance(value, float) and not value.is_integer():
                raise refusal(f"Expected `int`, got `float` - at `$.{name}`")
        if name in _BOUNDS:
            _check(name, value, _BOUNDS[name])
        elif name == "input" or name in _DOCUMENTS:
            _check_items(name, items := bytes(getattr(fields, name)))
            if name in _DOCUMENTS and fields.query:
                repeated += (_num_items(items) - 1) * len(bytes(fields.query))
        elif name in _SCHEMAS and value:
            _check_depth(name, schema := bytes(getattr(fields, name)))
            _check_text(name, schema)
    scores_only = path == "completions" and (fields.echo is True or fields.prompt_logprobs is not None)
    _check_limits(lengths, 0 if scores_only and fields.max_tokens == 0 else 1)
    answer = answer_size(lengths, path, prompts=_num_prompts(fields))
    _check("prompt", answer.answers, MAX_ANSWERS, " answers in total")
    check_message_count(len(fields.messages or ()))
    _check("logit_bias", len(fields.logit_bias or ()), MAX_BIASES)
    return RequestSize(prompt_tokens(body, bytes_per_token=1) + repeated, answer, fields.echo is True)


def _check_limits(lengths: Mapping[str, Any], least: int) -> None:
    """Refuse limits below `least` tokens: some servers read 0 or -1 as "no limit", others refuse these values."""
    nested = {f"{name}.": object_of(lengths[name]) for name in NESTED if name in lengths}
    for prefix, table in {"": lengths, **nested}.items():
        for name in _MAXIMA.intersection(table):
            count = table[name]
            if isinstance(count, int | float) and not isinstance(count, bool) and count < least:
                raise invalid_field(prefix + name, f"{prefix}{name} must be at least {least}, got {count}.")


def _num_prompts(fields: SizeFields) -> int:
    """Return the number of prompts: texts, token lists and embeddings together. Each prompt gets its own answers."""
    given = map(bytes, (fields.prompt, fields.prompt_embeds))
    return max(1, sum(_num_items(each) for each in given if each not in _NO_PROMPT))


def _num_items(value: bytes) -> int:
    """Return the number of items in a JSON value; a single string or a list of token ids is one item."""
    if not value.startswith(b"[") or all(value.find(mark, 1) < 0 for mark in _OPENINGS):
        return 1
    return len(_LIST.decode(value))


def _check(name: str, count: float, most: int, of: str = "") -> None:
    if count > most:
        raise InvalidRequestError(
            f"{name}: got {count}{of}, but the limit is {most} per request.", param=name, code="invalid_value"
        )


def _check_items(name: str, value: bytes) -> None:
    """Check the number of texts, token lists, conversation items or documents."""
    most = MAX_DOCUMENTS if name in _DOCUMENTS else MAX_MESSAGES if _OBJECTS.match(value) else MAX_INPUTS
    if len(value) > most * _ITEM_BYTES:  # a list with fewer bytes cannot exceed the limit
        _check(name, _num_items(value), most, " items")


def _check_depth(name: str, given: bytes) -> None:
    """Check how deeply a schema is nested. Each round removes its innermost brackets."""
    if len(given) > MAX_SCHEMA_BYTES:
        raise InvalidRequestError(f"{name} is longer than {MAX_SCHEMA_BYTES} bytes.", param=name, code="invalid_value")
    unescaped = given.replace(b"\\\\", b"").replace(b'\\"', b"")  # every remaining quote starts or ends a string
    brackets = _TEXT.sub(b"", unescaped).translate(_SQUARE, _NO_BRACKETS)
    for _ in range(MAX_DEPTH):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise InvalidRequestError(
            f"{name} is nested more than {MAX_DEPTH} levels deep: flatten its schema.", param=name, code="invalid_value"
        )


def _check_text(name: str, given: bytes) -> None:
    """Check the nesting depth of a schema that is JSON inside a string."""
    if name == "structured_outputs" and given.startswith(b"{"):
        given = bytes(msgspec.json.decode(given, type=dict[str, msgspec.Raw]).get("json", b""))
    if name not in _MAY_BE_TEXTS or not given.startswith(b'"'):
        return
    try:
        written = msgspec.json.decode(given, type=str)
    except UNREADABLE as error:
        raise InvalidRequestError(f"{name} is not valid JSON: {error}", param=name, code="invalid_json") from error
    _check_depth(name, written.encode())
