"""Token estimates made before a request: prompt tokens, and the maximum length of the answer."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec

from ..protocol.decoding import UNREADABLE, integral
from ..protocol.errors import ContextLengthError
from ..protocol.http.lenient_json import object_of, objects_of

#: Minimum reservation and minimum cap of an answer, in tokens. Reservations of unlimited answers grow by this step.
STEP_TOKENS = 1024
#: Assumed maximum answer of a model whose own maximum is unknown.
LONGEST_ANSWER = 2**17
#: Estimated tokens of an image, audio clip or file.
ATTACHED_TOKENS = 1500
#: Upper bound on the tokens counted for one request, so that ledgers and accounts cannot overflow.
MAX_REQUEST_TOKENS = 2**40
#: Request fields that limit the answer, by API path. Other paths generate no text or are billed in other units.
LIMITS: Mapping[str, tuple[str, ...]] = {
    "chat/completions": ("max_tokens", "max_completion_tokens"),
    "completions": ("max_tokens",),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
}
#: Request fields that can lengthen an answer, or that limit an answer on some servers only.
LENGTHENING = (
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n_predict", "num_predict"),
    *("max_new_tokens", "max_length", "min_length", "min_new_tokens", "maxTokens", "maxOutputTokens"),
    *("max_gen_toks", "max_tokens_to_sample", "max_completion_length"),
)
#: API paths whose answers contain no generated text.
WRITES_NOTHING = (
    *("embeddings", "rerank", "score", "classify", "pooling", "moderations"),
    *("messages/count_tokens", "responses/input_tokens"),
)
#: Fields that multiply the number of answers.
MULTIPLYING = (
    *("n", "n_cmpl", "best_of", "num_return_sequences", "num_beams", "candidate_count", "candidateCount"),
    *("num_generations", "numResults"),
)
#: Nested objects in which servers accept length fields too.
NESTED = ("options", "parameters", "extra_body", "generation_config", "generationConfig", "sampling_params")
#: Objects with a reasoning budget, and the name of the budget's field.
THINKING = {"thinking": "budget_tokens", "reasoning": "max_tokens"}
#: Fields with a reasoning budget, in addition to the answer's limit.
THINKING_BUDGETS = (
    *("thinking_budget", "reasoning_budget", "thinking_budget_tokens", "thinking_token_budget"),
    *("max_thinking_tokens", "max_reasoning_tokens"),
)
#: Variables of chat templates, of which only `THINKING_BUDGETS` count: others may have the names of length fields.
TEMPLATE_VARIABLES = "chat_template_kwargs"
#: All fields that `answer_size` reads, apart from the prompts.
LENGTH_FIELDS = (
    *(*LENGTHENING, *MULTIPLYING, *NESTED, *THINKING, *THINKING_BUDGETS),
    *(TEMPLATE_VARIABLES, "prediction"),
)

_COUNTED = frozenset(LENGTH_FIELDS)
_ASCII = bytes(range(128))
_ESCAPE = 6  # characters of a JSON escape such as `\u20ac`
_ESCAPED_BYTES = 3  # maximum UTF-8 bytes of an escaped character
BYTES_PER_TOKEN = 3
_EXCEEDS_CONTEXT = re.compile(r"context (?:length|window|size)|`max_new_tokens` must be <=", re.IGNORECASE)
_TOO_LARGE = re.compile(r"too (?:large|high|big)|at most|maximum|less than|exceed|greater than|>", re.IGNORECASE)
_ATTACHED = (b'"file_id"', b'"file_data"', b'"data"', b";base64,")
# Attachments in messages: the type of the content part, and the path of keys to its data.
_PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("image_url", ("image_url", "url")),
    ("input_audio", ("input_audio", "data")),
    ("file", ("file", "file_data")),
    ("file", ("file", "file_id")),
    ("input_image", ("image_url",)),
    ("input_file", ("file_data",)),
    ("image", ("source", "data")),
    ("document", ("source", "data")),
)


def prompt_tokens(body: bytes, *, bytes_per_token: int = BYTES_PER_TOKEN) -> int:
    """Estimate the tokens of a JSON request. With `bytes_per_token=1`, the result is an upper bound.

    Non-ASCII characters always count by their bytes. An attachment counts `ATTACHED_TOKENS`.
    """
    attached, count = _attached_bytes(body) if any(map(body.__contains__, _ATTACHED)) else (0, 0)
    non_ascii = 0 if body.isascii() else len(body.translate(None, _ASCII))
    escaped = body.count(b"\\u")
    plain = max(0, len(body) - non_ascii - escaped * _ESCAPE - attached)
    return -(-plain // bytes_per_token) + non_ascii + escaped * _ESCAPED_BYTES + ATTACHED_TOKENS * count


def text_bytes(value: Any, skipped: Container[str] = ()) -> int:
    """Return the number of UTF-8 bytes in all strings of decoded JSON, at any depth. `skipped`: names of fields."""
    total, values = 0, [value]
    while values:
        value = values.pop()
        if isinstance(value, str):
            total += len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
        elif isinstance(value, dict):
            members = cast("dict[str, Any]", value)
            values.extend(each for name, each in members.items() if name not in skipped)
        elif isinstance(value, list):
            values.extend(cast("list[Any]", value))
    return total


@dataclass(frozen=True, slots=True)
class AnswerSize:
    """The maximum number and length of the answers to one request."""

    # Maximum tokens of one answer. None: no limit.
    limit: int | None = None
    # Number of answers to all prompts together.
    answers: int = 1
    # Tokens of the request's `prediction`: rejected tokens are billed in addition to the answers.
    beside: int = 0
    # Context length of the model, which bounds one answer too. None: unknown.
    context: int | None = None

    @property
    def least(self) -> int:
        """Tokens that a budget must have left for the request to be sent."""
        return self._total(STEP_TOKENS)

    @property
    def assumed(self) -> int:
        """Tokens of all answers if each reaches the request's limit. Without a limit in the request: `least`."""
        return self.least if self.limit is None else self.most(None)

    def most(self, longest: int | None) -> int:
        """Return the maximum tokens of all answers together. `longest`: the model's maximum per answer, if known. It
        counts only without a limit in the request, which is sent as it is, and which the model may reach."""
        longest = self.limit if self.limit is not None else longest or LONGEST_ANSWER
        return max(self.least, self._total(longest))

    def cap(self, tokens: int) -> int:
        """Return the limit per answer that keeps all answers together within `tokens`."""
        return max(1, (tokens - self.beside) // self.answers)

    def _total(self, longest: int) -> int:
        """Return the tokens of all answers, each of `longest` tokens or of the limit or the context if smaller."""
        each = min(bound for bound in (longest, self.limit, self.context) if bound is not None)
        return min(each * self.answers, MAX_REQUEST_TOKENS) + self.beside


def answer_size(fields: Mapping[str, Any], path: str, *, prompts: int | None = None) -> AnswerSize:
    """Read the size of the answers from a request to `path`. `prompts`: the number of prompts, if already counted."""
    if path not in LIMITS:
        return AnswerSize(0 if path in WRITES_NOTHING else STEP_TOKENS)
    lengths: list[int | None] = []
    answers, is_limited = 1, False
    tables: list[Mapping[str, Any]] = [fields]
    for table in tables:
        for name in table.keys() & _COUNTED:
            if (value := table[name]) is None:
                continue
            if name in LENGTHENING:
                lengths.append(_count(value))
                is_limited = is_limited or (table is fields and name in LIMITS[path])
            elif name in MULTIPLYING:
                answers = max(answers, _count(value) or 1)
            elif name in NESTED and table is fields:
                tables.append(object_of(value))
    limit = None
    if is_limited and None not in lengths:
        limit = max([1, *filter(None, lengths)]) + thinking_budget(fields)
    if prompts is None:
        given = fields.get("prompt")
        items = cast("list[Any]", given) if isinstance(given, list) else []
        prompts = len(items) if any(isinstance(each, str | list) for each in items) else 1
        embeds = fields.get("prompt_embeds")
        prompts += len(cast("list[Any]", embeds)) if isinstance(embeds, list) else 0
    beside = min(text_bytes(fields.get("prediction")), MAX_REQUEST_TOKENS)
    return AnswerSize(limit, min(answers * prompts, MAX_REQUEST_TOKENS), beside)


def thinking_budget(fields: Mapping[str, Any]) -> int:
    """Return the tokens that a request allows for reasoning, in addition to the answer's limit."""
    budgets = [object_of(fields.get(name)).get(budget) for name, budget in THINKING.items()]
    for table in (fields, *(object_of(fields.get(name)) for name in (*NESTED, TEMPLATE_VARIABLES))):
        budgets += [table.get(name) for name in THINKING_BUDGETS]
    return sum(_count(budget) or 0 for budget in budgets)


def capped(body: Mapping[str, Any], cap: int, limits: Sequence[str]) -> dict[str, Any]:
    """Return `body` with all length fields lowered to `cap`. If no field of `limits` is set, add the first."""
    named = any(body.get(name) is not None for name in limits)
    changed: dict[str, Any] = dict(body) if named else {**body, limits[0]: cap}
    nested = {name: dict(inner) for name in (*NESTED, TEMPLATE_VARIABLES) if (inner := object_of(body.get(name)))}
    changed |= nested
    for table in (changed, *nested.values()):
        if table is not nested.get(TEMPLATE_VARIABLES):
            table.update({name: _lower(table[name], cap) for name in LENGTHENING if table.get(name) is not None})
        table.update({name: max(1, cap - 1) for name in THINKING_BUDGETS if (_count(table.get(name)) or 0) >= cap})
    for name, budget in THINKING.items():  # reasoning counts towards the answer's limit
        thinking = object_of(body.get(name))
        if (_count(thinking.get(budget)) or 0) >= cap:
            changed[name] = {**thinking, budget: max(1, cap - 1)}
    return changed


def cap_fault(field: str, message: str, param: str | None, code: Any) -> Literal["too_large", "unsupported"] | None:
    """Return why a server refused a request whose length limit `field` holds a cap. None: for another reason.

    `message`, `param`, `code`: the server's error. Servers word "the prompt and the cap exceed my context" differently.
    """
    if code == ContextLengthError.default_code or _EXCEEDS_CONTEXT.search(message):
        return "too_large"
    if field not in f"{message} {param}":
        return None
    return "too_large" if _TOO_LARGE.search(message) else "unsupported"


def _lower(value: Any, cap: int) -> int:
    count = _count(value)
    return cap if count is None else min(count, cap)


def _count(value: Any) -> int | None:
    """Return `value` if it is an integer of at least 0, else None. Some servers read -1 as "no limit"."""
    count = integral(value)
    return count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else None


def _attached_bytes(body: bytes) -> tuple[int, int]:
    """Return the total size in bytes and the number of all attachments in messages; data elsewhere counts as text."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except UNREADABLE:
        return 0, 0
    sizes = [len(each) for each in _attached(fields)]
    return sum(sizes), len(sizes)


def _attached(fields: Mapping[str, Any]) -> Iterator[str]:
    messages = [*objects_of(fields.get("messages")), *objects_of(fields.get("input"))]
    parts = [part for message in messages for part in objects_of(message.get("content"))]
    for part in parts:
        if part.get("type") == "tool_result":
            parts += objects_of(part.get("content"))
        if object_of(part.get("source")).get("type") == "text":
            continue  # a document's plain text
        for kind, path in _PARTS:
            data: Any = part if part.get("type") == kind else None
            for name in path:
                data = object_of(data).get(name)
            if isinstance(data, str):
                yield data
